"""Timings are corrected for slow spells of the machine and for single disturbances."""

from __future__ import annotations

import random

import pytest
from fastserve_backend.profile.drift import typical_seconds
from hypothesis import given
from hypothesis import strategies as st


def timings(speeds: list[float], num_things: int, seed: int) -> list[tuple[int, float]]:
    """Each round times all loads in random order. Load n takes n + 1 s times the round's speed."""
    rng = random.Random(seed)
    result = []
    for speed in speeds:
        order = list(range(num_things))
        rng.shuffle(order)
        result += [(thing, (thing + 1) * speed) for thing in order]
    return result


@pytest.mark.parametrize("speeds", [[1, 1, 1], [1, 1, 2], [2, 1, 1, 2, 1], [0.5, 1, 1, 1]], ids=str)
def test_spells_of_a_whole_round_leave_no_trace(speeds: list[float]) -> None:
    seconds = typical_seconds(timings(speeds, num_things=40, seed=1))
    assert [seconds[thing] for thing in range(40)] == pytest.approx(
        [float(thing + 1) for thing in range(40)], rel=0.02
    )


def test_what_was_timed_once_in_a_spell_is_corrected_like_its_neighbours() -> None:
    ordered = timings([1, 1, 3], num_things=40, seed=2)
    ordered.insert(100, (99, 30.0))  # in the middle of the slow round
    assert typical_seconds(ordered)[99] == pytest.approx(10.0, rel=0.02)


def test_a_single_disturbance_is_outvoted() -> None:
    ordered = timings([1, 1, 1], num_things=40, seed=3)
    thing, seconds = ordered[50]
    ordered[50] = (thing, 20 * seconds)
    assert typical_seconds(ordered)[thing] == pytest.approx(seconds, rel=0.02)


def test_nothing_timed_is_nothing_known() -> None:
    assert typical_seconds([]) == {}


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(1e-4, 10.0)), min_size=1, max_size=60))
def test_typical_times_stay_near_what_was_measured(ordered: list[tuple[int, float]]) -> None:
    seconds = typical_seconds(ordered)
    assert set(seconds) == {thing for thing, _ in ordered}
    assert all(value > 0 for value in seconds.values())
