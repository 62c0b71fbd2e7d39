"""Tenants with jobs in the order of their rounds, and a selection that goes through them."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from fastserve_backend.job import PLACES, Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import Policy
from fastserve_backend.scheduler.walk import OrderKey, Walk


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant with jobs."""

    name: str
    weight: float
    rank: int  # the latest to join has the lowest
    policy: Policy
    counter: float  # service over weight, in rounds
    num_at: list[int] = field(default_factory=lambda: [0] * len(PLACES))  # jobs at each place

    @property
    def order_key(self) -> OrderKey:
        """Tenants in the same round keep their order, so that they do not take turns at every
        token. The latest to join is the first: it has had the least."""
        return math.floor(self.counter), self.rank


class TenantOrder:
    """Order keys of tenants: of all, and of those with jobs at each ``Place``."""

    def __init__(self) -> None:
        self.all: list[OrderKey] = []
        self.at: tuple[list[OrderKey], ...] = tuple([] for _ in PLACES)
        self.num_on_device = 0
        """Jobs of all tenants there."""
        self.total_weight = 0.0

    @property
    def earliest_round(self) -> float:
        """There must be a tenant."""
        return self.all[0][0]

    def add(self, tenant: Tenant) -> None:
        for keys in self._lists_of(tenant):
            insort(keys, tenant.order_key)

    def remove(self, tenant: Tenant) -> None:
        for keys in self._lists_of(tenant):
            del keys[bisect_left(keys, tenant.order_key)]

    def count(self, tenant: Tenant, place: Place, change: int) -> None:
        """The tenant has one job more or less at ``place``."""
        keys, key = self.at[place], tenant.order_key
        before = tenant.num_at[place]
        tenant.num_at[place] += change
        self.num_on_device += change if place is Place.DEVICE else 0
        if before == 0:
            insort(keys, key)
        elif tenant.num_at[place] == 0:
            del keys[bisect_left(keys, key)]

    def _lists_of(self, tenant: Tenant) -> list[list[OrderKey]]:
        pairs = zip(self.at, tenant.num_at, strict=True)
        return [self.all, *(keys for keys, num_jobs in pairs if num_jobs)]


class WalkOfTenants:
    """Yields the next job of the tenant in the earliest round. Each job puts its tenant back.

    Jobs in flight have their seats in other batches, so they do not count.
    """

    def __init__(
        self,
        order: TenantOrder,
        of_rank: Mapping[float, Tenant],
        walked: dict[int, Job],
        num_new: dict[float, int],
        now: float,
        in_flight: Collection[int],
    ) -> None:
        """
        Args:
            walked: gets the jobs that are yielded.
            num_new: by rank; counts those without KV.
        """
        self._order = order
        self._next = [*order.all]  # sorted, so it is a heap
        self._of_rank = of_rank
        self._walked = walked
        self._num_new = num_new
        self._now = now
        self._in_flight = in_flight
        self._walks: dict[float, Walk | None] = {}  # by rank; None: begun and dropped
        self._rounds: dict[float, float] = {}  # to which they are put back
        self._open = [*PLACES]

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        while self._next:
            round_, rank = self._next[0]
            job = self._next_job(rank)
            if job is None:
                heappop(self._next)
                continue
            if job.number not in self._in_flight:
                self._rounds[rank] = round_ + 1 / self._of_rank[rank].weight
                heapreplace(self._next, (self._rounds[rank], rank))
            self._walked[job.number] = job
            if job.place is Place.NOWHERE:
                self._num_new[rank] = self._num_new.get(rank, 0) + 1
            return job
        raise StopIteration

    def skip(self, place: Place) -> None:
        if place not in self._open:
            return
        self._open.remove(place)
        for walk in self._walks.values():
            if walk is not None:
                walk.skip(place)
        # Of a thousand tenants, most may have no job at the other places.
        rounds = {rank: round_ for other in self._open for round_, rank in self._order.at[other]}
        self._next = [(self._rounds.get(rank, round_), rank) for rank, round_ in rounds.items()]
        heapify(self._next)

    def _next_job(self, rank: float) -> Job | None:
        """The next job of a tenant, if it has one.

        Of a thousand tenants, most get one seat or none. If all their walks were kept, Python's
        garbage collector would look at the whole heap in each hundredth decision. So the first walk
        of a tenant is dropped, and the second one is kept.
        """
        walk = self._walks.get(rank)
        if walk is None:
            walk = self._of_rank[rank].policy.walk(self._now, self._in_flight)
            for place in PLACES:
                if place not in self._open:
                    walk.skip(place)
            self._walks[rank] = walk if rank in self._walks else None
        return next((job for job in walk if job.number not in self._walked), None)


class EstimateOfTenants:
    """Estimates of jobs of several tenants. A tenant's policy makes its own when it is needed."""

    def __init__(
        self, tenants: Mapping[str, Tenant], walked: Mapping[int, Job], now: float
    ) -> None:
        self._tenants = tenants
        self._position = {number: position for position, number in enumerate(walked)}
        self._now = now
        self._of_tenant: dict[float, NextRunEstimate] = {}  # by rank

    def of_tenant(self, tenant: Tenant) -> NextRunEstimate:
        """That of the tenant's own policy."""
        estimate = self._of_tenant.get(tenant.rank)
        if estimate is None:
            estimate = self._of_tenant[tenant.rank] = tenant.policy.next_run_estimate(self._now)
        return estimate

    def __call__(self, job: Job) -> tuple[float, ...]:
        position = self._position.get(job.number)
        if position is not None:
            return -1.0, position
        tenant = self._tenants[job.service.tenant]
        return *tenant.order_key, *self.of_tenant(tenant)(job)
