"""What all figures share: options, the runs that these ask for, tables, plots, JSON."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserve_bench.workload import AUTHORS_LIMITS, Lengths, load_lengths
from matplotlib.figure import Figure as Canvas
from rich import box
from rich.table import Table

from benchmarks.paper.simulated_runs import BATCH, Run, System, scheduler

DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
ALPACA_JOBS = 2  # times ShareGPT's, because they last a sixth as long


@dataclass(frozen=True)
class Figure:
    name: str
    description: str | None
    draw: Callable[[argparse.Namespace], list[Table]]
    """Makes the figure's tables, and saves its plots and numbers."""
    jobs: int = 400
    """Jobs of a trace, unless ``--jobs`` says otherwise."""
    quick_jobs: int = 40
    add_options: Callable[[argparse.ArgumentParser], None] = lambda options: None
    """Adds the options that only this figure has."""


def add_common_options(options: argparse.ArgumentParser, figure: Figure) -> None:
    jobs = figure.jobs
    options.add_argument("--jobs", type=int, default=jobs, help=f"jobs of a trace ({jobs})")
    options.add_argument("--seed", type=int, default=0, help="of jobs and arrivals (0)")
    for name in ("sharegpt", "alpaca"):
        options.add_argument(
            f"--{name}",
            metavar="FILE",
            default=name,
            help="real lengths (CSV or JSON) instead of the packaged synthetic ones",
        )
    options.add_argument("--quick", action="store_true", help="few points and few jobs, to try it")
    options.add_argument(
        "--plot-dir",
        type=Path,
        default=Path(__file__).parent / "plots",
        help="where plots (PNG) and numbers (JSON) go (beside the scripts)",
    )


def lengths_of(args: argparse.Namespace, name: str) -> Lengths:
    """Lengths of ``sharegpt`` or ``alpaca``, from a file if one was named."""
    return load_lengths(getattr(args, name), AUTHORS_LIMITS)


def jobs_of(args: argparse.Namespace, dataset: str) -> int:
    jobs: int = args.jobs * (ALPACA_JOBS if dataset == "alpaca" else 1)
    return jobs


def fcfs_run(args: argparse.Namespace, system: System, dataset: str, seats: int = BATCH) -> Run:
    """A run of FCFS with host memory, at the rate that full batches serve."""
    lengths = lengths_of(args, dataset)
    return Run(
        system,
        lengths,
        system.capacity(lengths, seats),
        jobs_of(args, dataset),
        args.seed,
        scheduler("fcfs", seats),
        system.swapping(),
    )


def add_dataset(options: argparse.ArgumentParser) -> None:
    """Adds ``--dataset``, for figures that show all of ``DATASETS``."""
    options.add_argument("--dataset", choices=list(DATASETS), help="only this one (both)")


def datasets_of(args: argparse.Namespace) -> Sequence[str]:
    if args.quick:
        return ("alpaca",)
    return tuple(DATASETS) if args.dataset is None else (args.dataset,)


def new_table(title: str, caption: str, *headers: str) -> Table:
    table = Table(
        title=title, caption=caption, caption_justify="left", title_justify="left", box=box.SIMPLE
    )
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table


def number(value: float | None) -> str:
    """The number with three digits."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "none"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def save_json(args: argparse.Namespace, values: Any, suffix: str = "") -> None:
    """Saves numbers with all options, so that a file tells what it measures."""
    settings = {
        option: str(value) if isinstance(value, Path) else value
        for option, value in vars(args).items()
        if option != "plot_dir"
    }
    document = {"settings": settings, "values": values}
    (args.plot_dir / f"{args.figure}{suffix}.json").write_text(
        json.dumps(document, indent=2) + "\n", "utf-8"
    )


def save_plot(
    args: argparse.Namespace,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    xlabel: str,
    ylabel: str,
    *,
    log: bool = False,
) -> None:
    """Panels beside each other: title → line's label → (x values, y values)."""
    figure = Canvas(figsize=(4.5 * len(panels), 3.8), dpi=150, layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for label, (xs, ys) in lines.items():
            axes.plot(xs, ys, marker="o", label=label)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(args.plot_dir / f"{args.figure}.png")
