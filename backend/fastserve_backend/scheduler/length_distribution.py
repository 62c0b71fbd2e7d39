"""How long outputs are: a distribution learned online, from jobs that end and those that go on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Bins grow by this factor. Narrower ones would hold too few jobs each to tell their hazard.
_BIN_RATIO = 2**0.5
# Jobs that the prior counts for: after some dozens of real ones it no longer shows.
_PRIOR_JOBS = 10.0
# Of jobs that were predicted to have such a length: for how many the prediction counts, and for how
# many in each bin what is known of all jobs.
_PRIOR_PREDICTED = 3.0
_PRIOR_OF_ALL = 1.0
# A length is predicted up to this factor too high or too low, it is assumed at first.
_ASSUMED_ERROR = 2.0
# A job's weight in a bin halves with each 2,000 later ones, so that changing traffic is followed.
_FADING = 0.5 ** (1 / 2000)


class LengthDistribution:
    """Hazard rates over bins of output lengths: of the jobs that came to a bin, the share that
    ended in it (Kaplan and Meier 1958).

    So jobs that have not ended count too, in the bins that they have passed. Those that ended are
    not enough: under a policy that sets long jobs aside they are mostly short.

    Begins with lengths uniform from 1 to ``max_tokens``. Bins that few jobs came to follow what is
    known of the others: if jobs end three times as fast there as if lengths were uniform, they are
    taken to do so everywhere. Else a policy that has seen short jobs only would believe that
    longer ones are endless, never run them, and never learn that they are not.

    ``DistributionOfPredicted`` begins otherwise.

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
        """Shape [edges, edges]: of the lengths above one edge, the share that is above another; 1
        where that is not behind it.

        Not to be had from the shares of all lengths: those differ by less than rounding where
        nearly all jobs have ended before.
        """
        goes_on = np.concatenate(([1.0], self.goes_on()))
        shape = (len(goes_on), len(goes_on))
        survival: Array = np.cumprod(
            np.where(np.tri(*shape, dtype=bool), 1.0, np.broadcast_to(goes_on, shape)), axis=1
        )
        return survival

    def goes_on(self) -> Array:
        """Shape [bins]: of the jobs that come to a bin, the share that does not end in it."""
        ended, passed = np.array(self._ended), np.array(self._passed)
        prior_passed, prior = self._prior(ended, passed)
        goes_on: Array = (passed + prior_passed) / (passed + ended + prior)
        goes_on[-1] = 0.0
        return goes_on

    def _prior(self, ended: Array, passed: Array) -> tuple[Array, Array]:
        """Jobs that the prior adds to those that passed each bin, and to those that came to it."""
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
    """The same of those jobs whose predictions are from ``shortest`` to ``longest``.

    Begins with lengths that are spread evenly, on a logarithmic scale, from half of ``shortest`` to
    twice ``longest``, and a little of ``of_all``.
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
