"""How soon an urgent job has its first token beside long jobs that fill seats and KV memory.

    python -m benchmarks.urgent_job                   # a minute or two
    python -m benchmarks.urgent_job --policy fcfs

The real engine with the embedded model on this machine's CPU. 64 long jobs share 16 seats, and KV
memory for about half of the jobs of an iteration at their ends. Now and then a short job arrives:
once with the priority of the long jobs, and once more urgent.

Short jobs arrive while the engine's thread sends an iteration. So the engine chooses every later
iteration with the job in its queue. "Iterations" are those later ones, up to the one that gives the
job's first token. The iteration that is sent at the arrival is part of the time, but not of the
number. The answers of both runs are compared.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.job import JobOutput, JobStats, ServiceLevel
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    CopyResult,
    DiskCopy,
    Step,
    StepResult,
)
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.registry import BUILT_IN_POLICIES
from rich.console import Console
from rich.table import Table

NUM_LONG, NUM_URGENT = 64, 8
SEATS, DEVICE_BLOCKS = 16, 60
LONG_TOKENS, URGENT_TOKENS = 64, 8
STEPS_BETWEEN = 20  # between arrivals of short jobs
DEADLINE_S = 120.0
console = Console(width=110)

Prompt = Sequence[int]


class SentStep(NamedTuple):
    sent_s: float
    is_beside_copy: bool
    """Whether blocks are still copied between the tiers."""


class TimedSteps(DistributedExecutor):
    """Real ranks. Notes when each step was sent, on the engine's clock, and beside which copies."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[SentStep] = []
        self._num_copies = 0
        self.on_sent: Callable[[], None] | None = None
        """Called on the engine's thread after each step."""

    def submit(self, step: Step) -> None:
        self.sent.append(SentStep(time.monotonic(), self._num_copies > 0))
        super().submit(step)
        if self.on_sent is not None:
            self.on_sent()

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        self._num_copies += 1
        super().copy(blocks)

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        result = super().collect(timeout_s)
        self._num_copies -= isinstance(result, CopyResult)
        return result


@dataclass(frozen=True)
class UrgentRun:
    """What ``run_urgent_jobs`` saw."""

    iterations: list[int]
    """For each short job those that were sent after its arrival, until its first token."""
    without_copies: list[int]
    """Of these the ones that were sent while no blocks were copied between the tiers."""
    first_token_s: list[float]
    answers: list[list[int]]
    """The tokens of the long jobs, then those of the short ones."""
    counters: EngineCounters


class _Answer:
    """A sink that keeps the tokens."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._end: queue.SimpleQueue[JobStats | None] = queue.SimpleQueue()

    def __call__(self, output: JobOutput) -> None:
        self.token_ids += output.token_ids
        if output.finish_reason is not None:
            self._end.put(output.stats)

    def wait(self) -> JobStats:
        stats = self._end.get(timeout=DEADLINE_S)
        assert stats is not None
        return stats


def run_urgent_jobs(
    config: EngineConfig,
    long_prompts: Sequence[Prompt],
    urgent_prompts: Sequence[Prompt],
    priority: int,
    *,
    long_tokens: int = LONG_TOKENS,
    urgent_tokens: int = URGENT_TOKENS,
    check_integrity: bool = False,
) -> UrgentRun:
    """Run long jobs of priority 0, and beside them short ones of ``priority``.

    Args:
        long_tokens, urgent_tokens: output tokens of each job, greedy.
    """
    executor = TimedSteps()
    engine = Engine(config, make_executor=lambda: executor, check_integrity=check_integrity)
    urgent: list[_Answer] = []
    all_arrived = threading.Event()
    step_numbers = itertools.count(1)

    def submit(prompt: Prompt, num_tokens: int, priority: int) -> _Answer:
        answer = _Answer()
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        engine.submit("job", prompt, params, answer, service=ServiceLevel(priority=priority))
        return answer

    def send_urgent() -> None:
        if next(step_numbers) % STEPS_BETWEEN or all_arrived.is_set():
            return
        urgent.append(submit(urgent_prompts[len(urgent)], urgent_tokens, priority))
        if len(urgent) == len(urgent_prompts):
            all_arrived.set()

    try:
        executor.on_sent = send_urgent
        long = [submit(prompt, long_tokens, 0) for prompt in long_prompts]
        if not all_arrived.wait(DEADLINE_S):
            raise TimeoutError(f"the short jobs have not arrived within {DEADLINE_S:g} s")
        for answer in long:
            answer.wait()
        stats = [answer.wait() for answer in urgent]
    finally:
        engine.close()
    waits = [_steps_until_first(one, executor.sent) for one in stats]
    return UrgentRun(
        iterations=[len(steps) for steps in waits],
        without_copies=[sum(not one.is_beside_copy for one in steps) for steps in waits],
        first_token_s=[_first_token_s(one) for one in stats],
        answers=[answer.token_ids for answer in [*long, *urgent]],
        counters=engine.counters,
    )


def random_prompts(count: int, ids: range, tokens: range, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.choice(ids) for _ in range(rng.choice(tokens))] for _ in range(count)]


def _steps_until_first(stats: JobStats, sent: Sequence[SentStep]) -> list[SentStep]:
    """Those that were sent after the job's arrival, up to the one with its first token."""
    assert stats.first_scheduled_s is not None
    after = [step for step in sent if step.sent_s > stats.arrival_s]
    return after[: sum(step.sent_s < stats.first_scheduled_s for step in after) + 1]


def _first_token_s(stats: JobStats) -> float:
    assert stats.first_token_s is not None
    return stats.first_token_s - stats.arrival_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", choices=list(BUILT_IN_POLICIES), default="gittins")
    args = parser.parse_args()
    config = EngineConfig().with_keys(
        model=EMBEDDED_MODEL,
        policy=args.policy,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=SEATS,
        device_blocks=DEVICE_BLOCKS,
        swap_space_gib=0.25,
    )
    ids = range(300, 40_000)
    long = random_prompts(NUM_LONG, ids, range(16, 65), seed=0)
    urgent = random_prompts(NUM_URGENT, ids, range(16, 65), seed=1)
    runs = {priority: run_urgent_jobs(config, long, urgent, priority) for priority in (0, -1)}
    table = Table(title=f"{NUM_URGENT} short jobs beside {NUM_LONG} long ones, {args.policy}")
    for heading in ("priority", "iterations", "most", "first token, s", "most", "recomputed jobs"):
        table.add_column(heading, justify="right")
    for priority, run in runs.items():
        table.add_row(
            str(priority),
            f"{statistics.median(run.iterations):g}",
            str(max(run.iterations)),
            f"{statistics.median(run.first_token_s):.3f}",
            f"{max(run.first_token_s):.3f}",
            str(run.counters.recomputed_jobs),
        )
    console.print(table)
    same = "the same" if runs[0].answers == runs[-1].answers else "NOT the same"
    console.print(f"The answers of both runs are {same}.")


if __name__ == "__main__":
    main()
