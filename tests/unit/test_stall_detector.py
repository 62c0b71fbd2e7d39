"""When a call to Triton counts as stalled."""

from __future__ import annotations

from fastserve_backend.serving.guard import StallDetector

SIGHTINGS = 60  # 15 s at four a second


def first_stall(calls: list[int | None]) -> int | None:
    """The number of checks before the detector sees a stall; None if it sees none."""
    detector = StallDetector()
    return next((number for number, call in enumerate(calls) if detector.is_stalled(call)), None)


def test_one_call_seen_for_long_is_a_stall() -> None:
    assert first_stall([None, 7, *[8] * 100]) == 2 + SIGHTINGS
    assert first_stall([8] * SIGHTINGS) is None


def test_calls_that_return_are_none_however_many() -> None:
    assert first_stall(list(range(1000))) is None
    assert first_stall(([3] * (SIGHTINGS - 1) + [4]) * 10) is None
    assert first_stall([None] * 1000) is None


def test_the_count_begins_anew_after_a_call_has_returned() -> None:
    assert first_stall([1] * SIGHTINGS + [None] + [2] * SIGHTINGS) is None
