"""What ALISE's figures compare, all on this engine: ORCA, vLLM, ALISE and an oracle."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastserve_backend.profile.hardware import HARDWARE
from figures import (
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
from prediction_errors import MEASURED, PERFECT, PredictionErrors
from rate_search import Line, Search, ratio, save, search_all
from rich.table import Table
from simulated_runs import (
    BATCH,
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    RECOMPUTE,
    Run,
    System,
    mean_normalized,
    scheduler,
)

ORCA, VLLM, ALISE, ORACLE = "ORCA", "vLLM", "ALISE", "oracle"
RIVALS = (
    "'ORCA': FCFS, with room for the longest job kept for each. 'vLLM': FCFS, KV on the device "
    "alone and recomputed when it runs out. 'ALISE': speculative with the measured prediction "
    "errors, KV swapped to 56 GiB of host memory in INT8. 'oracle': the same with perfect "
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


def options_on_hardware(description: str | None, jobs: int) -> argparse.ArgumentParser:
    """Of ALISE's figures."""
    added = options(description, jobs)
    added.add_argument(
        "--hardware", choices=list(HARDWARE), default="v100-32g", help="the GPU (v100-32g)"
    )
    return added


def measured(args: argparse.Namespace) -> PredictionErrors:
    return PredictionErrors.read(args.prediction_errors)


def rivals(fcfs: Run, errors: PredictionErrors) -> Mapping[str, Run]:
    vllm = replace(fcfs, kv_cache=RECOMPUTE)
    return {
        ORCA: orca(vllm),
        VLLM: vllm,
        ALISE: alise(fcfs, errors),
        ORACLE: alise(fcfs, PERFECT),
    }


def orca(run: Run) -> Run:
    """ORCA allocates a job's KV for the greatest length when it begins, so that fewer run."""
    most = run.memory.num_blocks // (MAX_MODEL_LEN // BLOCK_SIZE)
    return replace(run, scheduler=scheduler("fcfs", min(BATCH, most)))


def alise(
    run: Run, errors: PredictionErrors | None, policy: str = "speculative", **kv_cache: Any
) -> Run:
    """The policy with ALISE's host memory, in INT8."""
    return replace(
        run,
        scheduler=scheduler(policy),
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
    added = options_on_hardware(description, jobs=400)
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
    systems = [System(model, hardware=args.hardware) for model in chosen]
    errors = measured(args)
    runs = {}
    for system in systems:
        for dataset in datasets_of(args):
            every = rivals(fcfs_run(args, system, dataset), errors)
            runs.update({Line(system, dataset, label): every[label] for label in labels})
    bound_s = partial(_bound_s, args.iterations)
    searches = search_all(args, runs, mean_normalized, bound_s)
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
        f"One {args.hardware}, batch {BATCH}, {args.jobs} jobs (Alpaca {jobs_of(args, 'alpaca')}). "
        f"Rates at a mean normalized latency of {args.iterations:g} decode iterations; gains are "
        f"ALISE's, with the paper's in brackets. {RIVALS}",
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
