"""The Gittins index of a job of whose output length only the distribution is known."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from fastserve_backend.config import Objective
from fastserve_backend.scheduler.length_distribution import Array, LengthDistribution

# How much longer than a decode a job's next token takes, in decodes: the rows of the table.
_EXTRA_RATIO = 1.5
_MOST_EXTRA = 10_000.0


class GittinsIndex:
    """A table by extra time, age and most tokens, each in bins; a look-up costs O(1).

    For a job that has ``a`` tokens, whose next one takes ``x`` decodes longer than a decode, with N
    the tokens that it will have and r(N) the worth of its end (1 for the mean JCT, 1 / N for the
    mean normalized latency)::

                        E[ r(N) ; N ≤ b | N > a ]
        G(a) = max    ─────────────────────────────
               b > a   x + E[ min(N, b) − a | N > a ]

    the worth that is to be had for each unit of time spent on the job, if it is given up at ``b``
    tokens, for the best ``b``. On one server that always runs the job of the largest index, the
    mean of r(N) · JCT is the least that is possible without knowing N (Gittins 1979; for jobs
    of unknown size Aalto, Ayesta and Righter 2009, Scully and Harchol-Balter 2018).
    """

    def __init__(self, lengths: LengthDistribution, objective: Objective) -> None:
        self._edges = lengths.edges
        self._extras = [0.0, 1.0]
        while self._extras[-1] < _MOST_EXTRA:
            self._extras.append(self._extras[-1] * _EXTRA_RATIO)
        # Lists: reading one number of an array takes ten times as long.
        self._table: list[list[list[float]]] = self._compute(lengths.survival(), objective).tolist()

    def _compute(self, survival: Array, objective: Objective) -> Array:
        """Shape [extra, age, most tokens]; an age must be below the most tokens."""
        edges = np.asarray(self._edges, dtype=np.float64)
        middles = (edges[:-1] + 1 + edges[1:]) / 2  # of the lengths in each bin
        is_jct = objective == "jct"
        # [age, b], of the jobs that reach the age: worth and tokens until b.
        ended = survival[:, :-1] - survival[:, 1:]
        worth = _sums(ended if is_jct else ended / middles)
        ages = edges[:, None]
        tokens = _sums(ended * middles) - ages * (1 - survival) + survival * (edges - ages)
        time = tokens + np.asarray(self._extras)[:, None, None]
        is_after = edges > ages
        ratio = np.divide(worth, time, out=np.zeros_like(time), where=is_after)
        # Those that reach the most tokens end there.
        last = survival * (1.0 if is_jct else 1 / np.maximum(edges, 1))
        ratio_last = np.divide(worth + last, time, out=np.zeros_like(time), where=is_after)
        table: Array = np.maximum(np.maximum.accumulate(ratio, axis=2), ratio_last)
        return table

    def of(self, extra: float, num_tokens: int, max_tokens: int) -> float:
        """Of a job with ``num_tokens`` that ends at ``max_tokens`` at the latest, whose next token
        takes ``extra`` decodes longer than a decode. Larger is to run sooner."""
        by_age = self._table[max(0, bisect_right(self._extras, extra) - 1)]
        by_most = by_age[bisect_right(self._edges, num_tokens) - 1]
        return by_most[min(bisect_left(self._edges, max_tokens), len(self._edges) - 1)]


def _sums(values: Array) -> Array:
    """[i, j]: the sum of ``values[i, :j]``."""
    sums: Array = np.pad(np.cumsum(values, axis=1), ((0, 0), (1, 0)))
    return sums
