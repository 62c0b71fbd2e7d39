"""Every policy on every workload, load and system, and where ours is worse than FCFS.

    python -m benchmarks.scheduling_race             # a quarter of an hour on two cores
    python -m benchmarks.scheduling_race --quick     # a minute
    python -m benchmarks.scheduling_race --trace FILE --system "llama-3-8b a100-80g"
    python -m benchmarks.scheduling_race --output race.json --markdown docs

All of it is simulated; docs/scheduling_race.md explains the columns. The output ends with a line
for each cell in which ours is worse than the best of three FCFS. Ours is the shipped default, with
and without predictions. A trace runs with its own gaps, and at each of --loads.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from fastserve_bench.workload.datasets import load_jobs
from fastserve_bench.workload.lengths import LengthLimits
from fastserve_client.errors import WorkloadError
from rich.console import Console
from rich.progress import Progress

from benchmarks.race_cells import (
    COURSES,
    HOST_GIB,
    SYSTEMS,
    VARIANTS,
    Cell,
    Course,
    Result,
    Variant,
    capacity,
    run,
)
from benchmarks.race_report import by_cell, table, verdicts, write_markdown

LOADS = (0.7, 1.0, 1.5)
QUICK_COURSES, QUICK_LOADS, QUICK_JOBS = (0, 2), (1.5,), 120
console = Console(width=200)


def main() -> int:
    arguments = parse()
    courses = chosen_courses(arguments)
    variants = [
        variant
        for variant in VARIANTS
        if not arguments.policies or variant.policy in arguments.policies.split(",")
    ]
    loads: tuple[float, ...] = QUICK_LOADS if arguments.quick else LOADS
    if arguments.loads:
        loads = tuple(float(load) for load in arguments.loads.split(","))
    started_s = time.monotonic()
    results = race(courses, variants, loads)
    cells = by_cell(results)
    for name, cell in cells.items():
        console.print(table(name, cell))
    minutes = (time.monotonic() - started_s) / 60
    console.print(f"{len(results)} runs in {minutes:.1f} minutes on {os.cpu_count()} cores")
    if arguments.output:
        text = json.dumps([result.to_json() for result in results], indent=1)
        arguments.output.write_text(f"{text}\n", encoding="utf-8")
    if arguments.markdown:
        write_markdown(
            arguments.markdown,
            cells,
            shlex.join(["python", "-m", "benchmarks.scheduling_race", *sys.argv[1:]]),
            commit(),
        )
    for line in verdicts(cells) or ["nowhere is ours worse"]:
        console.print(line, soft_wrap=True)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two courses of few jobs, one load")
    parser.add_argument("--policies", help="names of policies, separated by commas")
    parser.add_argument("--workloads", help="names, separated by commas")
    parser.add_argument("--loads", help="numbers, separated by commas")
    parser.add_argument("--system", choices=SYSTEMS, help="this one alone")
    parser.add_argument(
        "--trace", action="append", default=[], help="a file of lengths or a trace; may be repeated"
    )
    parser.add_argument("--jobs", type=int, help="jobs of each trace file; default: 600 or all")
    parser.add_argument(
        "--host-gib", type=float, default=HOST_GIB, help="host memory for KV, of all ranks together"
    )
    parser.add_argument("--output", type=Path, help="JSON")
    parser.add_argument("--markdown", type=Path, help="directory for scheduling_race.md")
    return parser.parse_args()


def chosen_courses(arguments: argparse.Namespace) -> list[Course]:
    if arguments.trace:
        courses = [of_file(path, arguments) for path in arguments.trace]
    else:
        courses = standard_courses(arguments)
    return [replace(course, host_gib=arguments.host_gib) for course in courses]


def standard_courses(arguments: argparse.Namespace) -> list[Course]:
    courses = list(COURSES)
    if arguments.quick:
        courses = [replace(COURSES[index], num_jobs=QUICK_JOBS) for index in QUICK_COURSES]
    if arguments.workloads:
        names = arguments.workloads.split(",")
        if unknown := set(names) - {course.workload for course in courses}:
            raise SystemExit(f"--workloads: got {unknown.pop()!r}, which is in no course")
        courses = [course for course in courses if course.workload in names]
    if arguments.system:
        courses = [course for course in courses if course.system == arguments.system]
    return courses


def of_file(path: str, arguments: argparse.Namespace) -> Course:
    system = arguments.system or "llama-3-8b a100-80g"
    limits = LengthLimits(max_total_tokens=SYSTEMS[system].max_model_len - 1)
    try:
        num_jobs = len(load_jobs(path, limits, 1.0).lengths)
    except WorkloadError as error:
        raise SystemExit(f"--trace: {error}") from None
    return Course(system, path, min(num_jobs, arguments.jobs or 600))


def race(courses: list[Course], variants: list[Variant], loads: tuple[float, ...]) -> list[Result]:
    with (
        ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool,
        Progress(console=console, transient=True) as bar,
    ):
        capacities = dict(zip(courses, pool.map(capacity, courses), strict=True))
        cells = [Cell(course, load, capacities[course]) for course in courses for load in loads]
        cells += [Cell(course, None, capacities[course]) for course in courses if has_times(course)]
        pending = [pool.submit(run, cell, variant) for cell in cells for variant in variants]
        task = bar.add_task("racing", total=len(pending))
        results = []
        for one in pending:
            results.append(one.result())
            bar.advance(task)
        return results


def commit() -> str:
    """Short hash of the checked-out commit."""
    command = ("git", "rev-parse", "--short", "HEAD")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def has_times(course: Course) -> bool:
    """Whether the jobs have timestamps of their own."""
    is_file = Path(course.workload).exists()
    return is_file and load_jobs(course.workload, LengthLimits(), 1.0).timestamps_s is not None


if __name__ == "__main__":
    raise SystemExit(main())
