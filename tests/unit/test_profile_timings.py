"""What repeated timings of steps tell about the steps and about the machine."""

from __future__ import annotations

import pytest
from fastserve_backend.profile.timings import (
    Timing,
    do_scatter,
    scatter,
    shortest_seconds,
    show_load,
)
from hypothesis import given
from hypothesis import strategies as st


def timed(*wall_s: float, waited: float = 0.0, mix: int = 0) -> list[Timing]:
    """Timings of one mix, each with this share of waits."""
    return [Timing(mix, seconds, waited * seconds) for seconds in wall_s]


timings = st.lists(
    st.builds(
        lambda mix, wall_s, share: Timing(mix, wall_s, share * wall_s),
        mix=st.integers(0, 5),
        wall_s=st.floats(1e-4, 10.0),
        share=st.floats(0.0, 0.98),
    ),
    max_size=60,
)


@given(timings)
def test_the_time_of_a_mix_is_its_shortest_without_waits(taken: list[Timing]) -> None:
    seconds = shortest_seconds(taken)
    assert set(seconds) == {timing.mix for timing in taken}
    for timing in taken:
        assert 0 < seconds[timing.mix] <= timing.own_s
    assert all(any(seconds[t.mix] == t.own_s for t in taken if t.mix == mix) for mix in seconds)


@given(timings)
def test_longer_disturbances_change_no_time(taken: list[Timing]) -> None:
    disturbed = [Timing(t.mix, 3 * t.wall_s, t.waited_s + 2 * t.wall_s) for t in taken]
    assert shortest_seconds(disturbed) == pytest.approx(shortest_seconds(taken))


def test_timings_scatter_if_the_two_shortest_of_most_mixes_differ() -> None:
    assert scatter([]) == scatter(timed(1.0)) == 0.0
    assert scatter(timed(1.0, 1.5, 9.0)) == pytest.approx(0.5)
    close = timed(1.0, 1.01, mix=1) + timed(2.0, 2.02, mix=2)
    assert not do_scatter(close + timed(1.0, 5.0, mix=3))
    assert do_scatter(timed(1.0, 1.5, mix=1) + timed(2.0, 3.0, mix=2) + timed(1.0, 1.0, mix=3))


def test_waits_and_scatter_show_load() -> None:
    assert not show_load([], [])
    assert not show_load(timed(9.0), timed(1.0, 1.02, 4.0, waited=0.05))
    assert show_load([], timed(1.0, 1.02, waited=0.3))
    assert show_load(timed(9.0, waited=0.5), timed(1.0, 1.02))
    assert show_load([], timed(1.0, 1.5))
