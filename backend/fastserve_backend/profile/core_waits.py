"""How long ranks waited for cores that other processes used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# Threads of a rank that compute share the work evenly. Others, such as that of the heartbeats, run
# less than this share of what the busiest thread runs, and nobody waits for them.
_COMPUTES = 0.5


class ThreadTimes(NamedTuple):
    """What Linux counts for a thread, in ns since its start."""

    ran_ns: int
    waited_ns: int
    """How long it could have run, but other threads had the cores."""


Threads = Mapping[int, ThreadTimes]
"""By thread id."""


class CoreWaits:
    """Counts the waits of ranks on this host, and of the thread that calls it.

    It does not see that a hypervisor gives the cores to other machines. Where Linux does not count
    (``CONFIG_SCHED_INFO``), or hides the counts, all waits are 0.

    Args:
        pids: the ranks' processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._directories = [Path(f"/proc/{pid}/task") for pid in pids]
        self._ranks = self._read_ranks()
        self._own = self._read_own()

    def since_last(self, passed_s: float) -> float:
        """How many of the ``passed_s`` seconds since the last call, or since the start, ranks would
        not have needed if no thread had waited."""
        ranks, own = self._read_ranks(), self._read_own()
        waited_s = max(
            needless_s(self._ranks, ranks, passed_s), needless_s(self._own, own, passed_s)
        )
        self._ranks, self._own = ranks, own
        return waited_s

    def _read_ranks(self) -> Threads:
        threads: dict[int, ThreadTimes] = {}
        for directory in self._directories:
            try:
                for thread in directory.iterdir():
                    times = _read(thread / "schedstat")
                    if times is not None:
                        threads[int(thread.name)] = times
            except OSError:  # the rank has ended, or its files are hidden
                continue
        return threads

    def _read_own(self) -> Threads:
        times = _read(Path("/proc/thread-self/schedstat"))
        return {} if times is None else {0: times}


def needless_s(before: Threads, after: Threads, passed_s: float) -> float:
    """By how many seconds waits for cores made the work between two readings longer, at least.

    Threads that compute wait for each other, so the longest wait of one of them counts. Waits of
    two threads may follow each other, and then the work took even longer than this says. A thread
    may also have waited before the work began. So what the busiest thread ran was needed.

    Args:
        passed_s: between the readings.
    """
    changes = [
        (times.ran_ns - before[thread].ran_ns, times.waited_ns - before[thread].waited_ns)
        for thread, times in after.items()
        if thread in before
    ]
    busiest_ns = max((ran_ns for ran_ns, _ in changes), default=0)
    if busiest_ns <= 0:
        return 0.0
    longest_ns = max(waited for ran, waited in changes if ran >= _COMPUTES * busiest_ns)
    return max(0.0, min(longest_ns / 1e9, passed_s - busiest_ns / 1e9))


def _read(schedstat: Path) -> ThreadTimes | None:
    try:
        ran, waited, _ = schedstat.read_text().split()
    except (OSError, ValueError):
        return None
    return ThreadTimes(int(ran), int(waited))
