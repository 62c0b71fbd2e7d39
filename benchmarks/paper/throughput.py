"""Throughput under an SLO (FastServe Fig. 11 and 12): one table for a mean, or a P95, objective."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from common import (
    BATCH,
    DATASETS,
    OPT_13B,
    RECOMPUTE,
    SWAPPING,
    Run,
    Search,
    System,
    add_dataset,
    console,
    datasets_of,
    fcfs_run,
    jobs_of,
    lengths_of,
    new_table,
    number,
    on_all_cores,
    parse,
    parser,
    scheduler,
)
from fastserve_client.report.summary import Summary
from fastserve_client.report.sweep import SweepPoint
from fastserve_client.report.table import sweep_table
from rate_search import Line, ratio, save, search_all, slo_s
from rich.table import Table

SYSTEMS = (OPT_13B, System("opt-66b", 4), System("opt-175b", 8, 2))
FCFS, SKIP_JOIN, DEVICE_ONLY = "fcfs", "skip_join_mlfq", "skip_join_mlfq (device only)"
COMPARED = ("fcfs", "mlfq", "skip_join_mlfq", "srpt")
COMPARED_LOADS = (1.0, 1.5, 3.0)


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    title: str
    statistic: Callable[[Summary], float]
    paper: Mapping[tuple[str, str], str]
    """Model and data set → what the paper reports of skip-join over FCFS."""
    note: str = ""
    """Ends the caption."""
    compares: bool = False
    """A second table shows what each policy does to completion times."""


def main(figure: Figure, description: str | None, argv: Sequence[str] | None) -> Table:
    options = parser(description, jobs=400)
    options.add_argument(
        "--model", choices=[system.model for system in SYSTEMS], help="only this one (all)"
    )
    add_dataset(options)
    args = parse(options, argv, quick_jobs=80)
    systems = [
        system
        for system in (SYSTEMS[:1] if args.quick else SYSTEMS)
        if args.model in (None, system.model)
    ]
    searches = search_all(args, _runs(args, systems), figure.statistic)
    table = _throughput_table(figure, args, searches)
    console.print(table)
    if figure.compares:
        _compare_policies(args)
    save(args, figure.name, searches)
    return table


def _runs(args: argparse.Namespace, systems: Sequence[System]) -> dict[Line, Run]:
    runs = {}
    for system in systems:
        for dataset in datasets_of(args):
            fcfs = fcfs_run(args, system, dataset)
            skip_join = replace(fcfs, scheduler=scheduler("skip_join_mlfq"))
            runs[Line(system, dataset, FCFS)] = fcfs
            runs[Line(system, dataset, SKIP_JOIN)] = skip_join
            runs[Line(system, dataset, DEVICE_ONLY)] = replace(skip_join, kv_cache=RECOMPUTE)
    return runs


def _throughput_table(
    figure: Figure, args: argparse.Namespace, searches: Mapping[Line, Search]
) -> Table:
    table = new_table(
        figure.title,
        f"A100-40G, batch {BATCH}, {args.jobs} jobs (Alpaca {jobs_of(args, 'alpaca')}). "
        f"{SWAPPING} 'device only': skip-join without host memory, KV recomputed. 'capacity': "
        "what full batches can finish. 'none': no rate breaks the SLO with so few jobs. The SLO of "
        f"66B and 175B is ten of their decode iterations. {figure.note}",
        "system, lengths",
        "SLO\ns/token",
        "capacity\njobs/s",
        "FCFS\njobs/s",
        "skip-join\njobs/s",
        "gain",
        "paper's\ngain",
        "device only\njobs/s",
    )
    for system, dataset in dict.fromkeys((line.system, line.dataset) for line in searches):
        fcfs, skip_join, device_only = (
            searches[Line(system, dataset, label)].rate for label in (FCFS, SKIP_JOIN, DEVICE_ONLY)
        )
        table.add_row(
            f"{system}, {DATASETS[dataset]}",
            number(slo_s(system)),
            number(system.capacity(lengths_of(args, dataset))),
            number(fcfs),
            number(skip_join),
            ratio(skip_join, fcfs),
            figure.paper[system.model, dataset],
            number(device_only),
        )
    return table


def _compare_policies(args: argparse.Namespace) -> None:
    """Prints what each policy does to OPT-13B at fixed loads, completion times included."""
    for dataset in datasets_of(args):
        run = fcfs_run(args, OPT_13B, dataset)
        points = [(policy, load * run.rate) for load in COMPARED_LOADS for policy in COMPARED]
        summaries = on_all_cores(
            Run.summary,
            [replace(run, rate=rate, scheduler=scheduler(policy)) for policy, rate in points],
        )
        console.print(f"OPT-13B, {DATASETS[dataset]}:")
        console.print(
            sweep_table(
                [
                    SweepPoint(policy, float(f"{rate:.3g}"), s)
                    for (policy, rate), s in zip(points, summaries, strict=True)
                ]
            )
        )
