// The queues as lanes, and the jobs in them. Places are computed and set as transforms. Nothing is
// measured meanwhile, so a picture forces no layout. Blocks glide to their places, because CSS
// animates the transform. With many of them only those that change lanes do.

const LABELS_PX = 116;
const COUNT_PX = 44;
const GAP_PX = 4;
const LABEL_FITS_PX = 30;
const FADE_MS = 300;
// The last queues are for jobs that most servers never see. They appear when a job reaches them.
const LEAST_LANES = 8;
const MOST_GLIDING = 48;
const NAMES = {
  waiting: "waiting, never ran",
  running: "running",
  preempted: "set aside",
  swapping_out: "moving to the host",
  swapped: "on the host",
  swapping_in: "coming back from the host",
};

export class Queues {
  constructor(lanes, tip, unlisted) {
    this.lanes = lanes;
    this.tip = tip;
    this.unlisted = unlisted;
    this.width = lanes.clientWidth;
    this.rows = [];
    this.numShown = LEAST_LANES;
    this.numPictures = 0;
    this.blocks = new Map(); // job number → its element and its state
    new ResizeObserver(() => (this.width = lanes.clientWidth)).observe(lanes);
    lanes.addEventListener("pointermove", (event) => this.showDetails(event));
    lanes.addEventListener("pointerleave", () => (tip.hidden = true));
    lanes.addEventListener("transitionend", ({ target }) => target.classList.remove("glide"));
  }

  show(state) {
    this.makeRows(state);
    const byLevel = state.levels.map(() => []);
    for (const job of state.jobs) byLevel[Math.min(job.level, byLevel.length - 1)].push(job);
    const seen = new Set();
    byLevel.forEach((jobs, level) => {
      jobs.sort((a, b) => a.number - b.number);
      this.placeLane(jobs, level);
      for (const job of jobs) seen.add(job.number);
    });
    for (const [number, block] of this.blocks) {
      if (!seen.has(number)) this.remove(number, block);
    }
    this.footnote(state);
    this.lanes.dataset.pictures = ++this.numPictures; // for tests
  }

  // For screen readers; not at each picture.
  describe(state) {
    const filled = state.levels
      .map((level, index) => [index + 1, level.num_jobs])
      .filter(([, number]) => number > 0)
      .map(([queue, number]) => `queue ${queue}: ${number}`);
    this.lanes.setAttribute("aria-label", filled.length ? `Jobs, ${filled.join(", ")}` : "No jobs");
  }

  footnote(state) {
    const more = state.running + state.waiting - state.jobs.length;
    const below = state.levels.length - this.rows.length;
    const notes = [];
    if (below > 0) notes.push(`${below} lower queue${below > 1 ? "s" : ""}, empty`);
    if (more > 0) notes.push(`${more} more jobs that are not shown`);
    const priorities = state.priorities ?? []; // older servers have none
    if (priorities.some(({ priority }) => priority !== 0)) {
      const counts = priorities.map(({ priority, num_jobs }) => `${priority}: ${num_jobs}`);
      notes.push(`jobs by priority, the lowest first: ${counts.join(", ")}`);
    }
    this.unlisted.hidden = notes.length === 0;
    setText(this.unlisted, notes.join(" · "));
  }

  makeRows({ levels, jobs }) {
    for (const { level } of jobs) this.numShown = Math.max(this.numShown, level + 2);
    const number = Math.min(this.numShown, levels.length);
    if (this.rows.length !== number) {
      this.height = number > 12 ? 28 : number > 9 ? 32 : 38;
      this.lanes.style.setProperty("--lane", `${this.height}px`);
      for (const { row } of this.rows) row.remove();
      this.rows = Array.from({ length: number }, (_, index) => makeRow(this.lanes, index));
    }
    this.rows.forEach(({ quantum, count }, index) => {
      const level = levels[index];
      setText(quantum, level.quantum_s === null ? "no quantum" : seconds(level.quantum_s));
      setText(count, level.num_jobs || "");
    });
  }

