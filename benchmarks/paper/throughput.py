"""Throughput under an SLO (FastServe Fig. 11 and 12): one table for a mean, or a P95, objective."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from common import (
    BATCH,
    OPT_13B,
    RECOMPUTE,
    SWAPPING,
    Run,
    Search,
    System,
    console,
    largest_rate,
    lengths_of,
    new_table,
    number,
    on_all_cores,
    parse,
    parser,
    save_json,
    scheduler,
)
from fastserve_client.report import Summary, SweepPoint, plot_sweep, sweep_table
from rich.table import Table

SYSTEMS = (OPT_13B, System("opt-66b", 4), System("opt-175b", 8, 2))
DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
ALPACA_JOBS = 2  # as many as ShareGPT's: they last a sixth as long
SLO_ITERATIONS = 10
OPT_13B_SLO_S = 0.3  # the paper's, and ten decode iterations of 30 ms
COMPARED = ("fcfs", "mlfq", "skip_join_mlfq", "srpt")
COMPARED_LOADS = (1.0, 1.5, 3.0)
TOLERANCE = 1.02
QUICK_TOLERANCE = 1.4


@dataclass(frozen=True, slots=True)
class Series:
    """One bisection: a system, a data set, a policy and its KV memory."""

    system: System
    dataset: str
    policy: str
    device_only: bool = False


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


def slo_s(system: System) -> float:
    return OPT_13B_SLO_S if system == OPT_13B else SLO_ITERATIONS * system.decode_s


def _meets(statistic: Callable[[Summary], float], slo: float, summary: Summary) -> bool:
    return statistic(summary) <= slo


def _search(task: tuple[Run, Callable[[Summary], bool], float]) -> Search:
    return largest_rate(*task)


def main(figure: Figure, description: str | None, argv: Sequence[str] | None) -> Table:
    options = parser(description, jobs=400)
    options.add_argument(
        "--model", choices=[system.model for system in SYSTEMS], help="only this one (all)"
    )
    args = parse(options, argv, quick_jobs=80)
    searches = _search_all(figure, args)
    table = _throughput_table(figure, args, searches)
    console.print(table)
    if figure.compares:
        _compare_policies(args)
    _save(figure, args, searches)
    return table


def _datasets(args: argparse.Namespace) -> Sequence[str]:
    return ("alpaca",) if args.quick else tuple(DATASETS)


def _run(args: argparse.Namespace, series: Series) -> Run:
    system, lengths = series.system, lengths_of(args, series.dataset)
    return Run(
        system,
        lengths,
        system.capacity(lengths),
        args.jobs * (ALPACA_JOBS if series.dataset == "alpaca" else 1),
        args.seed,
        scheduler(series.policy),
        RECOMPUTE if series.device_only else system.swapping(),
    )


def _search_all(figure: Figure, args: argparse.Namespace) -> dict[Series, Search]:
    every = [
        series
        for system in (SYSTEMS[:1] if args.quick else SYSTEMS)
        if args.model in (None, system.model)
        for dataset in _datasets(args)
        for series in (
            Series(system, dataset, "fcfs"),
            Series(system, dataset, "skip_join_mlfq"),
            Series(system, dataset, "skip_join_mlfq", device_only=True),
        )
    ]
    tolerance = QUICK_TOLERANCE if args.quick else TOLERANCE
    tasks = [
        (_run(args, series), partial(_meets, figure.statistic, slo_s(series.system)), tolerance)
        for series in every
    ]
    return dict(zip(every, on_all_cores(_search, tasks), strict=True))


def _throughput_table(
    figure: Figure, args: argparse.Namespace, searches: Mapping[Series, Search]
) -> Table:
    table = new_table(
        figure.title,
        f"A100-40G, batch {BATCH}, {args.jobs} jobs (Alpaca {args.jobs * ALPACA_JOBS}). "
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
    for series in searches:
        if series.policy != "fcfs":
            continue
        system, dataset = series.system, series.dataset
        fcfs = searches[series].rate
        skip_join = searches[Series(system, dataset, "skip_join_mlfq")].rate
        device_only = searches[Series(system, dataset, "skip_join_mlfq", device_only=True)].rate
        table.add_row(
            f"{system}, {DATASETS[dataset]}",
            number(slo_s(system)),
            number(_run(args, series).rate),
            number(fcfs),
            number(skip_join),
            "–" if math.isinf(skip_join) else f"{skip_join / fcfs:.2f}×",
            figure.paper[system.model, dataset],
            number(device_only),
        )
    return table


def _compare_policies(args: argparse.Namespace) -> None:
    """Prints what each policy does to OPT-13B at fixed loads, completion times included."""
    for dataset in _datasets(args):
        run = _run(args, Series(OPT_13B, dataset, "fcfs"))
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


def _save(figure: Figure, args: argparse.Namespace, searches: Mapping[Series, Search]) -> None:
    for system, dataset in dict.fromkeys((series.system, series.dataset) for series in searches):
        name = f"{figure.name}_{system.model}_{dataset}"
        points = [
            SweepPoint(
                series.policy + (" (device only)" if series.device_only else ""), rate, summary
            )
            for series, search in searches.items()
            if (series.system, series.dataset) == (system, dataset)
            for rate, summary in search.runs
        ]
        title = f"{system}, {DATASETS[dataset]}"
        plot_sweep(points, args.plot_dir / f"{name}.png", slo_s=slo_s(system), title=title)
    save_json(
        args,
        figure.name,
        [
            {
                "system": str(series.system),
                "dataset": series.dataset,
                "policy": series.policy,
                "device_only": series.device_only,
                "jobs_per_s": None if math.isinf(search.rate) else search.rate,
            }
            for series, search in searches.items()
        ],
    )
