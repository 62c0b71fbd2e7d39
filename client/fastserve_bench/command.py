"""``fastserve bench``: measures, writes JSON and figures, prints tables."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from fastserve_client.errors import ClientError, InvalidRequest
from fastserve_client.terminal import ExitCode
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserve_bench.comparison import compare, comparison_table
from fastserve_bench.connection import Connection, Target
from fastserve_bench.figures import write_figures
from fastserve_bench.openai_connection import API_KEY_VARIABLE
from fastserve_bench.own_server import OwnServer
from fastserve_bench.points import Point, WithinObjectives, gather_points, within_objectives
from fastserve_bench.progress import RunProgress
from fastserve_bench.report.objectives import Objectives
from fastserve_bench.report.output import Output, write_json
from fastserve_bench.report.printing import print_tables
from fastserve_bench.results_file import report_json
from fastserve_bench.session import Plan, Session, Start
from fastserve_bench.tables import error_lines, objectives_table, result_tables

# A reader of text notices tokens that come later than this.
_LATE_S = 0.05
# Above this share of a core, tokens wait until the client reads them.
_HIGH_CPU_SHARE = 0.8


def bench_command(
    servers: Sequence[Target] | Sequence[OwnServer],
    plan: Plan,
    objectives: Objectives,
    output: Output,
) -> ExitCode:
    """Runs the plan on all servers, reports, and returns the exit code.

    Ctrl-C ends the run, and so does a server that is gone. Finished jobs are reported.

    Raises:
        ClientError: the workload cannot be used, or a server is not there.
    """
    output.check()
    _check_labels(servers)
    _check_keys(plan)
    for repeat in range(plan.repeats):
        for load in plan.loads:
            plan.requests(plan.trace(load, repeat), load, repeat)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    progress = RunProgress(console, len(servers) * len(plan.loads) * plan.repeats)
    session = Session(plan, progress.start, progress.update)
    finished, failure = False, None
    with progress.bar:
        try:
            finished = asyncio.run(_until_interrupted(_measure(session, servers)))
        except ClientError as error:
            if not session.runs:
                raise
            failure = error
    if not finished:
        console.print(f"{'interrupted' if failure is None else 'ended'}; what has finished so far:")
    points = gather_points(session.runs, plan, objectives)
    within = _within(points, plan, objectives)
    settings = _settings(servers, plan, objectives)
    try:
        _write(output, points, settings, within, objectives, console)
    finally:  # after the files, so that a reader of stdout that goes away does not prevent them
        printed = print_tables(_tables(points, plan, objectives, within))
        _print_troubles(points, console)
    if failure is not None:
        raise failure
    if not finished:
        return ExitCode.INTERRUPTED
    return printed if any(point.summary for point in points) else ExitCode.FAILED


def _check_labels(servers: Sequence[Target] | Sequence[OwnServer]) -> None:
    """Raises InvalidRequest if two servers have the same label."""
    labels = [server.label for server in servers]
    if len(set(labels)) == len(labels):
        return
    if isinstance(servers[0], OwnServer):
        raise InvalidRequest(f"compare: got {', '.join(labels)}; each policy must be there once")
    raise InvalidRequest(f"url: got {', '.join(labels)}; each must have another NAME=")


def _check_keys(plan: Plan) -> None:
    """Raises InvalidRequest if the environment lacks the key of a class."""
    for one in plan.workload.classes:
        if one.key_variable is not None and not os.environ.get(one.key_variable):
            raise InvalidRequest(
                f"class: {one.name}: key_variable: got {one.key_variable!r}; the environment has "
                "no such variable with an API key"
            )


async def _measure(session: Session, servers: Sequence[Target] | Sequence[OwnServer]) -> None:
    starts: dict[str, Start] = {}
    async with AsyncExitStack() as stack:
        connections: dict[str, Connection] = {}
        for server in servers:
            if isinstance(server, OwnServer):
                starts[server.label] = partial(_start, server)
            else:
                connections[server.label] = await stack.enter_async_context(_connect(server))
        await session.alternate(connections)
        await session.in_turn(starts)


@asynccontextmanager
async def _connect(target: Target) -> AsyncIterator[Connection]:
    connection = target.connect(os.environ.get(API_KEY_VARIABLE))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _start(server: OwnServer) -> AsyncIterator[Connection]:
    async with server.running() as target, _connect(target) as connection:
        yield connection


async def _until_interrupted(work: Coroutine[Any, Any, None]) -> bool:
    """Runs the work. Returns whether it ended before Ctrl-C or SIGTERM."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    try:
        await asyncio.wait((task,))
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    if task.cancelled():
        return False
    task.result()
    return True


def _within(
    points: Sequence[Point], plan: Plan, objectives: Objectives
) -> Mapping[str, WithinObjectives]:
    """The highest rates within the objectives. Empty without several rates and an objective."""
    slo_s = objectives.normalized_latency_s
    if plan.loads[0].is_closed or len(plan.loads) == 1 or slo_s is None:
        return {}
    return within_objectives(points, slo_s)


def _tables(
    points: Sequence[Point],
    plan: Plan,
    objectives: Objectives,
    within: Mapping[str, WithinObjectives],
) -> Iterator[Table]:
    load_header = "clients" if plan.loads[0].is_closed else "jobs/s"
    yield from result_tables(points, load_header)
    ratios = compare(points)
    if ratios:
        yield comparison_table(ratios, points[0].label, load_header)
    slo_s = objectives.normalized_latency_s
    if within and slo_s is not None:
        yield objectives_table(within, slo_s)


def _print_troubles(points: Sequence[Point], console: Console) -> None:
    for line in error_lines(points):
        console.print(f"[yellow]errors:[/] {escape(line)}")
    for point in points:
        late_s = point.send_lateness_p99_s or 0.0
        if late_s > _LATE_S or point.cpu_share > _HIGH_CPU_SHARE:
            console.print(
                f"[yellow]the client lagged[/] at {point.label}, {point.load}: jobs were sent "
                f"{late_s * 1e3:.0f} ms late (P99), and it used {point.cpu_share:.0%} of a core; "
                "give it a machine of its own"
            )


def _settings(
    servers: Sequence[Target] | Sequence[OwnServer], plan: Plan, objectives: Objectives
) -> dict[str, Any]:
    return {
        "servers": [_described(server) for server in servers],
        "workload": asdict(plan.workload),
        "repeats": plan.repeats,
        "timeout_s": plan.timeout_s,
        "warmup": plan.warmup,
        "vocab_size": plan.vocab_size,
        "pause_s": plan.pause_s,
        "natural_max_tokens": plan.natural_max_tokens,
        "chat": plan.chat,
        "objectives": asdict(objectives),
    }


def _described(server: Target | OwnServer) -> dict[str, Any]:
    described = asdict(server)
    if isinstance(server, Target):
        described["url"] = server.shown_url
    return described


def _write(
    output: Output,
    points: Sequence[Point],
    settings: Mapping[str, Any],
    within: Mapping[str, WithinObjectives],
    objectives: Objectives,
    console: Console,
) -> None:
    """Writes all files that can be written. Raises WorkloadError if one cannot."""
    try:
        if output.json is not None:
            write_json(output.json, report_json(points, settings, within))
            console.print(f"wrote {output.json}", markup=False)
    finally:
        if output.plot is not None and any(point.summary for point in points):
            for path in write_figures(points, output.plot, objectives.normalized_latency_s):
                console.print(f"wrote {path}", markup=False)