  placeLane(jobs, level) {
    const room = this.width - LABELS_PX - COUNT_PX;
    const widths = jobs.map(naturalWidth);
    const natural = widths.reduce((sum, width) => sum + width + GAP_PX, 0);
    const scale = Math.min(1, room / natural);
    let x = LABELS_PX;
    const y = level * this.height + 5;
    jobs.forEach((job, index) => {
      const step = (widths[index] + GAP_PX) * scale;
      const width = Math.max(2, Math.round(step - GAP_PX * Math.max(scale, 0.25)));
      this.place(job, Math.round(x), y, width);
      x += step;
    });
  }

  place(job, x, y, width) {
    let block = this.blocks.get(job.number);
    if (!block) {
      const element = document.createElement("div");
      element.className = "job";
      element.dataset.number = job.number;
      block = { element, job, x: NaN, y: NaN, width: NaN, state: "", isLate: false, label: "" };
      this.blocks.set(job.number, block);
      this.lanes.append(element);
    }
    block.job = job;
    const { style } = block.element;
    if (block.width !== width) style.width = `${(block.width = width)}px`;
    if (block.x !== x || block.y !== y) {
      const glides = block.y !== y || this.blocks.size <= MOST_GLIDING;
      if (glides && !Number.isNaN(block.x)) block.element.classList.add("glide");
      [block.x, block.y] = [x, y];
      style.transform = `translate(${x}px, ${y}px)`;
    }
    if (block.state !== job.state) block.element.dataset.state = block.state = job.state;
    const isLate = job.late_s > 0;
    if (block.isLate !== isLate) block.element.toggleAttribute("data-late", (block.isLate = isLate));
    const label = width >= LABEL_FITS_PX ? `${job.number}` : "";
    if (block.label !== label) block.element.textContent = block.label = label;
  }

  remove(number, { element }) {
    this.blocks.delete(number);
    element.classList.add("gone");
    setTimeout(() => element.remove(), FADE_MS);
  }

  showDetails(event) {
    const number = Number(event.target.dataset?.number);
    const job = this.blocks.get(number)?.job;
    this.tip.hidden = !job;
    if (!job) return;
    this.tip.textContent = [
      `Job ${job.number}: ${NAMES[job.state]}, queue ${job.level + 1}`,
      `${job.prompt_tokens} tokens of prompt, ${job.output_tokens} generated`,
      `own KV blocks: ${job.device_blocks} on the device, ${job.host_blocks} on the host`,
      `waited ${job.waited_s.toFixed(1)} s, set aside ${job.num_preemptions} times`,
      ...serviceLines(job),
    ].join("\n");
    const panel = this.tip.parentElement.getBoundingClientRect();
    const x = Math.min(event.clientX - panel.left + 12, panel.width - 312);
    this.tip.style.transform = `translate(${Math.max(0, x)}px, ${event.clientY - panel.top + 16}px)`;
  }
}

function makeRow(lanes, index) {
  const row = document.createElement("div");
  row.className = "lane";
  const [name, quantum, count] = ["b", "span", "em"].map((tag) => document.createElement(tag));
  name.textContent = `Q${index + 1}`;
  row.append(name, quantum, count);
  lanes.insertBefore(row, lanes.children[index] ?? null);
  return { row, quantum, count };
}

// A block is wider with more tokens, but not in proportion. The width grows in steps, so that a
// token more does not move all later blocks.
function naturalWidth(job) {
  return 14 + 3 * Math.round(3 * Math.log2(1 + (job.prompt_tokens + job.output_tokens) / 12));
}

// What the request wanted; nothing for a plain one. Older servers do not send these values.
function serviceLines({ priority = 0, tenant = "", ttft_slo_s = null, tpot_slo_s = null, late_s = null }) {
  const lines = [];
  if (priority !== 0) lines.push(`priority ${priority}`);
  if (tenant) lines.push(`tenant ${tenant}`);
  if (ttft_slo_s !== null) lines.push(`wanted: first token in ${seconds(ttft_slo_s)}`);
  if (tpot_slo_s !== null) lines.push(`wanted: each later token in ${seconds(tpot_slo_s)}`);
  if (late_s !== null) {
    lines.push(late_s > 0 ? `next token late by ${seconds(late_s)}` : `next token due in ${seconds(-late_s)}`);
  }
  return lines;
}

function seconds(value) {
  if (value >= 1) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const ms = value * 1000;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}
