"""The distribution of output lengths, learned online from jobs that end and jobs that go on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Bins grow by this factor. Narrower bins would hold too few jobs to tell their hazard rates.
_BIN_RATIO = 2**0.5
# The prior counts like this many jobs. After some dozens of real jobs it no longer shows.
_PRIOR_JOBS = 10.0
# Among jobs with a prediction, the prediction counts like this many jobs, and in each bin the
# distribution of all jobs like this many.
_PRIOR_PREDICTED = 3.0
_PRIOR_OF_ALL = 1.0
# At first a prediction is assumed to be wrong by up to this factor, in both directions.
_ASSUMED_ERROR = 2.0
# A job's weight in a bin halves with every 2,000 later jobs, to follow changing traffic.
_FADING = 0.5 ** (1 / 2000)


class LengthDistribution:
    """Hazard rates over bins of output lengths. The hazard rate of a bin is the share of jobs that
    end in it, of all jobs that reach it (Kaplan and Meier 1958).

    So unfinished jobs count too, in the bins that they have passed. Ended jobs alone would mislead:
    under a policy that sets long jobs aside, they are mostly short.

    The prior is a uniform distribution from 1 to ``max_tokens``. It is sped up to match the bins
    that many jobs reached: if jobs end three times as fast there as under the uniform distribution,
    they are assumed to do so in all bins. Otherwise a policy that has only seen short jobs would
    assume that longer jobs are endless, never run them, and never learn better.

    ``DistributionOfPredicted`` has another prior.

    ``edges`` ascend from 0 to ``max_tokens``; bin k holds the lengths
    ``edges[k] < n ≤ edges[k + 1]``.
    """

    def __init__(self, max_tokens: int) -> None:
        edges = [0]
        while edges[-1] < max_tokens:
            edges.append(min(max_tokens, max(edges[-1] + 1, round(edges[-1] * _BIN_RATIO))))
        self.edges: Sequence[int] = edges
        self._ended = [0.0] * self.num_bins
        self._passed = [0.0] * self.num_bins
        self.num_ended = 0

    @property
    def num_bins(self) -> int:
        return len(self.edges) - 1

    def bin_of(self, num_tokens: int) -> int:
        """The bin of a length from 1 to ``max_tokens``."""
        return bisect_left(self.edges, num_tokens) - 1

    def count_passed(self, first: int, last: int) -> None:
        """A job is longer than all lengths in the bins from ``first`` up to, not including,
        ``last``."""
        for index in range(first, last):
            self._fade(index)
            self._passed[index] += 1.0

    def count_ended(self, index: int) -> None:
        """A job ended by itself with a length in this bin."""
        self._fade(index)
        self._ended[index] += 1.0
        self.num_ended += 1

    def survival(self) -> Array:
        """Of the jobs longer than edge i, the share that is longer than edge j; 1 for j ≤ i.

        The quotient of two shares of all jobs would not do: where nearly all jobs have ended, these
        shares differ by less than the rounding error.

        Returns:
            shape [edges, edges].
        """
        goes_on = np.concatenate(([1.0], self.goes_on()))
        shape = (len(goes_on), len(goes_on))
        survival: Array = np.cumprod(
            np.where(np.tri(*shape, dtype=bool), 1.0, np.broadcast_to(goes_on, shape)), axis=1
        )
        return survival

    def goes_on(self) -> Array:
        """Of the jobs that reach a bin, the share that does not end in it; shape [bins]."""
        ended, passed = np.array(self._ended), np.array(self._passed)
        prior_passed, prior = self._prior(ended, passed)
        goes_on: Array = (passed + prior_passed) / (passed + ended + prior)
        goes_on[-1] = 0.0
        return goes_on

    def _prior(self, ended: Array, passed: Array) -> tuple[Array, Array]:
        """How many jobs the prior adds to those that passed each bin, and to those that reached
        it."""
        left = 1 - np.array(self.edges) / self.edges[-1]
        uniform = left[1:] / left[:-1]
        as_uniform = (ended + passed) @ (1 - uniform)
        faster = (_PRIOR_JOBS + ended.sum()) / (_PRIOR_JOBS + as_uniform)
        prior = _PRIOR_JOBS * left[:-1]
        return prior * uniform**faster, prior

    def _fade(self, index: int) -> None:
        self._passed[index] *= _FADING
        self._ended[index] *= _FADING


class DistributionOfPredicted(LengthDistribution):
    """The lengths of the jobs whose predictions are from ``shortest`` to ``longest``.

    The prior spreads lengths evenly, on a logarithmic scale, from half of ``shortest`` to twice
    ``longest``, and adds a little of ``of_all``.
    """

    def __init__(self, of_all: LengthDistribution, shortest: int, longest: int) -> None:
        super().__init__(of_all.edges[-1])
        self._of_all = of_all
        low, high = np.log((shortest / _ASSUMED_ERROR, longest * _ASSUMED_ERROR))
        edges = np.log(np.maximum(self.edges, 0.5))
        self._predicted_left = _PRIOR_PREDICTED * np.clip((high - edges) / (high - low), 0, 1)

    def _prior(self, ended: Array, passed: Array) -> tuple[Array, Array]:
        left = self._predicted_left
        return left[1:] + _PRIOR_OF_ALL * self._of_all.goes_on(), left[:-1] + _PRIOR_OF_ALL
