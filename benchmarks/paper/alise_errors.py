"""How wrong may a prediction be before skip-join MLFQ, which needs none, is better?

The errors of this project's predictor, their logarithms times 0 (perfect), 1, 2 and 4; setting of
all_policies.py. Ratios are to skip-join at the same load: below 1 the prediction is worth having.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from alise import measured, options
from common import (
    DATASETS,
    OPT_13B,
    SWAPPING,
    Run,
    console,
    mean_jct,
    mean_normalized,
    new_table,
    number,
    parse,
    scheduler,
)
from load_sweep import save, sweep
from rich.table import Table

LOADS = (0.8, 1.0, 1.5, 2.0)
SCALES = (0.0, 1.0, 2.0, 4.0)
POLICIES = {"speculative": scheduler("speculative"), "gittins": scheduler("gittins")}
SKIP_JOIN = "skip_join_mlfq"


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

    results = sweep(args, OPT_13B, LOADS, ways)
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
    return table


if __name__ == "__main__":
    main()
