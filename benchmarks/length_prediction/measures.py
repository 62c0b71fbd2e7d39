"""How near predicted lengths are to real ones."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.float64]


@dataclass(frozen=True)
class Accuracy:
    """How near predictions, in tokens, are to real lengths."""

    same_bin: float
    """Share of jobs whose predicted and real length are in the same bin."""
    next_bin: float
    """Share of jobs that are at most one bin off."""
    mean_error: float
    """Mean of |predicted - real| / real."""
    median_error: float
    mean_log_error: float
    """Mean of |ln predicted - ln real|, in which half and double are equally wrong."""
    rank_correlation: float
    """Spearman's rank correlation, all that an order of jobs depends on; nan if all are equal."""

    HEADER = (
        "| | same bin | ± 1 bin | error, mean | median | log error | rank correlation |\n"
        "|---|---|---|---|---|---|---|"
    )

    def row(self, name: str) -> str:
        return f"| {name} | " + " | ".join(f"{value:.2f}" for value in astuple(self)) + " |"


def bin_edges(real: Lengths, num_bins: int) -> Lengths:
    """Edges between bins that hold equally many of these lengths."""
    edges: Lengths = np.quantile(real, np.linspace(0, 1, num_bins + 1)[1:-1])
    return edges


def accuracy(predicted: Lengths, real: Lengths, edges: Lengths) -> Accuracy:
    """``edges``: as `bin_edges` of the lengths that were learned from."""
    off = np.abs(np.digitize(predicted, edges) - np.digitize(real, edges))
    relative = np.abs(predicted - real) / real
    return Accuracy(
        float(np.mean(off == 0)),
        float(np.mean(off <= 1)),
        float(np.mean(relative)),
        float(np.median(relative)),
        float(np.mean(np.abs(np.log(predicted / real)))),
        _rank_correlation(predicted, real),
    )


def _rank_correlation(a: Lengths, b: Lengths) -> float:
    if np.ptp(a) == 0:
        return float("nan")
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Lengths) -> Lengths:
    """Equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: Lengths = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return means
