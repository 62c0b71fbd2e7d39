"""The order of a policy, with tenants that are held back behind all others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.tenant_counters import TenantCounters
from fastserve_backend.scheduler.walk import Walk


class WalkOfTenants:
    """Goes through a policy's walk. First it yields jobs of open tenants, then those of tenants
    that are held back.

    A tenant that is held back may have thousands of jobs before the first job of another. So only
    ``most_passed`` of them are passed over. Then as many jobs of open tenants follow, those of the
    tenants that have been open for longest, in the order of the policy's estimate.
    """

    def __init__(
        self,
        walk: Walk,
        tenants: TenantCounters,
        estimate: Callable[[], NextRunEstimate],
        most_passed: int,
        num_new: dict[str, int],
    ) -> None:
        """
        Args:
            num_new: by tenant; counts jobs without KV that are yielded.
        """
        self._walk = walk
        self._tenants = tenants
        self._estimate = estimate
        self._most_passed = most_passed
        self._num_new = num_new
        self._skipped: set[Place] = set()
        self._num_left = [*tenants.num_open_at]  # jobs of open tenants that are still to come
        self._jobs = self._in_order()

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        job = next(self._jobs)
        if job.place is Place.NOWHERE:
            tenant = job.service.tenant
            self._num_new[tenant] = self._num_new.get(tenant, 0) + 1
        return job

    def skip(self, place: Place) -> None:
        self._walk.skip(place)
        self._skipped.add(place)
        self._num_left[place] = 0

    def _in_order(self) -> Iterator[Job]:
        tenants, num_left = self._tenants.of, self._num_left
        passed: list[Job] = []
        found: set[int] = set()
        while any(num_left) and len(passed) < self._most_passed:
            job = next(self._walk, None)
            if job is None:
                break
            if tenants[job.service.tenant].is_held:
                passed.append(job)
            else:
                found.add(job.number)
                num_left[job.place] -= 1
                yield job
        if any(num_left):
            for job in self._without_walk(found):
                if job.place not in self._skipped:
                    found.add(job.number)
                    yield job
        for job in passed:
            if job.place not in self._skipped:
                yield job
        for job in self._walk:
            if job.number not in found:
                yield job

    def _without_walk(self, found: set[int]) -> list[Job]:
        """Jobs of open tenants that the walk has not reached. Those that have begun come before
        others of their tenant."""
        jobs: list[Job] = []
        places = [
            place for place in (Place.DEVICE, Place.HOST, Place.NOWHERE) if self._num_left[place]
        ]
        for tenant in islice(self._tenants.open.values(), self._most_passed):
            for place in places:
                left = (job for job in tenant.jobs_at[place].values() if job.number not in found)
                jobs += islice(left, self._most_passed - len(jobs))
            if len(jobs) == self._most_passed:
                break
        return sorted(jobs, key=self._estimate())


class EstimateOfTenants:
    """A policy's estimates, with jobs of tenants that are held back behind all others."""

    def __init__(self, tenants: TenantCounters, of_policy: NextRunEstimate) -> None:
        self._tenants = tenants
        self.of_policy = of_policy

    def __call__(self, job: Job) -> tuple[float, ...]:
        return self._tenants.of[job.service.tenant].is_held, *self.of_policy(job)


def parted(
    jobs: Iterator[Job], comes_first: Callable[[Job], bool], num_first: int
) -> Iterator[Job]:
    """The jobs that come first, in their order, and then the others.

    Args:
        num_first: how many come first.
    """
    others: list[Job] = []
    while num_first:
        job = next(jobs)
        if comes_first(job):
            num_first -= 1
            yield job
        else:
            others.append(job)
    yield from others
    yield from jobs
