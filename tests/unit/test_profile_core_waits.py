"""Waits for cores: counted by Linux for each thread, on cores that are really busy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from busy_cores import SPIN, busy_cores
from fastserve_backend.profile.core_waits import CoreWaits, ThreadTimes, needless_s
from hypothesis import given
from hypothesis import strategies as st
from waiting import DEADLINE_S, wait_for


def seconds(ran: float, waited: float) -> ThreadTimes:
    return ThreadTimes(int(ran * 1e9), int(waited * 1e9))


def test_the_longest_wait_of_a_thread_that_computes_counts() -> None:
    before = {1: seconds(5, 1), 2: seconds(5, 1), 3: seconds(0, 7), 4: seconds(9, 9)}
    after = {1: seconds(6, 1.5), 2: seconds(5.9, 3), 3: seconds(0.1, 99), 5: seconds(8, 8)}
    # Thread 3 does not compute; threads 4 and 5 have only one reading.
    assert needless_s(before, after, passed_s=10.0) == pytest.approx(2.0)
    # A part of that wait was before the work, for thread 1 ran for a second.
    assert needless_s(before, after, passed_s=2.5) == pytest.approx(1.5)


def test_threads_that_do_not_run_have_no_waits() -> None:
    times = {1: seconds(5, 1)}
    assert needless_s(times, times, 1.0) == needless_s({}, times, 1.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=8), st.floats(0, 20))
def test_what_the_busiest_thread_ran_was_needed(
    changes: list[tuple[float, float]], passed_s: float
) -> None:
    before = {thread: seconds(1, 1) for thread in range(len(changes))}
    after = {n: seconds(1 + ran, 1 + waited) for n, (ran, waited) in enumerate(changes)}
    longest = max((waited for _, waited in changes), default=0.0)
    busiest = max((ran for ran, _ in changes), default=0.0)
    waited_s = needless_s(before, after, passed_s)
    assert 0.0 <= waited_s <= longest + 1e-6
    assert waited_s <= max(0.0, passed_s - busiest) + 1e-6


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="Linux does not count")
def test_waits_show_while_more_processes_spin_than_there_are_cores() -> None:
    with busy_cores(), subprocess.Popen(SPIN) as rank:
        try:
            waits = CoreWaits([rank.pid])
            waited_s = 0.0

            def has_waited() -> bool:
                nonlocal waited_s
                waited_s += waits.since_last(DEADLINE_S)
                return waited_s > 0.1

            wait_for(has_waited)
        finally:
            rank.kill()


def test_a_rank_that_has_ended_raises_no_error() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as rank:
        waits = CoreWaits([rank.pid, os.getpid()])
    assert waits.since_last(1.0) >= 0.0
