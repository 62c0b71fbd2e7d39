"""Modelled ranks: steps take the time that a latency model predicts, on a virtual clock."""

from __future__ import annotations

import math
from array import array
from collections import deque

from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.rank_protocol.link import NO_LINK, Link
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Step,
    StepResult,
)
from fastserve_backend.system.clock import VirtualClock


class SimulatedExecutor:
    """Answers every step with tokens 0. Only ``collect`` moves the clock.

    Pipeline stages work as in FastServe §4.3: a batch is in one stage at a time, in each for an
    equal share of its iteration, and enters a stage when the batch before has left it. All stages
    copy their parts of a block at the same time. One copy runs in each direction of a link.

    Args:
        link: between device and host.
        disk: between host and disk.
    """

    can_submit_ahead = False
    """There is no gap between two steps that a step ahead could hide."""
    wake_s: float = math.inf
    """Time of the next arrival. ``collect`` returns then, if the first stage is free."""

    def __init__(
        self, model: LatencyModel, clock: VirtualClock, link: Link, disk: Link = NO_LINK
    ) -> None:
        self._model = model
        self._clock = clock
        self._link, self._disk = link, disk
        self._stage_free_s = [-math.inf] * model.num_stages
        self._unfinished: deque[tuple[float, StepResult]] = deque()  # (end of the step, result)
        # By link and direction: (end of the copy, result), the first to end first.
        self._copies: dict[tuple[bool, bool], deque[tuple[float, CopyResult]]] = {
            (is_disk, is_out): deque() for is_disk in (True, False) for is_out in (True, False)
        }

    @property
    def can_submit(self) -> bool:
        return self._first_stage_is_free and len(self._unfinished) < len(self._stage_free_s)

    @property
    def _first_stage_is_free(self) -> bool:
        return self._clock.now() >= self._stage_free_s[0]

    def submit(self, step: Step) -> None:
        load = IterationLoad.of_step(step)
        total_s = self._model.iteration_s(load)
        if step.prompt_rows:
            total_s += self._model.score_s(sum(one.num_rows for one in step.prompt_rows))
        stage_s = total_s / len(self._stage_free_s)
        end_s, waited_s = self._clock.now(), 0.0
        for stage, free_s in enumerate(self._stage_free_s):
            begin_s = max(end_s, free_s)
            if stage > 0:
                waited_s += begin_s - end_s
            self._stage_free_s[stage] = end_s = begin_s + stage_s
        result = StepResult(step.step_id, bytes(4 * load.num_sampled), total_s, b"", [], waited_s)
        self._unfinished.append((end_s, result))

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        is_disk = isinstance(blocks, DiskCopy)
        is_out = blocks.is_write if isinstance(blocks, DiskCopy) else blocks.is_out
        copies, link = self._copies[is_disk, is_out], self._disk if is_disk else self._link
        each_s = link.block_out_s if is_out else link.block_in_s
        seconds = each_s * len(array("i", blocks.host_blocks))
        now = self._clock.now()
        begin_s = max(now, copies[-1][0]) if copies else now
        copies.append((begin_s + seconds, CopyResult(blocks.transfer_id, seconds, None)))

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        step_s = self._unfinished[0][0] if self._unfinished else math.inf
        copies = min(self._copies.values(), key=lambda copies: copies[0][0] if copies else math.inf)
        copy_s = copies[0][0] if copies else math.inf
        if self.can_submit:
            next_s = self.wake_s
        elif self._first_stage_is_free:  # but there are as many unfinished batches as stages
            next_s = math.inf
        else:
            next_s = self._stage_free_s[0]
        if timeout_s is not None:
            next_s = min(next_s, self._clock.now() + timeout_s)
        end_s = min(step_s, copy_s)
        if next_s < end_s:
            self._clock.advance_to(next_s)
            return None
        self._clock.advance_to(end_s)
        if step_s <= copy_s:
            return self._unfinished.popleft()[1]
        return copies.popleft()[1]

    def check(self) -> None:
        """Modelled ranks do not die."""
