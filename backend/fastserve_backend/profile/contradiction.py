"""Notices that serving contradicts the latency profile."""

from __future__ import annotations

# A profile is wrong if iterations take less than this share of what it predicts. Machines drift by
# 20%.
_SHARE = 0.6
# The running mean of the correction must be below for so many iterations in a row. 50 iterations
# leave 8% of what it was before.
_ITERATIONS = 300


class Contradiction:
    """Tells once that iterations are far shorter than predicted.

    Other processes make iterations longer. So if they are shorter, it was the profile that was
    measured on a busy machine. If they are longer, the machine may just be busy now, and the
    profile is right.
    """

    def __init__(self) -> None:
        self._num_shorter = 0
        """Latest iterations in a row after which the mean was below the share."""

    def observe(self, ratio: float) -> bool:
        """Whether the profile has just turned out to be wrong.

        Args:
            ratio: the running mean of real over predicted times, after one more iteration.
        """
        self._num_shorter = self._num_shorter + 1 if ratio < _SHARE else 0
        return self._num_shorter == _ITERATIONS
