"""How many interactive jobs a policy serves in time, beside batch jobs.

    python -m benchmarks.slo_race                    # all courses, half an hour on two cores
    python -m benchmarks.slo_race --quick            # one course of few jobs, in a minute
    python -m benchmarks.slo_race --policies "fcfs;slo" --workloads chat --output slo.json

There are two classes of jobs, with lengths from the same data set. Interactive jobs want their
first token after a second, and each later token after 100 ms in the mean. They arrive as a Poisson
process or in bursts. Batch jobs want nothing. They arrive as a Poisson process at half of the
capacity, which is the rate that FCFS serves when all jobs are there at once.

Goodput is the highest rate of interactive jobs at which at most 1% of them miss an objective, by
bisection. All of it is simulated; docs/slo.md explains the columns.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from fastserve_bench.report.objectives import Objectives
from fastserve_bench.report.records import JobRecord
from fastserve_bench.workload import TraceJob
from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass
from rich.console import Console
from rich.table import Table

from benchmarks.race_cells import Course, Variant, capacity, simulate_course

INTERACTIVE = ServiceClass("interactive", ttft_slo_s=1.0, tpot_slo_s=0.1)
OBJECTIVES = Objectives(ttft_s=INTERACTIVE.ttft_slo_s, tpot_s=INTERACTIVE.tpot_slo_s)
# Deadlines so late that jobs with them come after all interactive jobs.
SOME_DAY = ServiceClass("batch", ttft_slo_s=3600.0, tpot_slo_s=0.1)
MOST_VIOLATIONS = 0.01
BATCH_LOAD = 0.5
# Goodput is looked for between these, in units of the capacity, down to this ratio of two rates.
LEAST_LOAD, MOST_LOAD, RATIO = 0.1, 1.4, 1.04
console = Console(width=200)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A policy in the race."""

    variant: Variant
    batch: ServiceClass = NO_CLASS


BASE = "fcfs"
ENTRANTS = {
    entrant.variant.name: entrant
    for entrant in (
        Entrant(Variant("fcfs", "fcfs")),
        Entrant(Variant("sarathi_edf", "sarathi_edf")),
        Entrant(Variant("sarathi_edf, batch last", "sarathi_edf"), SOME_DAY),
        Entrant(
            Variant(
                "sarathi_edf, batch last, chunks of 256",
                "sarathi_edf",
                {"prefill_chunk_tokens": 256},
            ),
            SOME_DAY,
        ),
        Entrant(Variant("gittins", "gittins")),
        Entrant(Variant("slo", "slo")),
        Entrant(Variant("slo, predicted", "slo", is_predicted=True)),
    )
}
COURSES = tuple(
    Course(system, workload, num_jobs, arrivals)
    for system, workload, num_jobs in (
        ("opt-13b a100-40g", "sharegpt", 500),
        ("opt-13b a100-40g", "chat", 500),
        ("llama-3-8b a100-80g", "sharegpt", 1000),
        ("llama-3-8b a100-80g", "chat", 1000),
    )
    for arrivals in ("poisson", "bursts")
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measures of one policy at one rate."""

    load: float
    """Rate of interactive jobs over the capacity."""
    violations: float
    """Share of interactive jobs that miss an objective."""
    first_p99: float
    """Time to the first token of interactive jobs, s."""
    tpot_p99: float
    """Mean time between tokens of an interactive job, s."""
    batch_tokens_per_s: float
    """Output tokens of batch jobs that ended before the last arrival, over that time."""
    tokens_per_s: float
    """Output tokens of all jobs until all have ended."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result of one policy on one course."""

    course: str
    policy: str
    capacity: float
    """Jobs per second."""
    outcomes: tuple[Outcome, ...]
    """By ascending load."""
    at_base: Outcome | None = None
    """At the goodput of ``BASE``."""

    @property
    def load(self) -> float:
        """Goodput over the capacity; 0 if even the lowest rate is too high."""
        good = [one.load for one in self.outcomes if one.violations <= MOST_VIOLATIONS]
        return max(good, default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "goodput": self.load * self.capacity}


def goodput(course: Course, entrant: Entrant, capacity: float) -> Goodput:
    """Bisects over the rates of interactive jobs."""
    outcomes = []
    low, high = LEAST_LOAD, MOST_LOAD
    while high / low > RATIO:
        load = (low * high) ** 0.5
        outcome = run_at(course, entrant, capacity, load)
        outcomes.append(outcome)
        if outcome.violations <= MOST_VIOLATIONS:
            low = load
        else:
            high = load
    outcomes.sort(key=lambda outcome: outcome.load)
    return Goodput(course_name(course), entrant.variant.name, capacity, tuple(outcomes))


def run_at(course: Course, entrant: Entrant, capacity: float, load: float) -> Outcome:
    """One simulation with interactive jobs at ``load`` times the capacity."""
    trace = two_classes(course, capacity, load, entrant.batch)
    simulation = simulate_course(course, entrant.variant, trace)
    records = simulation.records
    interactive, batch = list[JobRecord](), list[JobRecord]()
    for job, record in zip(trace, records, strict=True):
        (interactive if job.service is INTERACTIVE else batch).append(record)
    last_s = trace[-1].arrival_s
    return Outcome(
        load=load,
        violations=sum(not OBJECTIVES.met_by(record) for record in interactive) / len(interactive),
        first_p99=p99([record.ttft_s for record in interactive]),
        tpot_p99=p99([record.tpot_s or 0.0 for record in interactive]),
        batch_tokens_per_s=sum(
            record.output_tokens for record in batch if record.last_token_s <= last_s
        )
        / last_s,
        tokens_per_s=sum(record.output_tokens for record in records) / simulation.ended_s,
    )


def two_classes(
    course: Course, capacity: float, load: float, batch_class: ServiceClass
) -> list[TraceJob]:
    """The trace of both classes."""
    span_s = course.num_jobs / capacity
    interactive = _arriving(course, load * capacity, span_s)
    batch_course = replace(course, arrivals="poisson", seed=1)
    batch = _arriving(batch_course, BATCH_LOAD * capacity, span_s)
    both = [replace(job, service=INTERACTIVE) for job in interactive]
    both += [replace(job, service=batch_class) for job in batch]
    return sorted(both, key=lambda job: job.arrival_s)


def _arriving(course: Course, rate: float, span_s: float) -> list[TraceJob]:
    """The course's jobs that arrive within ``span_s``."""
    enough = replace(course, num_jobs=int(1.5 * rate * span_s) + 100)
    return [job for job in enough.trace(rate) if job.arrival_s < span_s]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def course_name(course: Course) -> str:
    return f"{course.name}, {course.arrivals}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one course of few jobs")
    parser.add_argument("--policies", help="names from the table, separated by semicolons")
    parser.add_argument("--workloads", help="names, separated by commas")
    parser.add_argument("--arrivals", choices=("poisson", "bursts"), help="these alone")
    parser.add_argument("--system", help="this one alone")
    parser.add_argument("--jobs", type=int, help="interactive jobs of each course")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--output", type=Path, help="JSON")
    return parser.parse_args()


