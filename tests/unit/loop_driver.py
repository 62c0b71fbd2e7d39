"""The step loop on a virtual clock, with modelled ranks and a delivery that only counts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from delayed_masks import DelayedMasks
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.engine.delivery import NewToken, OnJobEnd
from fastserve_backend.engine.step_loop import StepLoop
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.costs import SwapCosts
from fastserve_backend.kv_cache.manager import KVManager
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.rank_protocol.link import NO_LINK, Link
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Step,
    StepResult,
)
from fastserve_backend.scheduler.base import Policy
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock
from remembering_ranks import Blocks, blocks_of_jobs

BLOCK_SIZE = 4
# Layers with windows alone, and beside layers without.
WINDOWED_KINDS = (
    (LayerKind(6, 1),),
    (LayerKind(None, 1), LayerKind(5, 2)),
    (LayerKind(None, 2), LayerKind(3, 1), LayerKind(9, 1)),
)
BLOCK_BYTES = 100
RECOMPUTE = KVCacheSection(strategy="recompute", prefix_caching=False)
NO_TIME = Link(1e-9, 1e-9)
MOST_CYCLES = 20_000  # far more than any test needs


class SimpleModel(LatencyModel):
    """An iteration takes 1 s for each token of its prefills, or 1 s if it has none."""

    def __init__(self, num_stages: int = 1) -> None:
        self.num_stages = num_stages

    def iteration_s(self, load: IterationLoad) -> float:
        return float(max(1, load.num_tokens - load.num_decodes))


class WatchedExecutor(SimulatedExecutor):
    """Checks that no unfinished step uses a block to which another job writes, unless it was sent
    after that, and that no block is swapped in while a step uses it. Records the submitted steps.

    Args:
        ahead: whether it takes a step while another runs.
    """

    def __init__(
        self,
        model: LatencyModel,
        clock: VirtualClock,
        link: Link,
        ahead: bool,
        kinds: Sequence[LayerKind] = ONE_GROUP,
        disk: Link = NO_LINK,
    ) -> None:
        super().__init__(model, clock, link, disk)
        # By step: for each of its jobs the blocks, and with which place those begin that it writes.
        self.blocks_in_use: dict[int, list[tuple[Blocks, int]]] = {}
        self.most_sharing = 0  # jobs of a step with one block
        self._kinds = kinds
        self.most_unfinished = 0
        self.num_partial = 0
        self.num_ahead = 0
        self._takes_ahead = ahead

    @property
    def can_submit_ahead(self) -> bool:  # type: ignore[override]
        is_alone = len(self._stage_free_s) == 1
        return self._takes_ahead and is_alone and len(self._unfinished) == 1

    def submit(self, step: Step) -> None:
        assert self.can_submit or self.can_submit_ahead
        tables = list(blocks_of_jobs(step, self._kinds, BLOCK_SIZE))
        users = Counter(block for table in tables for block in table.values())
        self.most_sharing = max(self.most_sharing, *users.values(), 0)
        running = list(chain.from_iterable(self.blocks_in_use.values()))
        rows = array("i", step.previous_rows)
        if not self.can_submit:
            self.num_ahead += 1
        first_written = [start // BLOCK_SIZE for start in array("i", step.starts)]
        for number, (table, first) in enumerate(zip(tables, first_written, strict=True)):
            written = {place: block for place, block in table.items() if place[1] >= first}
            assert len(set(table.values())) == len(table)
            assert all(users[block] == 1 for block in written.values()), "others read it"
            for row, (used, first_used) in enumerate(running):
                if number < len(rows) and rows[number] == row:
                    assert all(table[place] == used[place] for place in table.keys() & used.keys())
                own = {place for place in used if place[1] >= first_used}  # if it is the same job
                others = {block for place, block in used.items() if place not in own}
                others.update(used[place] for place in own if used[place] != written.get(place))
                assert others.isdisjoint(written.values()), "an earlier step uses it"
        self.blocks_in_use[step.step_id] = list(zip(tables, first_written, strict=True))
        self.most_unfinished = max(self.most_unfinished, len(self.blocks_in_use))
        self.num_partial += step.num_partial
        super().submit(step)

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        if isinstance(blocks, CopyBlocks) and not blocks.is_out:
            running = chain.from_iterable(self.blocks_in_use.values())
            used = (block for table, _ in running for block in table.values())
            assert set(array("i", blocks.device_blocks)).isdisjoint(used)
        super().copy(blocks)

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        result = super().collect(timeout_s)
        if isinstance(result, StepResult):
            del self.blocks_in_use[result.step_id]
        return result


class CountingDelivery:
    """Counts tokens and ends by job number. ``stop_after`` ends jobs like a stop word."""

    def __init__(self) -> None:
        self.num_tokens: Counter[int] = Counter()
        self.closed: list[tuple[int, FinishReason, str | None]] = []
        self.stop_after: dict[int, int] = {}
        self._open: dict[int, Job] = {}
        self._pending: list[tuple[Job, FinishReason | None]] = []

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def open_stream(self, job: Job) -> None:
        assert self.num_tokens[job.number] == 0
        self._open[job.number] = job

    def add_token(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        assert token.token_id == 0
        self._pending.append((job, reason))

    def flush_tokens(self, on_job_end: OnJobEnd) -> None:
        pending, self._pending = self._pending, []
        for job, reason in pending:
            if job.number not in self._open:
                continue
            self.num_tokens[job.number] += 1
            if self.num_tokens[job.number] == self.stop_after.get(job.number):
                reason = FinishReason.STOP
            if reason is not None:
                del self._open[job.number]
                on_job_end(job, reason)

    def end_stream(self, job: Job, reason: FinishReason, error: str | None = None) -> None:
        del self._open[job.number]
        self.closed.append((job.number, reason, error))

    def end_all_streams(self, reason: FinishReason, error: str) -> list[Job]:
        jobs = list(self._open.values())
        for job in jobs:
            self.end_stream(job, reason, error)
        return jobs


class Rig:
    """A step loop with everything around it, and methods that drive it."""

    most_cycles = MOST_CYCLES

    def __init__(
        self,
        policy: Policy,
        *,
        num_blocks: int = 100,
        num_host_blocks: int = 0,
        num_slots: int = 0,
        disk: Link = NO_LINK,
        link: Link = NO_TIME,
        num_stages: int = 1,
        kv_cache: KVCacheSection = RECOMPUTE,
        eos_token_ids: tuple[int, ...] = (),
        ahead: bool = False,
        masks: DelayedMasks | None = None,
        kinds: Sequence[LayerKind] = ONE_GROUP,
        rotary_switch: int | None = None,
        history: SessionHistory | None = None,
    ) -> None:
        self.masks = masks
        self.history = history
        self.rotary_switch = rotary_switch
        self.kinds = kinds
        self.clock = VirtualClock()
        self.ahead = ahead
        model = SimpleModel(num_stages)
        self.executor = self.make_executor(model, link)
        self.delivery = self.make_delivery()
        self.counters = EngineCounters(LatencyHistograms(slo_s=0.3))
        tiers = TwoTierKV(
            num_blocks,
            num_host_blocks,
            BLOCK_SIZE,
            incremental=kv_cache.incremental,
            kinds=kinds,
            step_tokens=policy.limits.job_tokens,
            num_disk_blocks=num_slots,
        )
        self.pool, self.host = tiers.device, tiers.host
        costs = SwapCosts(model, BLOCK_BYTES, link, disk)
        self.ends: list[tuple[int, FinishReason]] = []
        self.iterations_s: list[float] = []
        self.num_cycles = 0
        self.predict_s = lambda step: model.iteration_s(IterationLoad.of_step(step))
        self.loop = StepLoop(
            policy,
            KVManager(
                tiers,
                policy,
                kv_cache,
                costs,
                self.counters,
                rotary_switch=rotary_switch,
                history=history,
            ),
            self.executor,
            self.delivery,
            self.clock,
            eos_token_ids=eos_token_ids,
            counters=self.counters,
            predict_s=lambda step: self.predict_s(step),
            on_job_end=lambda job, reason: self.ends.append((job.number, reason)),
            on_step_finished=lambda step, elapsed_s: self.iterations_s.append(elapsed_s),
            mask_source=masks,
            rotary_switch=rotary_switch,
            check_integrity=True,
        )
        if masks is not None:
            masks.loop = self.loop

    def make_executor(self, model: LatencyModel, link: Link) -> WatchedExecutor:
        return WatchedExecutor(model, self.clock, link, self.ahead, self.kinds)

    def make_delivery(self) -> CountingDelivery:
        return CountingDelivery()

    def run_cycle(self, count: int = 1) -> float:
        """So many cycles; returns the time after them."""
        for _ in range(count):
            self.loop.run_cycle()
        return self.clock.now()

    def run(
        self, arrivals: Iterable[Job] = (), cancellations: dict[int, float] | None = None
    ) -> None:
        """Cycles until all is done: jobs arrive at their ``arrival_s``, and are cancelled at the
        first chance from these times on."""
        arriving = sorted(arrivals, key=lambda job: job.arrival_s)
        to_cancel = dict(cancellations or {})
        while arriving or self.loop.jobs or not self.loop.is_idle:
            now = self.clock.now()
            while arriving and arriving[0].arrival_s <= now:
                self.loop.jobs.add(arriving.pop(0))
            for number in [number for number, time_s in to_cancel.items() if time_s <= now]:
                self.loop.jobs.cancel(number)
                del to_cancel[number]
            if self.masks is not None:
                self.masks.deliver()
            next_s = arriving[0].arrival_s if arriving else float("inf")
            if self.loop.is_idle:
                if arriving and not self.loop.jobs:
                    self.clock.advance_to(next_s)
                continue
            self.executor.wake_s = next_s
            self.run_cycle()
            self.num_cycles += 1
            assert self.num_cycles < self.most_cycles, "the loop turns and nothing comes of it"
