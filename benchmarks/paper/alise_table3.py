"""ALISE Table 3: rate over ORCA's and vLLM's at equal latency, LLaMA-13B, LLaMA-7B and Pythia-12B.

Systems and search are those of alise_fig06.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.paper.alise import ALISE, ORCA, VLLM, compare_rates

MODELS = ("llama-13b", "llama-7b", "pythia-12b")
PAPER = {
    (model, dataset, VLLM): gain
    for dataset, gains in (
        ("alpaca", ("1.41×", "1.34×", "1.42×")),
        ("sharegpt", ("1.47×", "1.39×", "1.49×")),
    )
    for model, gain in zip(MODELS, gains, strict=True)
}


def main(argv: Sequence[str] | None = None) -> Table:
    return compare_rates(
        "alise_table3",
        __doc__,
        argv,
        MODELS,
        (ORCA, VLLM, ALISE),
        "ALISE Table 3: rates at equal latency",
        PAPER,
    )


if __name__ == "__main__":
    main()
