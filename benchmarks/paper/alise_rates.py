"""ALISE Fig. 6 and Table 3: rates of ORCA, vLLM, ALISE and an oracle at equal latency.

Fig. 6 has OPT-2.7B, 6.7B and 13B, Table 3 has LLaMA-13B, LLaMA-7B and Pythia-12B. Tables compare
the rates at one mean normalized latency, which a bisection finds to 2%. Plots show the bisections'
runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial

from rich.table import Table

from benchmarks.paper import alise
from benchmarks.paper.alise import ALISE, ORACLE, beside, measured, system_of, testbed, testbed_run
from benchmarks.paper.figures import DATASETS, Figure, datasets_of, new_table, number
from benchmarks.paper.prediction_errors import PERFECT
from benchmarks.paper.rate_search import Line, ratio, save, search_all
from benchmarks.paper.rivals import orca, vllm
from benchmarks.paper.simulated_runs import System, mean_normalized

ORCA, VLLM = "ORCA", "vLLM"
OPT = ("opt-2.7b", "opt-6.7b", "opt-13b")
TABLE3 = ("llama-13b", "llama-7b", "pythia-12b")
GAINS = {
    ("alpaca", VLLM): ("1.3–1.8×",) * 3,
    ("sharegpt", VLLM): ("≤ 2.1×",) * 3,
    ("alpaca", ORCA): ("≤ 3.1×",) * 3,
    ("sharegpt", ORCA): ("≤ 4.3×",) * 3,
}
TABLE3_GAINS = {
    ("alpaca", VLLM): ("1.41×", "1.34×", "1.42×"),
    ("sharegpt", VLLM): ("1.47×", "1.39×", "1.49×"),
}
Gains = Mapping[tuple[str, str], Sequence[str]]
"""(data set, rival) → the paper's gain of ALISE over it for each model."""


def draw(
    title: str, models: Sequence[str], labels: Sequence[str], paper: Gains, args: argparse.Namespace
) -> list[Table]:
    """
    Args:
        labels: what is compared; ALISE is among them.
    """
    chosen = (
        models[-1:] if args.quick else [model for model in models if args.model in (None, model)]
    )
    errors = measured(args)
    runs = {}
    for system in (system_of(args, model) for model in chosen):
        for dataset in datasets_of(args):
            fcfs = testbed_run(args, system, dataset)
            every = {
                ORCA: orca(fcfs),
                VLLM: vllm(fcfs),
                ALISE: alise.alise(fcfs, errors),
                ORACLE: alise.alise(fcfs, PERFECT),
            }
            runs.update({Line(system, dataset, label): every[label] for label in labels})
    bound_s = partial(_bound_s, args.iterations)
    (searches,) = search_all(args, runs, [mean_normalized], bound_s)
    save(args, searches, bound_s)
    others = [label for label in labels if label != ALISE]
    table = new_table(
        f"ALISE {title}: rates at equal latency",
        f"{testbed(args)}. Rates at a mean normalized latency of {args.iterations:g} decode "
        "iterations; gains are ALISE's, with the paper's in brackets. 'ORCA': FCFS, with room for "
        "the longest job kept for each. 'vLLM': FCFS, KV on the device alone and recomputed when "
        "it runs out. 'ALISE': speculative with the measured prediction errors, KV swapped to host "
        "memory in INT8. 'oracle': the same with perfect predictions.",
        "model, lengths",
        "s/token",
        *(f"{label}\njobs/s" for label in labels),
        *(f"over\n{other}" for other in others),
    )
    for system, dataset in dict.fromkeys((line.system, line.dataset) for line in searches):
        rates = {label: searches[Line(system, dataset, label)].rate for label in labels}
        place = models.index(system.model)
        gains = (
            beside(
                ratio(rates[ALISE], rates[other]),
                paper[dataset, other][place] if (dataset, other) in paper else None,
            )
            for other in others
        )
        table.add_row(
            f"{system}, {DATASETS[dataset]}",
            number(bound_s(system)),
            *map(number, rates.values()),
            *gains,
        )
    return [table]


def _bound_s(iterations: float, system: System) -> float:
    return iterations * system.decode_s


def add_options(models: Sequence[str], options: argparse.ArgumentParser) -> None:
    alise.add_options(options)
    options.add_argument("--model", choices=models, help="only this one (all)")
    options.add_argument(
        "--iterations",
        type=float,
        default=2.0,
        help="the latency at which rates are compared, in decode iterations (2)",
    )


FIGURES = (
    Figure(
        "alise_fig06",
        __doc__,
        partial(draw, "Fig. 6", OPT, (ORCA, VLLM, ALISE, ORACLE), GAINS),
        add_options=partial(add_options, OPT),
    ),
    Figure(
        "alise_table3",
        __doc__,
        partial(draw, "Table 3", TABLE3, (ORCA, VLLM, ALISE), TABLE3_GAINS),
        add_options=partial(add_options, TABLE3),
    ),
)