def chosen_courses(arguments: argparse.Namespace) -> list[Course]:
    if arguments.quick:
        return [replace(COURSES[0], num_jobs=100)]
    courses = [
        course
        for course in COURSES
        if arguments.workloads in (None, course.workload)
        and arguments.arrivals in (None, course.arrivals)
        and arguments.system in (None, course.system)
    ]
    if arguments.jobs:
        courses = [replace(course, num_jobs=arguments.jobs) for course in courses]
    return courses


def main() -> int:
    arguments = parse()
    courses = chosen_courses(arguments)
    names = arguments.policies.split(";") if arguments.policies else list(ENTRANTS)
    started_s = time.monotonic()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        capacities = dict(zip(courses, pool.map(capacity, courses), strict=True))
        searches = {
            course: [
                pool.submit(goodput, course, ENTRANTS[name], capacities[course]) for name in names
            ]
            for course in courses
        }
        results = []
        for course in courses:
            of_course = [search.result() for search in searches[course]]
            load = next((one.load for one in of_course if one.policy == BASE), 0.0)
            if load:
                at_base = [
                    pool.submit(run_at, course, ENTRANTS[name], capacities[course], load)
                    for name in names
                ]
                of_course = [
                    replace(one, at_base=run.result())
                    for one, run in zip(of_course, at_base, strict=True)
                ]
            results += of_course
            console.print(*map(summary, of_course), sep="\n", soft_wrap=True)
    console.print(table(results))
    console.print(f"{(time.monotonic() - started_s) / 60:.1f} minutes")
    if arguments.output:
        text = json.dumps([result.to_json() for result in results], indent=1)
        arguments.output.write_text(f"{text}\n", encoding="utf-8")
    return 0


def summary(result: Goodput) -> str:
    runs = ", ".join(f"{one.load:.2f}: {one.violations:.1%}" for one in result.outcomes)
    return f"{result.course}; {result.policy}: load {result.load:.2f} ({runs})"


def table(results: list[Goodput]) -> Table:
    """One row for each result. The last column is of the load at which ``BASE`` is still good."""
    made = Table(title="Goodput: interactive jobs with at most 1% violations")
    for heading in (
        "course",
        "policy",
        "jobs/s",
        "load",
        "P99 first",
        "P99 TPOT",
        "batch tokens/s",
        f"batch tokens/s at {BASE}'s goodput",
    ):
        made.add_column(heading)
    for result in results:
        best = next((one for one in result.outcomes if one.load == result.load), None)
        values = (best.first_p99, best.tpot_p99, best.batch_tokens_per_s) if best else ()
        at_base = "-" if result.at_base is None else f"{result.at_base.batch_tokens_per_s:.3g}"
        made.add_row(
            result.course,
            result.policy,
            f"{result.load * result.capacity:.3g}",
            f"{result.load:.3g}",
            *([f"{value:.3g}" for value in values] or ["-"] * 3),
            at_base,
        )
    return made


if __name__ == "__main__":
    raise SystemExit(main())
