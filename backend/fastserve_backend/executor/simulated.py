"""Modelled ranks: steps take the time that a latency model predicts, on a virtual clock."""

from __future__ import annotations

import math
from array import array
from collections import deque

from fastserve_backend.clock import VirtualClock
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.worker.messages import Ready, Setup, Step, StepResult


class SimulatedExecutor:
    """Answers every step with token 0. Waiting for a step moves the clock, and nothing else does.

    Pipeline stages as FastServe §4.3 has them: a batch holds one stage at a time, each for an equal
    share of its iteration, and enters a stage when the batch before it has left.
    """

    wake_s: float = math.inf
    """``collect`` returns at this time if the first stage is free: the next arrival."""

    def __init__(self, model: LatencyModel, clock: VirtualClock, num_blocks: int) -> None:
        self._model = model
        self._clock = clock
        self._num_blocks = num_blocks
        self._stage_free_s = [-math.inf] * model.num_stages
        self._unfinished: deque[tuple[float, StepResult]] = deque()  # (end of the step, result)

    def start(self, setup: Setup, timeout_s: float) -> Ready:
        return Ready(num_blocks=self._num_blocks, hardware="simulated", dtype=setup.dtype)

    @property
    def can_submit(self) -> bool:
        return self._first_stage_is_free and len(self._unfinished) < len(self._stage_free_s)

    @property
    def _first_stage_is_free(self) -> bool:
        return self._clock.now() >= self._stage_free_s[0]

    def submit(self, step: Step) -> None:
        load = load_of(step)
        total_s = self._model.iteration_s(load)
        stage_s = total_s / len(self._stage_free_s)
        end_s = self._clock.now()
        for stage, free_s in enumerate(self._stage_free_s):
            end_s = max(end_s, free_s) + stage_s
            self._stage_free_s[stage] = end_s
        result = StepResult(step.step_id, bytes(4 * load.num_sampled), total_s, b"", [])
        self._unfinished.append((end_s, result))

    def collect(self) -> StepResult | None:
        end_s, result = self._unfinished[0]
        if self.can_submit:
            next_s = self.wake_s
        elif self._first_stage_is_free:  # but as many batches as stages are under way
            next_s = end_s
        else:
            next_s = self._stage_free_s[0]
        if next_s < end_s:
            self._clock.advance_to(next_s)
            return None
        self._unfinished.popleft()
        self._clock.advance_to(end_s)
        return result

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


def load_of(step: Step) -> IterationLoad:
    """What the step computes."""
    counts = array("i", step.query_lens)
    num_sampling = len(counts) - step.num_partial
    return IterationLoad.of(
        (start, count, row < num_sampling)
        for row, (start, count) in enumerate(zip(array("i", step.starts), counts, strict=True))
    )
