"""Since when jobs wait: what keeps them from starving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator

from fastserve_backend.job import Job


class WaitingJobs:
    """Jobs by the time at which they last ran, or arrived; each operation costs O(1), but
    ``starved`` goes over those in flight that it leaves out."""

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

    def remove(self, job: Job) -> None:
        """The job ended, or was promoted: that is done once until it has run."""
        self._since.pop(job.number, None)

    def starves_in(self, job: Job, now: float) -> float | None:
        """Seconds until the job starves, at least 0; None if it was promoted already."""
        waiting = self._since.get(job.number)
        return None if waiting is None else max(0.0, waiting[0] + self.starvation_s - now)

    def starved(self, now: float, in_flight: Collection[int]) -> Iterator[Job]:
        """Those that have waited for ``starvation_s``, the longest first, but for those in flight.
        Of use until the list changes."""
        for number, (since, job) in self._since.items():
            if now - since < self.starvation_s:
                return
            if number not in in_flight:
                yield job
