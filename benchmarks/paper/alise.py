"""What ALISE's figures compare, all on this engine: ORCA, vLLM, ALISE and an oracle."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastserve_backend.profile.hardware import HARDWARE
from rich.table import Table

from benchmarks.paper.figures import (
    DATASETS,
    add_dataset,
    console,
    datasets_of,
    fcfs_run,
    jobs_of,
    new_table,
    number,
    parse,
    parser,
)
from benchmarks.paper.prediction_errors import MEASURED, PERFECT, PredictionErrors
from benchmarks.paper.rate_search import Line, Search, ratio, save, search_all
from benchmarks.paper.rivals import orca, vllm
from benchmarks.paper.simulated_runs import BATCH, Run, System, mean_normalized, scheduler

ORCA, VLLM, ALISE, ORACLE = "ORCA", "vLLM", "ALISE", "oracle"
RIVALS = (
    "'ORCA': FCFS, with room for the longest job kept for each. 'vLLM': FCFS, KV on the device "
    "alone and recomputed when it runs out. 'ALISE': speculative with the measured prediction "
    "errors, KV swapped to host memory in INT8. 'oracle': the same with perfect "
    "predictions."
)
"""For captions."""


def options(description: str | None, jobs: int) -> argparse.ArgumentParser:
    """Of every figure with predictions."""
    added = parser(description, jobs)
    add_dataset(added)
    added.add_argument(
        "--prediction-errors",
        type=Path,
        default=MEASURED,
        metavar="FILE",
        help="CSV of real_tokens,predicted_tokens (this project's predictor on held-out answers)",
    )
    return added


def testbed_options(description: str | None) -> argparse.ArgumentParser:
    """Of ALISE's figures: two V100-32G, 1 TB of host memory, traces of 30 minutes."""
    added = options(description, jobs=400)
    added.add_argument(
        "--hardware", choices=list(HARDWARE), default="v100-32g", help="the GPUs (v100-32g)"
    )
    added.add_argument("--tensor-parallel-size", type=int, default=2, help="GPUs (2)")
    added.add_argument("--host-memory-gib", type=float, default=1024.0, help="for KV (1024)")
    added.add_argument("--max-num-seqs", type=int, default=BATCH, help=f"batch ({BATCH})")
    added.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="how long jobs arrive (30); 0: until --jobs have, Alpaca twice as many",
    )
    return added


def system_of(args: argparse.Namespace, model: str) -> System:
    """The model on the testbed that the options give."""
    return System(
        model, args.tensor_parallel_size, hardware=args.hardware, host_gib=args.host_memory_gib
    )


def testbed_run(args: argparse.Namespace, system: System, dataset: str) -> Run:
    """FCFS with host memory, at the rate that full batches serve."""
    run = fcfs_run(args, system, dataset, args.max_num_seqs)
    return replace(run, duration_s=60 * args.minutes if _is_timed(args) else None)


def testbed(args: argparse.Namespace) -> str:
    """For captions."""
    trace = f"{args.jobs} jobs (Alpaca {jobs_of(args, 'alpaca')})"
    if _is_timed(args):
        trace = f"traces of {args.minutes:g} minutes"
    return (
        f"{args.tensor_parallel_size} × {args.hardware}, {args.host_memory_gib:g} GiB of host "
        f"memory, batch {args.max_num_seqs}, {trace}"
    )


def _is_timed(args: argparse.Namespace) -> bool:
    return args.minutes > 0 and not args.quick


def measured(args: argparse.Namespace) -> PredictionErrors:
    return PredictionErrors.read(args.prediction_errors)


def rivals(fcfs: Run, errors: PredictionErrors) -> Mapping[str, Run]:
    return {
        ORCA: orca(fcfs),
        VLLM: vllm(fcfs),
        ALISE: alise(fcfs, errors),
        ORACLE: alise(fcfs, PERFECT),
    }


def alise(
    run: Run, errors: PredictionErrors | None, policy: str = "speculative", **kv_cache: Any
) -> Run:
    """The policy with ALISE's host memory, in INT8."""
    seats = run.scheduler.max_num_seqs
    assert seats != "auto"
    return replace(
        run,
        scheduler=scheduler(policy, seats),
        kv_cache=run.system.swapping(**{"host_dtype": "int8", **kv_cache}),
        errors=errors,
    )


def compare_rates(
    name: str,
    description: str | None,
    argv: Sequence[str] | None,
    models: Sequence[str],
    labels: Sequence[str],
    title: str,
    paper: Mapping[tuple[str, str, str], str],
) -> Table:
    """The largest rates of the rivals named, and ALISE's gain over each, beside the paper's.

    Args:
        labels: of the rivals; ALISE among them.
        paper: (model, data set, rival) → ALISE's gain over it, where the paper has one.
    """
    added = testbed_options(description)
    added.add_argument("--model", choices=models, help="only this one (all)")
    added.add_argument(
        "--iterations",
        type=float,
        default=2.0,
        help="the latency at which rates are compared, in decode iterations (2)",
    )
    args = parse(added, argv)
    chosen = (
        models[-1:] if args.quick else [model for model in models if args.model in (None, model)]
    )
    systems = [system_of(args, model) for model in chosen]
    errors = measured(args)
    runs = {}
    for system in systems:
        for dataset in datasets_of(args):
            every = rivals(testbed_run(args, system, dataset), errors)
            runs.update({Line(system, dataset, label): every[label] for label in labels})
    bound_s = partial(_bound_s, args.iterations)
    (searches,) = search_all(args, runs, [mean_normalized], bound_s)
    table = _rates_table(args, title, labels, searches, paper, bound_s)
    console.print(table)
    save(args, name, searches, bound_s)
    return table


def _bound_s(iterations: float, system: System) -> float:
    return iterations * system.decode_s


def _rates_table(
    args: argparse.Namespace,
    title: str,
    labels: Sequence[str],
    searches: Mapping[Line, Search],
    paper: Mapping[tuple[str, str, str], str],
    bound_s: Callable[[System], float],
) -> Table:
    others = [label for label in labels if label != ALISE]
    table = new_table(
        title,
        f"{testbed(args)}. Rates at a mean normalized latency of {args.iterations:g} decode "
        f"iterations; gains are ALISE's, with the paper's in brackets. {RIVALS}",
        "model, lengths",
        "s/token",
        *(f"{label}\njobs/s" for label in labels),
        *(f"over\n{other}" for other in others),
    )
    for system, dataset in dict.fromkeys((line.system, line.dataset) for line in searches):
        rates = {label: searches[Line(system, dataset, label)].rate for label in labels}
        gains = [
            beside(ratio(rates[ALISE], rates[other]), paper.get((system.model, dataset, other)))
            for other in others
        ]
        table.add_row(
            f"{system}, {DATASETS[dataset]}",
            number(bound_s(system)),
            *(number(rate) for rate in rates.values()),
            *gains,
        )
    return table


def beside(value: str, paper: str | None) -> str:
    """Our figure with the paper's in brackets."""
    return value if paper is None else f"{value} ({paper})"
