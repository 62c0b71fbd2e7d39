"""ALISE Fig. 6: latency against rate for ORCA, vLLM, ALISE and an oracle, OPT-2.7B, 6.7B, 13B.

The table compares the rates at one mean normalized latency, found by bisection to 2%; the plots
show the runs of the bisections.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.paper.alise import ALISE, ORACLE, ORCA, VLLM, compare_rates

MODELS = ("opt-2.7b", "opt-6.7b", "opt-13b")
GAINS = {
    ("alpaca", VLLM): "1.3–1.8×",
    ("sharegpt", VLLM): "≤ 2.1×",
    ("alpaca", ORCA): "≤ 3.1×",
    ("sharegpt", ORCA): "≤ 4.3×",
}
PAPER = {(model, *key): gain for model in MODELS for key, gain in GAINS.items()}


def main(argv: Sequence[str] | None = None) -> Table:
    return compare_rates(
        "alise_fig06",
        __doc__,
        argv,
        MODELS,
        (ORCA, VLLM, ALISE, ORACLE),
        "ALISE Fig. 6: rates at equal latency",
        PAPER,
    )


if __name__ == "__main__":
    main()
