"""How soon programs of agents are complete, with and without sessions, simulated.

    python -m benchmarks.agent_programs               # some minutes
    python -m benchmarks.agent_programs --rates 0.5,1 --programs 200
    python -m benchmarks.agent_programs --at-once 64 --programs 192 --instructions 4000 --kinds 8

Llama 3 8B, by default on an A100-80G. Programs arrive at random. A program's next turn comes when
its answer is there and its tool has run. Its prompt is all that was said before, and the tool's
result. Programs of a kind begin with the same instructions. A program is complete with its last
answer.

With --at-once the load is closed: so many programs run at any time. When one is complete, the next
one begins. "Tokens a second" are those of all answers: of a closed load up to the time at which the
last program begins, so that as many programs run all the time. Every run gives the same figures.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from array import array
from collections import deque
from dataclasses import dataclass, field

from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.delivery import NewToken, OnJobEnd
from fastserve_backend.engine.loop_setup import LoopSetup
from fastserve_backend.job import FinishReason, Job, ServiceLevel
from fastserve_backend.kv_cache.session_history import SessionHistory
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.simulation.memory import memory_of_roofline
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock
from rich.console import Console
from rich.table import Table

from benchmarks.race_cells import SYSTEMS, System

MEAN_ANSWER, MEAN_TURNS, LONGEST = 150, 10, 30_000
HOST_GIB = 128.0
# Programs' own token ids begin here. Those of instructions are below.
FIRST_OWN_ID = 10**6
console = Console(width=140)
# Seconds that a tool runs: half of them up to the median, few of them very long.
MEDIAN_PAUSE_S, PAUSE_SIGMA, LONGEST_PAUSE_S = 4.0, 1.0, 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of programs, in tokens."""

    instructions: int = 1000
    """That all programs of a kind begin with."""
    kinds: int = 1
    """Programs are of each kind in turn."""
    mean_task: int = 4000
    """What the first turn adds to the instructions."""
    mean_result: int = 800
    """What the tool's result adds to each later turn."""


@dataclass(slots=True)
class Turn:
    added: int  # tokens of the prompt that are new
    answer: int
    pause_s: float  # of the tool after it


@dataclass(slots=True)
class Program:
    number: int
    begins_s: float
    instructions: range
    turns: list[Turn]
    prompt: array[int] = field(default_factory=lambda: array("i"))
    num_turns: int = 0  # that have begun
    ended_s: float = 0.0

    @property
    def paused_s(self) -> float:
        return sum(turn.pause_s for turn in self.turns[:-1])

    def begin_turn(self, number: int, arrival_s: float, *, has_sessions: bool) -> Job:
        turn = self.turns[self.num_turns]
        if not self.num_turns:
            self.prompt = array("i", self.instructions)
        # Tokens that no other program has.
        first = FIRST_OWN_ID + self.number * 10**5 + len(self.prompt)
        self.prompt += array("i", range(first, first + turn.added))
        self.num_turns += 1
        return Job(
            id=str(number),
            number=number,
            prompt_ids=self.prompt[:],
            params=SamplingParams(max_tokens=turn.answer, temperature=0, ignore_eos=True),
            arrival_s=arrival_s,
            service=ServiceLevel(session_id=f"p{self.number}" if has_sessions else ""),
        )

    def end_turn(self, job: Job) -> float | None:
        """When the next turn begins; None: the program is complete."""
        assert job.last_token_s is not None
        self.prompt = job.prompt_ids + job.output_ids
        if self.num_turns == len(self.turns):
            self.ended_s = job.last_token_s
            return None
        return job.last_token_s + self.turns[self.num_turns - 1].pause_s


