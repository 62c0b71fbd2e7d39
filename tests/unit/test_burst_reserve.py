"""The number of blocks that are kept free follows the arrivals."""

from __future__ import annotations

from collections import deque

from fastserve_backend.kv_cache.look_ahead import BurstReserve
from hypothesis import given
from hypothesis import strategies as st

BURST_S, MEMORY_S = 0.25, 60.0


def test_nothing_is_kept_before_the_first_arrival() -> None:
    assert BurstReserve(1000).num_blocks(5.0) == 0


def test_the_largest_burst_is_kept_for_a_minute() -> None:
    reserve = BurstReserve(1000)
    for time_s in (1.0, 1.1, 1.2):
        reserve.add(10, time_s)
    assert reserve.num_blocks(1.2) == 30
    reserve.add(20, 5.0)
    assert reserve.num_blocks(61.1) == 30
    assert reserve.num_blocks(61.3) == 20
    assert reserve.num_blocks(70.0) == 0


def test_the_reserve_leaves_most_of_the_device_to_jobs_that_are_here() -> None:
    reserve = BurstReserve(100)
    reserve.add(90, 0.0)
    assert reserve.num_blocks(0.0) == 25


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 50)), min_size=1, max_size=60),
    st.floats(0.0, 100.0),
)
def test_it_is_the_largest_sum_in_any_window(
    arrivals: list[tuple[float, int]], later_s: float
) -> None:
    reserve = BurstReserve(10**9)
    now, seen = 0.0, deque[tuple[float, int]]()
    largest: list[tuple[float, int]] = []
    for gap_s, blocks in arrivals:
        now += gap_s
        reserve.add(blocks, now)
        seen.append((now, blocks))
        largest.append((now, sum(b for time_s, b in seen if time_s >= now - BURST_S)))
        expected = max(b for time_s, b in largest if time_s >= now - MEMORY_S)
        assert reserve.num_blocks(now) == expected
    now += later_s
    kept = [blocks for time_s, blocks in largest if time_s >= now - MEMORY_S]
    assert reserve.num_blocks(now) == max(kept, default=0)
