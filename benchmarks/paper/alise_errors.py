"""How wrong may a prediction be before skip-join MLFQ, which needs none, is better?

The errors of this project's predictor, their logarithms times 0 (perfect), 1, 2 and 4; setting of
all_policies.py. Ratios are to skip-join at the same load: below 1 the prediction is worth having.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from alise import measured, options
from fastserve_bench.workload import Lengths, poisson_trace
from figures import DATASETS, console, datasets_of, fcfs_run, lengths_of, new_table, number, parse
from load_sweep import save, sweep
from prediction_errors import PredictionErrors
from rich.table import Table
from simulated_runs import (
    MAX_MODEL_LEN,
    OPT_13B,
    SWAPPING,
    Run,
    mean_jct,
    mean_normalized,
    scheduler,
)

SCALES = (0.0, 1.0, 2.0, 4.0)
POLICIES = {"speculative": scheduler("speculative"), "gittins": scheduler("gittins")}
SKIP_JOIN = "skip_join_mlfq"
DRAWS = 2000  # predictions that the factors are counted of


def main(argv: Sequence[str] | None = None) -> Table:
    args = parse(options(__doc__, jobs=400), argv)
    errors = measured(args)

    def ways(fcfs: Run) -> Mapping[str, Run]:
        runs = {SKIP_JOIN: replace(fcfs, scheduler=scheduler(SKIP_JOIN))}
        for name, policy in POLICIES.items():
            for scale in SCALES:
                runs[f"{name}, errors × {scale:g}"] = replace(
                    fcfs, scheduler=policy, errors=errors.scaled(scale)
                )
        return runs

    results = sweep(args, partial(fcfs_run, args, OPT_13B), ways)
    save(args, "alise_errors", results)
    table = new_table(
        "Policies with wrong predictions",
        f"OPT-13B, A100-40G, {args.jobs} jobs (Alpaca twice as many). {SWAPPING} Seconds.",
        "lengths, load, policy",
        "norm.\nmean",
        "to\nskip-join",
        "norm.\nP95",
        "JCT\nmean",
        "to\nskip-join",
    )
    for (dataset, load, label), summary in results.items():
        skip_join = results[dataset, load, SKIP_JOIN]
        table.add_row(
            f"{DATASETS[dataset]}, {load:g}, {label}",
            number(mean_normalized(summary)),
            f"{mean_normalized(summary) / mean_normalized(skip_join):.2f}",
            number(summary.normalized_latency_s.p95),
            number(mean_jct(summary)),
            f"{mean_jct(summary) / mean_jct(skip_join):.2f}",
            end_section=label.endswith(f"× {SCALES[-1]:g}"),
        )
    console.print(table)
    for dataset in datasets_of(args):
        half, most = _factors(errors, lengths_of(args, dataset), args.seed)
        console.print(
            f"{DATASETS[dataset]}, errors × 1: half of the predictions are within a factor of "
            f"{half:.2f}, 80% within {most:.2f}."
        )
    return table


def _factors(errors: PredictionErrors, lengths: Lengths, seed: int) -> Sequence[float]:
    """Within which 50% and 80% of the predictions are, too high or too low."""
    trace = poisson_trace(lengths, 1.0, DRAWS, seed)
    predictions = errors.predict(trace, lengths, seed, MAX_MODEL_LEN)
    ratios = np.array(predictions) / [job.output_tokens for job in trace]
    factors: list[float] = np.exp(np.quantile(np.abs(np.log(ratios)), (0.5, 0.8))).tolist()
    return factors


if __name__ == "__main__":
    main()
