"""Since when jobs wait: what keeps them from starving."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator

from fastserve_backend.job import Job


class WaitingJobs:
    """Jobs by the time at which they last ran, or arrived; each operation costs O(1) amortised.

    A job that was found starved is off the list until it has run: it is promoted once.
    """

    def __init__(self, starvation_s: float) -> None:
        self.starvation_s = starvation_s
        # A job is appended again when it ran, so the first has waited longest, but for arrivals
        # during an iteration: those stand behind the jobs that ran in it, and are found at most
        # that iteration late.
        self._since: OrderedDict[int, tuple[float, Job]] = OrderedDict()

    def begin(self, job: Job, now: float) -> None:
        """The job waits from now on: it arrived, or an iteration of it ended."""
        self._since.pop(job.number, None)
        self._since[job.number] = (now, job)

    def not_run(self, job: Job) -> None:
        """The job did not run, selected or not: if it was found starved, it will be once more."""
        if job.number not in self._since:
            self._since[job.number] = (-math.inf, job)
            self._since.move_to_end(job.number, last=False)

    def remove(self, job: Job) -> None:
        self._since.pop(job.number, None)

    def starves_in(self, job: Job, now: float) -> float | None:
        """Seconds until the job starves, at least 0; None if it was found starved already."""
        waiting = self._since.get(job.number)
        return None if waiting is None else max(0.0, waiting[0] + self.starvation_s - now)

    def take_starved(self, now: float) -> Iterator[Job]:
        """Those that have waited for ``starvation_s``, the longest first."""
        while self._since:
            number, (since, job) = next(iter(self._since.items()))
            if now - since < self.starvation_s:
                return
            del self._since[number]
            yield job
