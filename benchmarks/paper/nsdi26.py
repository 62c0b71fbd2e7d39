"""FastServe as published (NSDI'26), Fig. 14, 15 and 18: larger batches, GQA, chunked prefill.

Numbers, models, batches and host memory are those of the artifact's scripts. Each line is the
largest rate at one mean normalized latency. In brackets: the rates over which the artifact's
plotted points cross that latency, interpolated. There Fig. 18 has another unit, seconds per token
of prompt and output together, so only the gains compare.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastserve_bench.report.summary import Summary
from rich.table import Table

from benchmarks.paper.alise import beside
from benchmarks.paper.figures import (
    DATASETS,
    Figure,
    fcfs_run,
    new_table,
    number,
    save_json,
    save_plot,
)
from benchmarks.paper.rate_search import finite, ratio, search_all
from benchmarks.paper.rivals import vllm
from benchmarks.paper.simulated_runs import OPT_13B, Run, System, mean_normalized, scheduler

VLLM, CHUNKED, FCFS, SKIP_JOIN = "vLLM", "vLLM, chunks", "FCFS", "skip-join"
BOUND_S = 0.25  # the artifact's notebook compares Fig. 14 and 15 at this latency
CHUNK_TOKENS = 512  # the artifact's budget of 2,048 tokens would cut no prompt of its data sets


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    figure: str
    system: System
    dataset: str
    seats: int
    artifact: Mapping[str, float]
    """Line → jobs/s."""
    duration_s: float | None = None
    """How long jobs arrive, as in the artifact. ``None``: until --jobs have."""


LLAMA = System("llama-3-8b", host_gib=40.0)
LARGE = replace(OPT_13B, host_gib=60.0)
PANELS: tuple[Panel, ...] = (
    Panel("14a", LARGE, "sharegpt", 64, {VLLM: 2.71, FCFS: 2.86, SKIP_JOIN: 3.71}, 200.0),
    Panel("14b", LARGE, "sharegpt", 128, {VLLM: 2.61, FCFS: 3.00, SKIP_JOIN: 3.52}, 200.0),
    Panel("15a", LLAMA, "sharegpt", 16, {VLLM: 3.05, FCFS: 3.42, SKIP_JOIN: 4.77}, 200.0),
    Panel("15b", LLAMA, "alpaca", 16, {VLLM: 3.54, FCFS: 11.7, SKIP_JOIN: 15.9}, 200.0),
    Panel("18a", OPT_13B, "sharegpt", 16, {VLLM: 2.49, CHUNKED: 2.66, SKIP_JOIN: 5.00}),
    Panel("18b", OPT_13B, "alpaca", 16, {VLLM: 10.2, CHUNKED: 12.9, SKIP_JOIN: 18.2}),
)


def draw(args: argparse.Namespace) -> list[Table]:
    panels = PANELS[3:4] if args.quick else PANELS
    panels = tuple(panel for panel in panels if args.panel in (None, panel.figure))
    runs = {}
    for panel in panels:
        fcfs = replace(
            fcfs_run(args, panel.system, panel.dataset, panel.seats),
            duration_s=None if args.quick else panel.duration_s,
        )
        for label in panel.artifact:
            runs[panel, label] = _run(fcfs, label, panel.seats)
    (searches,) = search_all(args, runs, [mean_normalized], _bound_s)
    table = new_table(
        f"NSDI'26, Fig. 14, 15, 18: rates at {BOUND_S} s/token",
        "A100-40G, batch of 64 (14a), 128 (14b) or 16. Jobs arrive for 200 s (18: until "
        f"{args.jobs} have, Alpaca twice as many). "
        f"KV of skip-join and FCFS is swapped to 60 (14), 40 (15) or 56 GiB of host memory. "
        f"'vLLM': FCFS with device memory alone. 'chunks': the same with at most {CHUNK_TOKENS} "
        "prefill tokens an iteration. In brackets: the artifact's.",
        "figure, lengths",
        *(f"{label}\njobs/s" for label in (VLLM, CHUNKED, FCFS, SKIP_JOIN)),
        *(f"over\n{label}" for label in (VLLM, CHUNKED, FCFS)),
    )
    for panel in panels:
        rates = {label: searches[panel, label].rate for label in panel.artifact}
        cells = {
            label: f"{number(rate)} ({panel.artifact[label]:g})" for label, rate in rates.items()
        }
        gains = {
            label: beside(
                ratio(rates[SKIP_JOIN], rates[label]),
                f"{panel.artifact[SKIP_JOIN] / panel.artifact[label]:.2f}×",
            )
            for label in rates
        }
        table.add_row(
            f"{panel.figure}, {DATASETS[panel.dataset]}",
            *(cells.get(label, "–") for label in (VLLM, CHUNKED, FCFS, SKIP_JOIN)),
            *(gains.get(label, "–") for label in (VLLM, CHUNKED, FCFS)),
        )
    save_json(
        args,
        [
            {"figure": panel.figure, "label": label, "jobs_per_s": finite(search.rate)}
            for (panel, label), search in searches.items()
        ],
    )
    save_plot(
        args,
        {
            f"Fig. {panel.figure}, {panel.system}": {
                label: _line(searches[panel, label].runs) for label in panel.artifact
            }
            for panel in panels
        },
        "Rate (jobs/s)",
        "Normalized latency (s/token)",
        log=True,
    )
    return [table]


def _run(fcfs: Run, label: str, seats: int) -> Run:
    if label == VLLM:
        return vllm(fcfs)
    if label == CHUNKED:
        chunks = scheduler("fcfs", seats, prefill_chunk_tokens=CHUNK_TOKENS)
        return replace(vllm(fcfs), scheduler=chunks)
    if label == SKIP_JOIN:
        return replace(fcfs, scheduler=scheduler("skip_join_mlfq", seats))
    return fcfs


def _bound_s(system: System) -> float:
    return BOUND_S


def _line(runs: Sequence[tuple[float, Summary]]) -> tuple[list[float], list[float]]:
    return [rate for rate, _ in runs], [mean_normalized(summary) for _, summary in runs]


def add_options(options: argparse.ArgumentParser) -> None:
    panels = [panel.figure for panel in PANELS]
    options.add_argument("--figure", dest="panel", choices=panels, help="only this one (all)")


FIGURE = Figure("nsdi26", __doc__, draw, add_options=add_options)
