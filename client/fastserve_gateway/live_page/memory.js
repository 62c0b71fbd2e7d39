// The two tiers of KV memory, as bars.

const ON_HOST_ALONE = new Set(["swapped", "swapping_in"]);

export class Memory {
  constructor(find) {
    this.tiers = ["device", "host"].map((name) => ({
      name,
      text: find(`${name}-text`),
      bar: find(`${name}-bar`),
      parts: [...find(`${name}-bar`).children],
      shown: [],
    }));
    this.blockSize = find("block-size");
  }

  show(state) {
    const blocks = { running: 0, preempted: 0, swapped: 0, copies: 0 };
    for (const job of state.jobs) {
      blocks[job.state === "running" ? "running" : "preempted"] += job.device_blocks;
      blocks[ON_HOST_ALONE.has(job.state) ? "swapped" : "copies"] += job.host_blocks;
    }
    for (const tier of this.tiers) this.showTier(tier, state[tier.name], blocks);
    const size = `blocks of ${state.block_size} tokens`;
    if (this.blockSize.textContent !== size) this.blockSize.textContent = size;
  }

  showTier(tier, { used_blocks: used, num_blocks: all, shared_blocks: shared }, blocks) {
    // Shared blocks, and those of no listed job: of jobs that are not shown, or have just ended.
    let other = used;
    let end = 0;
    tier.parts.forEach((part, index) => {
      const name = part.dataset.part;
      const number = name === "other" ? Math.max(0, other) : blocks[name];
      other -= number;
      end += number;
      // Each part reaches from the start to its end, the first one on top.
      const share = all ? Math.min(1, end / all) : 0;
      if (tier.shown[index] !== share) part.style.transform = `scaleX(${(tier.shown[index] = share)})`;
    });
    const ofThem = shared ? `, ${shared} shared` : "";
    const text = all ? `${used} of ${all} blocks${ofThem}` : "none";
    if (tier.text.textContent !== text) {
      tier.text.textContent = text;
      tier.bar.setAttribute("aria-label", `${tier.name}: ${text} used`);
      tier.bar.dataset.used = used;
    }
  }
}
