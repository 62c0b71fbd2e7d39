"""How long outputs are: a distribution learned online, from jobs that end and those that go on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Bins grow by this factor. Narrower ones would hold too few jobs each to tell their hazard.
_BIN_RATIO = 2**0.5
# Jobs that the prior counts for: after some dozens of real ones it no longer shows.
_PRIOR_JOBS = 10.0
# A job's weight in a bin halves with each 2,000 later ones, so that changing traffic is followed.
_FADING = 0.5 ** (1 / 2000)


class LengthDistribution:
    """Hazard rates over bins of output lengths: of the jobs that came to a bin, the share that
    ended in it (Kaplan and Meier 1958).

    So jobs that have not ended count too, in the bins that they have passed. Those that ended are
    not enough: under a policy that sets long jobs aside they are mostly short.

    Begins with lengths uniform from 1 to ``max_tokens``. ``edges`` ascend from 0 to ``max_tokens``;
    bin k holds the lengths ``edges[k] < n ≤ edges[k + 1]``.
    """

    def __init__(self, max_tokens: int) -> None:
        edges = [0]
        while edges[-1] < max_tokens:
            edges.append(min(max_tokens, max(edges[-1] + 1, round(edges[-1] * _BIN_RATIO))))
        self.edges: Sequence[int] = edges
        prior = _PRIOR_JOBS / max_tokens
        self._ended = [prior * (high - low) for low, high in pairwise(edges)]
        self._passed = [prior * (max_tokens - high) for high in edges[1:]]
        self.num_ended = 0

    def bin_of(self, num_tokens: int) -> int:
        """The bin of a length of 1 to ``max_tokens``."""
        return bisect_left(self.edges, num_tokens) - 1

    def passed(self, first: int, last: int) -> None:
        """A job is longer than the lengths of the bins from ``first`` to before ``last``."""
        for index in range(first, last):
            self._fade(index)
            self._passed[index] += 1.0

    def ended(self, index: int) -> None:
        """A job ended, by itself, with a length of this bin."""
        self._fade(index)
        self._ended[index] += 1.0
        self.num_ended += 1

    def survival(self) -> Array:
        """Shape [edges]: the probability that a length exceeds each edge, from 1 down to 0."""
        ended, passed = np.array(self._ended), np.array(self._passed)
        goes_on = passed / (passed + ended)
        goes_on[-1] = 0.0
        return np.concatenate(([1.0], np.cumprod(goes_on)))

    def _fade(self, index: int) -> None:
        self._passed[index] *= _FADING
        self._ended[index] *= _FADING