def make_programs(count: int, rate: float, seed: int, shape: Shape) -> list[Program]:
    rng = random.Random(seed)
    programs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        turns: list[Turn] = []
        total = 0
        for _ in range(1 + min(50, int(rng.expovariate(1 / (MEAN_TURNS - 1))))):
            mean = shape.mean_result if turns else shape.mean_task
            added = 1 + min(12_000, int(rng.expovariate(1 / mean)))
            answer = 2 + min(1000, int(rng.expovariate(1 / MEAN_ANSWER)))
            total += added + answer + (0 if turns else shape.instructions)
            if turns and total > LONGEST:
                break
            pause_s = min(LONGEST_PAUSE_S, MEDIAN_PAUSE_S * rng.lognormvariate(0, PAUSE_SIGMA))
            turns.append(Turn(added, answer, pause_s))
        first = 1 + number % shape.kinds * shape.instructions
        instructions = range(first, first + shape.instructions)
        programs.append(Program(number, now, instructions, turns))
    return programs


class EndedJobs:
    """A ``Delivery`` without clients: notes the jobs that end."""

    is_empty = True

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def open_stream(self, job: Job) -> None: ...

    def add_token(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        if reason is not None:
            self.jobs.append(job)

    def flush_tokens(self, on_job_end: OnJobEnd) -> None: ...

    def end_stream(self, job: Job, reason: FinishReason, error: str | None = None) -> None: ...

    def end_all_streams(self, reason: FinishReason, error: str) -> list[Job]:
        return []


@dataclass(frozen=True, slots=True)
class Outcome:
    programs: list[Program]
    later_ttft_s: list[float]  # of all turns but each program's first
    counters: EngineCounters
    tokens_per_s: float
    """Of answers; of a closed load until its last program begins."""


def serve_programs(
    programs: list[Program],
    system: System,
    *,
    has_sessions: bool,
    at_once: int | None = None,
    **keys: object,
) -> Outcome:
    """Serve them on a virtual clock.

    Args:
        at_once: so many programs run at any time, and each later one begins when one is complete.
            Default: programs begin at their own times.
    """
    config = EngineConfig().with_keys(**{"swap_space_gib": HOST_GIB, **keys})
    latency, clock, delivery = system.latency, VirtualClock(), EndedJobs()
    memory = memory_of_roofline(latency, system.config, config.kv_cache)
    executor = SimulatedExecutor(latency, clock, memory.link)
    counters = EngineCounters(LatencyHistograms(config.scheduler.slo_ms / 1e3))
    history = SessionHistory(
        config.kv_cache.session_ttl_s, latency, inherits_age=config.scheduler.session_age
    )
    setup = LoopSetup(
        config.scheduler,
        config.kv_cache,
        latency,
        counters,
        system.max_model_len,
        sessions=history,
    )
    loop = setup.make_loop(
        memory,
        executor,
        delivery,
        clock,
        eos_token_ids=(),
        on_job_end=lambda job, reason: None,
        on_step_finished=lambda step, elapsed_s: None,
    )
    first = programs[:at_once]
    due = [(program.begins_s, program.number) for program in first]
    heapq.heapify(due)
    not_begun = deque(programs[len(first) :])
    counted_tokens, counted_s = 0, 0.0
    running: dict[int, Program] = {}
    later_ttft_s: list[float] = []
    num_jobs = 0
    while due or running:
        while due and due[0][0] <= clock.now():
            arrival_s, number = heapq.heappop(due)
            running[num_jobs] = programs[number]
            loop.jobs.add(
                programs[number].begin_turn(num_jobs, arrival_s, has_sessions=has_sessions)
            )
            num_jobs += 1
        executor.wake_s = due[0][0] if due else float("inf")
        if loop.is_idle:
            clock.advance_to(executor.wake_s)
            continue
        loop.run_cycle()
        for job in delivery.jobs:
            program = running.pop(job.number)
            assert job.first_token_s is not None
            assert job.last_token_s is not None
            if program.num_turns > 1:
                later_ttft_s.append(job.first_token_s - job.arrival_s)
            next_s = program.end_turn(job)
            if next_s is None and not_begun:
                program = not_begun.popleft()
                program.begins_s = next_s = job.last_token_s
                if not not_begun:
                    counted_tokens, counted_s = counters.generation_tokens, clock.now()
            if next_s is not None:
                heapq.heappush(due, (next_s, program.number))
        delivery.jobs.clear()
    if at_once is None:
        counted_tokens, counted_s = counters.generation_tokens, clock.now()
    return Outcome(programs, later_ttft_s, counters, counted_tokens / counted_s)


VARIANTS: dict[str, tuple[bool, dict[str, object]]] = {
    "fcfs": (False, {"policy": "fcfs"}),
    "fcfs, sessions": (True, {"policy": "fcfs"}),
    "gittins": (False, {}),
    "gittins, sessions": (True, {}),
    "gittins, sessions with age": (True, {"session_age": True}),
    "skip_join_mlfq, sessions": (True, {"policy": "skip_join_mlfq"}),
    "skip_join_mlfq, sessions with age": (
        True,
        {"policy": "skip_join_mlfq", "session_age": True},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shape = Shape()
    parser.add_argument("--system", choices=SYSTEMS, default="llama-3-8b a100-80g")
    parser.add_argument("--rates", default="0.4,0.6,0.8", help="programs a second")
    parser.add_argument("--at-once", type=int, help="a closed load of so many, not --rates")
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--kinds", type=int, default=shape.kinds, help="of instructions")
    parser.add_argument("--instructions", type=int, default=shape.instructions, help="tokens")
    parser.add_argument("--task", type=int, default=shape.mean_task, help="tokens, mean")
    parser.add_argument("--result", type=int, default=shape.mean_result, help="tokens, mean")
    parser.add_argument("--host-gib", type=float, default=HOST_GIB)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", help="names, separated by semicolons; default: all")
    arguments = parser.parse_args()
    at_once = arguments.at_once
    if at_once is not None and not 0 < at_once < arguments.programs:
        parser.error(f"--at-once: got {at_once}; must be from 1 to less than --programs")
    if arguments.kinds * arguments.instructions >= FIRST_OWN_ID:
        parser.error(f"--kinds times --instructions: must be below {FIRST_OWN_ID:,}")
    names = arguments.variants.split(";") if arguments.variants else list(VARIANTS)
    if at_once is not None:
        title = f"{arguments.programs} programs, {at_once} at once"
        console.print(table(title, names, arguments, rate=1.0))
        return
    for rate in map(float, arguments.rates.split(",")):
        title = f"{arguments.programs} programs, {rate:g} a second"
        console.print(table(title, names, arguments, rate))


def table(title: str, names: list[str], arguments: argparse.Namespace, rate: float) -> Table:
    """One row for each of the variants."""
    table = Table(title=title)
    for column in (
        "",
        "program, mean s",
        "of it waiting",
        "p90",
        "x first",
        "later TTFT, s",
        "p99",
    ):
        table.add_column(column)
    for column in ("tokens not computed", "tokens a second"):
        table.add_column(column)
    shape = Shape(arguments.instructions, arguments.kinds, arguments.task, arguments.result)
    first_s = None
    for name in names:
        has_sessions, keys = VARIANTS[name]
        programs = make_programs(arguments.programs, rate, arguments.seed, shape)
        if arguments.at_once is not None:
            for program in programs:
                program.begins_s = 0.0
        outcome = serve_programs(
            programs,
            SYSTEMS[arguments.system],
            has_sessions=has_sessions,
            at_once=arguments.at_once,
            swap_space_gib=arguments.host_gib,
            **keys,
        )
        lasted_s = sorted(one.ended_s - one.begins_s for one in programs)
        mean_s = statistics.mean(lasted_s)
        first_s = first_s or mean_s
        paused_s = statistics.mean(one.paused_s for one in programs)
        ttft_s = sorted(outcome.later_ttft_s)
        counters = outcome.counters
        reused = counters.prefix_cached_tokens + counters.session_hit_tokens
        table.add_row(
            name,
            f"{mean_s:.1f}",
            f"{mean_s - paused_s:.1f}",
            f"{lasted_s[len(lasted_s) * 9 // 10]:.0f}",
            f"{first_s / mean_s:.2f}",
            f"{statistics.mean(ttft_s):.2f}",
            f"{ttft_s[len(ttft_s) * 99 // 100]:.2f}",
            f"{reused / counters.prompt_tokens:.0%}",
            f"{outcome.tokens_per_s:,.0f}",
        )
    return table


if __name__ == "__main__":
    main()
