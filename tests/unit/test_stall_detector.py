"""When something counts as standing still."""

from __future__ import annotations

from fastserve_backend.serving.stall_detector import StallDetector

NUM_LOOKS = 60


def first_stall(seen: list[int | None]) -> int | None:
    """The number of looks before the detector sees a stall; None if it sees none."""
    detector = StallDetector(NUM_LOOKS)
    return next((number for number, one in enumerate(seen) if detector.is_stalled(one)), None)


def test_one_call_seen_for_long_is_a_stall() -> None:
    assert first_stall([None, 7, *[8] * 100]) == 2 + NUM_LOOKS
    assert first_stall([8] * NUM_LOOKS) is None


def test_calls_that_return_are_none_however_many() -> None:
    assert first_stall(list(range(1000))) is None
    assert first_stall(([3] * (NUM_LOOKS - 1) + [4]) * 10) is None
    assert first_stall([None] * 1000) is None


def test_the_count_begins_anew_after_a_call_has_returned() -> None:
    assert first_stall([1] * NUM_LOOKS + [None] + [2] * NUM_LOOKS) is None
