"""How soon programs of agents are complete, with and without sessions, simulated.

    python -m benchmarks.agent_programs               # some minutes
    python -m benchmarks.agent_programs --rates 0.5,1 --programs 200

Llama 3 8B on an A100-80G. Programs arrive at random. A program's next turn comes when its answer is
there and its tool has run. Its prompt is all that was said before, and the tool's result. All
programs begin with the same instructions. A program is complete with its last answer.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from array import array
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

from benchmarks.race_cells import SYSTEMS

SYSTEM = SYSTEMS["llama-3-8b a100-80g"]
INSTRUCTIONS = 1000  # tokens that all programs begin with
MEAN_TASK, MEAN_ANSWER, MEAN_RESULT = 4000, 150, 800
MEAN_TURNS, LONGEST = 10, 30_000
HOST_GIB = 128.0
console = Console(width=140)
# Seconds that a tool runs: half of them up to the median, few of them very long.
MEDIAN_PAUSE_S, PAUSE_SIGMA, LONGEST_PAUSE_S = 4.0, 1.0, 120.0


@dataclass(slots=True)
class Turn:
    added: int  # tokens of the prompt that are new
    answer: int
    pause_s: float  # of the tool after it


@dataclass(slots=True)
class Program:
    number: int
    begins_s: float
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
            self.prompt = array("i", range(1, INSTRUCTIONS + 1))
        # Tokens that no other program has.
        first = 10**6 + self.number * 10**5 + len(self.prompt)
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


def make_programs(count: int, rate: float, seed: int) -> list[Program]:
    rng = random.Random(seed)
    programs, now = [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        turns: list[Turn] = []
        total = 0
        for _ in range(1 + min(50, int(rng.expovariate(1 / (MEAN_TURNS - 1))))):
            mean = MEAN_RESULT if turns else MEAN_TASK
            added = 1 + min(12_000, int(rng.expovariate(1 / mean)))
            answer = 2 + min(1000, int(rng.expovariate(1 / MEAN_ANSWER)))
            total += added + answer + (0 if turns else INSTRUCTIONS)
            if turns and total > LONGEST:
                break
            pause_s = min(LONGEST_PAUSE_S, MEDIAN_PAUSE_S * rng.lognormvariate(0, PAUSE_SIGMA))
            turns.append(Turn(added, answer, pause_s))
        programs.append(Program(number, now, turns))
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


def serve_programs(programs: list[Program], *, has_sessions: bool, **keys: object) -> Outcome:
    """Serve them on a virtual clock."""
    config = EngineConfig().with_keys(swap_space_gib=HOST_GIB, **keys)
    latency, clock, delivery = SYSTEM.latency, VirtualClock(), EndedJobs()
    memory = memory_of_roofline(latency, SYSTEM.config, config.kv_cache)
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
        SYSTEM.max_model_len,
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
    due = [(program.begins_s, program.number) for program in programs]
    heapq.heapify(due)
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
            if next_s is not None:
                heapq.heappush(due, (next_s, program.number))
        delivery.jobs.clear()
    return Outcome(programs, later_ttft_s, counters)


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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rates", default="0.4,0.6,0.8", help="programs a second")
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", help="names, separated by semicolons; default: all")
    arguments = parser.parse_args()
    names = arguments.variants.split(";") if arguments.variants else list(VARIANTS)
    for rate in map(float, arguments.rates.split(",")):
        table = Table(title=f"{arguments.programs} programs, {rate:g} a second")
        for column in ("", "program, mean s", "of it waiting", "p90", "x fcfs", "later TTFT, s"):
            table.add_column(column)
        table.add_column("p99")
        table.add_column("tokens not computed")
        fcfs_s = None
        for name in names:
            has_sessions, keys = VARIANTS[name]
            programs = make_programs(arguments.programs, rate, arguments.seed)
            outcome = serve_programs(programs, has_sessions=has_sessions, **keys)
            lasted_s = sorted(one.ended_s - one.begins_s for one in programs)
            mean_s = statistics.mean(lasted_s)
            fcfs_s = fcfs_s or mean_s
            paused_s = statistics.mean(one.paused_s for one in programs)
            ttft_s = sorted(outcome.later_ttft_s)
            counters = outcome.counters
            reused = counters.prefix_cached_tokens + counters.session_hit_tokens
            table.add_row(
                name,
                f"{mean_s:.1f}",
                f"{mean_s - paused_s:.1f}",
                f"{lasted_s[len(lasted_s) * 9 // 10]:.0f}",
                f"{fcfs_s / mean_s:.2f}",
                f"{statistics.mean(ttft_s):.2f}",
                f"{ttft_s[len(ttft_s) * 99 // 100]:.2f}",
                f"{reused / counters.prompt_tokens:.0%}",
            )
        console.print(table)


if __name__ == "__main__":
    main()
