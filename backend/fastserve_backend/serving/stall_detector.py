"""When something that should move counts as standing still."""

from __future__ import annotations


class StallDetector:
    """Finds what has not moved for a number of looks.

    It counts looks, not seconds: a pause of all processes, of the machine, or of whoever looks, is
    no stall.
    """

    def __init__(self, num_looks: int) -> None:
        self._num_looks = num_looks
        self._seen: object = None
        self._num_same = 0

    def is_stalled(self, seen: object) -> bool:
        """Whether so many looks in a row have seen the same as the look before them. To be asked at
        regular intervals.

        Args:
            seen: what changes while all is well; None: there is nothing that could stall.
        """
        is_same = seen is not None and seen == self._seen
        self._num_same = self._num_same + 1 if is_same else 0
        self._seen = seen
        return self._num_same >= self._num_looks
