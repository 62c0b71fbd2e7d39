"""The Gittins index of a job, from the distribution of output lengths."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fastserve_backend.config_sections import Objective
from fastserve_backend.scheduler.length_distribution import Array, LengthDistribution

# Bins of the extra time: how many decodes longer than a decode the job's next token takes.
_EXTRA_RATIO = 2 ** (1 / 6)
_LEAST_EXTRA, _MOST_EXTRA = 0.05, 10_000.0
# Bins of prompt lengths grow by this factor. They may be wide, since the prompt only affects what a
# token's KV costs.
_PROMPT_RATIO = 1.25
# Finishing a job with N tokens is worth N to the power of minus this.
_WORTH_EXPONENT: dict[Objective, float] = {"normalized_latency": 1.0, "balanced": 0.5, "jct": 0.0}


@dataclass(frozen=True, slots=True)
class Capacity:
    """What all jobs of an iteration share."""

    max_seqs: int
    kv_tokens: int
    """Tokens whose K and V the device can hold."""

    def share(self, prompt_tokens: int, num_tokens: Array) -> Array:
        """How many whole iterations' seats or KV memory, whichever is scarcer, a job's first
        ``num_tokens`` output tokens take. The shape is that of ``num_tokens``."""
        seats = num_tokens / self.max_seqs
        memory = (prompt_tokens * num_tokens + num_tokens**2 / 2) / self.kv_tokens
        return np.maximum(seats, memory)


class GittinsIndex:
    """Looks up indices by extra time, prompt length, age and most tokens, each in bins. A row of
    all extra times is computed on first use; later look-ups in it cost O(1).

    Take a job that has ``a`` tokens and will have N, and whose next token takes ``x`` iterations
    longer than a decode. Finishing it is worth r(N) = N^-p. Its first n tokens take c(n) iterations
    of all seats or KV memory. Its index is::

                        E[ r(N) ; N ≤ b | N > a ]
        G(a) = max    ─────────────────────────────────
               b > a   x + E[ c(min(N, b)) − c(a) | N > a ]

    That is the worth per unit of time spent on the job, if it is given up at ``b`` tokens, for the
    best ``b``. A single server that always runs the job with the largest index minimizes the mean
    of r(N) · JCT among all policies that do not know N (Gittins 1979; for jobs of unknown size
    Aalto, Ayesta and Righter 2009, Scully and Harchol-Balter 2018). p is 0 for the mean JCT, 1 for
    the mean normalized latency, and ½ for a balance of both.
    """

    def __init__(
        self, lengths: LengthDistribution, objective: Objective, capacity: Capacity
    ) -> None:
        self._exponent = _WORTH_EXPONENT[objective]
        self._capacity = capacity
        self._edges = lengths.edges
        self._edges_array = np.asarray(lengths.edges, dtype=np.float64)
        # The mean length in each bin.
        self._middles = (self._edges_array[:-1] + 1 + self._edges_array[1:]) / 2
        self._worths = self._middles**-self._exponent
        self._survival = lengths.survival()
        self._extras = [0.0, _LEAST_EXTRA]
        while self._extras[-1] < _MOST_EXTRA:
            self._extras.append(self._extras[-1] * _EXTRA_RATIO)
        self._extras_column = np.asarray(self._extras)[:, None]
        # By bins of prompt, age and most tokens. Lists, because reading one number from an array
        # takes ten times as long.
        self._rows: dict[tuple[int, int, int], list[float]] = {}

    def of(self, extra: float, prompt_tokens: int, num_tokens: int, max_tokens: int) -> float:
        """The index of a job. A job with a larger index should run sooner.

        Args:
            extra: how many decodes longer than a decode its next token takes.
            num_tokens: its output tokens so far.
            max_tokens: its output tokens at its end, at most.
        """
        prompt = round(math.log(max(1, prompt_tokens), _PROMPT_RATIO))
        age = bisect_right(self._edges, num_tokens) - 1
        most = max(age + 1, min(bisect_left(self._edges, max_tokens), len(self._edges) - 1))
        key = (prompt, age, most)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._row(round(_PROMPT_RATIO**prompt), age, most)
        return row[max(0, bisect_right(self._extras, extra) - 1)]

    def _row(self, prompt_tokens: int, age: int, most: int) -> list[float]:
        """The indices of all extra times. ``age`` and ``most`` are numbers of edges, ``age`` the
        smaller one."""
        at_middles, at_edges = _shares(self._capacity, prompt_tokens, tuple(self._edges))
        survival = self._survival[age, age : most + 1]
        ended = survival[:-1] - survival[1:]
        # For each bin that may be the job's last: the worth, and the time until there.
        worth = np.cumsum(ended * self._worths[age:most])
        # Jobs that reach the most tokens end there.
        worth[-1] += survival[-1] * self._edges_array[most] ** -self._exponent
        until_end = at_middles[age:most] - at_edges[age]
        until_edge = at_edges[age + 1 : most + 1] - at_edges[age]
        taken = np.cumsum(ended * until_end) + survival[1:] * until_edge
        time = self._extras_column + taken
        row: list[float] = (worth / time).max(axis=1).tolist()
        return row


@lru_cache(maxsize=256)
def _shares(capacity: Capacity, prompt_tokens: int, edges: tuple[int, ...]) -> tuple[Array, Array]:
    """``capacity.share`` up to the middles of all bins, and up to their edges. Cached, since every
    new index needs the same values."""
    ends = np.asarray(edges, dtype=np.float64)
    middles = (ends[:-1] + 1 + ends[1:]) / 2
    return capacity.share(prompt_tokens, middles), capacity.share(prompt_tokens, ends)
