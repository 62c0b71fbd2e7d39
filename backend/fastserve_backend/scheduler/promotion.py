"""Jobs that have waited too long come first, one at a time: what keeps jobs from starving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from fastserve_backend.job import Job

# Turns within the starvation threshold.
_TURNS = 10


class Promotion:
    """Jobs by the time at which they last ran, or arrived, and the one that has its turn.

    A job that has waited for ``starvation_s`` is promoted: it comes before all others until it has
    run for a tenth of that time. One has its turn at a time, the one that waited longest first, so
    a job waits for ``starvation_s`` and the turns of those that starved before it. FastServe
    promotes all of them at once, each for a quantum (§4.1, Algorithm 1). Where jobs' KV exceeds
    the memory, each of those is swapped in, or computed again, for one token, and the longer the
    queue, the less the server gets done.

    Each operation costs O(1), but ``promote`` goes over those in flight that it leaves out.
    """

    def __init__(self, starvation_s: float) -> None:
        self.starvation_s = starvation_s
        self.num_promotions = 0
        # A job is appended again when it ran, so the first has waited longest, but for arrivals
        # during an iteration: those stand behind the jobs that ran in it, and are found at most
        # that iteration late.
        self._waiting: OrderedDict[int, tuple[float, Job]] = OrderedDict()
        self._promoted: Job | None = None
        self._turn_s = 0.0  # that it may still run
        self._turn_tokens = 0  # that it had when its turn began

    def begin(self, job: Job, now: float) -> None:
        """The job waits from now on: it arrived, or an iteration of it ended."""
        self._waiting.pop(job.number, None)
        self._waiting[job.number] = (now, job)

    def remove(self, job: Job) -> None:
        """The job ended, or its order is another's from now on."""
        self._waiting.pop(job.number, None)
        if job is self._promoted:
            self._promoted = None

    def has_turn(self, job: Job) -> bool:
        return job is self._promoted

    def promote(self, now: float, in_flight: Collection[int]) -> Job | None:
        """The job whose turn begins now, if one's does; those in flight do not starve."""
        if self._promoted is not None:
            return None
        for number, (since, job) in self._waiting.items():
            if now - since < self.starvation_s:
                return None
            if number not in in_flight:
                del self._waiting[number]
                self._promoted = job
                self._turn_s = self.starvation_s / _TURNS
                self._turn_tokens = job.num_outputs
                self.num_promotions += 1
                return job
        return None

    def ran(
        self, jobs: Sequence[Job], seconds: float, in_flight: Collection[int] = ()
    ) -> Job | None:
        """These jobs ran for so long. Returns the one whose turn is over with that, if it is: not
        while the job is in flight."""
        job = self._promoted
        if job is None or job not in jobs:
            return None
        self._turn_s -= seconds
        # Never without a token: when KV memory is short, jobs whose turns end within their prefills
        # could take each other's KV for ever.
        has_token = job.num_outputs > self._turn_tokens
        if self._turn_s > 0 or not has_token or job.number in in_flight:
            return None
        self._promoted = None
        return job

    def turn_in(self, job: Job, now: float) -> float | None:
        """Seconds until the job's turn, at least 0, if it is the one to have the next turn."""
        first = next(iter(self._waiting), None)
        if job.number != first:
            return None
        starves_in = self._waiting[first][0] + self.starvation_s - now
        return max(0.0, starves_in, 0.0 if self._promoted is None else self._turn_s)
