"""Fair shares of the machine for tenants, over any policy.

The base is VTC, the virtual token counter (Sheng et al., Fairness in Serving Large Language Models,
arXiv 2401.00588). VTC runs each job to its end. Here jobs are preempted at every token, so tenants
take turns in rounds, as in deficit round robin (Shreedhar and Varghese, 1995). Otherwise tenants
would take each other's KV at every token.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import Self, TypeVar

from fastserve_backend.job import PLACES, Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Policy,
    Scheduled,
    summed_level_sizes,
)
from fastserve_backend.scheduler.walk import OrderKey, Walk

# A round gives a tenant of weight 1 the time of so many output tokens. With fewer, tenants would
# swap each other's KV out more often. With more, a tenant would wait longer for its next turn.
_ROUND_TOKENS = 64
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds of the machine that a token costs in a full batch: only then does anybody wait.

    A decode alone takes nearly as long as a batch of decodes. So its own time (``own_time_s``)
    would make an output token a hundred times as dear as a prompt token.
    """

    prompt_token_s: float
    output_token_s: float
    context_token_s: float
    """For each token that an output token attends to."""

    @classmethod
    def of(cls, limits: BatchLimits, times: IterationTimes, max_model_len: int) -> Self:
        most_tokens = min(limits.job_tokens, max_model_len)
        shortest_s = times.decodes_s(limits.max_seqs, 1) / limits.max_seqs
        longest_s = times.decodes_s(limits.max_seqs, max_model_len) / limits.max_seqs
        return cls(
            times.prefill_s(most_tokens) / most_tokens,
            shortest_s,
            max(0.0, longest_s - shortest_s) / max_model_len,
        )

    def seconds(self, job: Job, num_tokens: int) -> float:
        """The cost of the last ``num_tokens`` tokens that the job has computed."""
        if num_tokens == 1:
            return self.output_token_s + self.context_token_s * job.num_computed
        return self.prompt_token_s * num_tokens


@dataclass(slots=True, eq=False)
class _Tenant:
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


class _Order:
    """Order keys of tenants: of all, and of those with jobs at each ``Place``."""

    def __init__(self) -> None:
        self.all: list[OrderKey] = []
        self.at: tuple[list[OrderKey], ...] = tuple([] for _ in PLACES)

    @property
    def earliest_round(self) -> float:
        """There must be a tenant."""
        return self.all[0][0]

    def add(self, tenant: _Tenant) -> None:
        for keys in self._lists_of(tenant):
            insort(keys, tenant.order_key)

    def remove(self, tenant: _Tenant) -> None:
        for keys in self._lists_of(tenant):
            del keys[bisect_left(keys, tenant.order_key)]

    def count(self, tenant: _Tenant, place: Place, change: int) -> None:
        """The tenant has one job more or less at ``place``."""
        keys, key = self.at[place], tenant.order_key
        before = tenant.num_at[place]
        tenant.num_at[place] += change
        if before == 0:
            insort(keys, key)
        elif tenant.num_at[place] == 0:
            del keys[bisect_left(keys, key)]

    def _lists_of(self, tenant: _Tenant) -> list[list[OrderKey]]:
        pairs = zip(self.at, tenant.num_at, strict=True)
        return [self.all, *(keys for keys, num_jobs in pairs if num_jobs)]


class FairShares:
    """One policy for each tenant with jobs. The tenant that has had the least comes first.

    A tenant's counter is the service that its jobs have had (``TokenCosts``), over its weight. A
    batch is filled seat by seat: each seat goes to the tenant in the earliest round, and puts it
    one round back for the rest of this batch. So tenants in the same round share the seats by
    weight. The order of a tenant's jobs, and their turns, are those of its policy.

    Jobs are charged when their batch is sent. So it makes no difference how many batches are in
    flight. No seat stays empty while a job of any tenant could run.

    **Bound**: while two tenants of weights v and w have jobs for all S seats, and memory for them,
    their counters differ by at most ``1 + S / min(v, w)`` rounds and one batch of either. For the
    one gets a seat only if the other has none left to ask for in an earlier round.

    **No saving**: a tenant that gets jobs again starts in the earliest round of those with jobs,
    or with its old counter if that is larger. When no tenant has jobs, all counters are forgotten.

    While one tenant alone has jobs, the decisions are those of its policy. A batch costs O(log
    tenants) a seat, and a copy of the order of all tenants.
    """

    def __init__(
        self,
        make_policy: Callable[[], Policy],
        times: IterationTimes,
        weights: Mapping[str, float],
        max_model_len: int,
    ) -> None:
        """
        Args:
            weights: by tenant; all others have the weight 1.
            max_model_len: most tokens of one job.
        """
        self._make_policy = make_policy
        self._times = times
        self._weights = weights
        self._max_model_len = max_model_len
        self._default = make_policy()
        self._default_is_free = True  # the next tenant to have jobs gets the default policy
        self._costs = self._current_costs()
        self._round_s = _ROUND_TOKENS * self._costs.output_token_s
        self._num_joined = 0
        self._tenants: dict[str, _Tenant] = {}
        self._of_rank: dict[float, _Tenant] = {}
        self._order = _Order()
        # Counters of tenants without jobs, if they have had more than the others.
        self._ahead: dict[str, float] = {}
        self._earliest_round = 0.0
        self._places: dict[int, Place] = {}  # by job number
        self._walked: dict[int, Job] = {}  # by the latest walk, in its order
        self._walked_before: dict[int, Job] = {}  # by the walk before it
        self._num_demotions_before = self._num_promotions_before = 0  # of dropped policies

    @property
    def limits(self) -> BatchLimits:
        return self._default.limits

    @property
    def num_demotions(self) -> int:
        return self._num_demotions_before + sum(one.num_demotions for one in self._policies())

    @property
    def num_promotions(self) -> int:
        return self._num_promotions_before + sum(one.num_promotions for one in self._policies())

    @property
    def quanta_s(self) -> Sequence[float | None]:
        return self._default.quanta_s

    def has_turn(self, job: Job) -> bool:
        """Whether the job has a turn before the other jobs of its tenant."""
        return self._policy_of(job).has_turn(job)

    def add(self, job: Job, now: float) -> None:
        tenant = self._tenants.get(job.service.tenant) or self._join(job.service.tenant)
        self._order.count(tenant, job.place, 1)
        self._places[job.number] = job.place
        tenant.policy.add(job, now)

    def remove(self, job: Job) -> None:
        tenant = self._tenants[job.service.tenant]
        tenant.policy.remove(job)
        self._order.count(tenant, self._places.pop(job.number), -1)
        self._walked.pop(job.number, None)
        self._walked_before.pop(job.number, None)
        if not any(tenant.num_at):
            self._leave(tenant)

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        self._walked_before, self._walked = self._walked, {}
        alone = self._alone()
        if alone is not None:
            return alone.policy.walk(now, in_flight)
        return _WalkOfTenants(self._order, self._of_rank, self._walked, now, in_flight)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        if self._alone() is not None:
            return  # its counter is compared with none
        seconds, charged = self._costs.seconds, dict[str, float]()
        for job, num_tokens in batch:
            name = job.service.tenant
            charged[name] = charged.get(name, 0.0) + seconds(job, num_tokens)
        for name, service_s in charged.items():
            self._charge(self._tenants[name], service_s / self._round_s)
        if self._ahead and self._order.earliest_round > self._earliest_round:
            self._earliest_round = self._order.earliest_round
            ahead = self._ahead.items()
            self._ahead = {name: has for name, has in ahead if has > self._earliest_round}

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        if len(self._tenants) == 1:
            next(iter(self._tenants.values())).policy.on_iteration_finished(ran, now)
            return
        ran_of: dict[str, list[Scheduled]] = {}
        for one in ran:
            ran_of.setdefault(one.job.service.tenant, []).append(one)
        for name, ran_here in ran_of.items():
            self._tenants[name].policy.on_iteration_finished(ran_here, now)

    def on_predicted(self, job: Job) -> None:
        self._policy_of(job).on_predicted(job)

    def recalibrate(self) -> None:
        self._costs = self._current_costs()
        for policy in self._policies():
            policy.recalibrate()

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """First the jobs of the walk before the present one, in its order: the batch is likely to
        be the same again. Then tenant by tenant, by round. So KV of the tenants that have had the
        most leaves first."""
        alone = self._alone()
        if alone is not None:
            return alone.policy.next_run_estimate(now)
        return _EstimateOfTenants(self._tenants, self._walked_before, now)

    def on_place_changed(self, job: Job) -> None:
        tenant = self._tenants[job.service.tenant]
        self._order.count(tenant, self._places[job.number], -1)
        self._order.count(tenant, job.place, 1)
        self._places[job.number] = job.place
        tenant.policy.on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        if not isinstance(estimate, _EstimateOfTenants):
            (alone,) = self._tenants.values()
            return alone.policy.by_next_run(place, estimate, last_first=last_first)
        walked, keys = self._walked_before, self._order.at[place]
        first = (job for job in _in_order(list(walked.values()), last_first) if job.place is place)
        others = (
            job
            for _, rank in _in_order(keys, last_first)
            for job in self._of_rank[rank].policy.by_next_run(
                place, estimate.of_tenant(self._of_rank[rank]), last_first=last_first
            )
            if job.number not in walked
        )
        return chain(others, first) if last_first else chain(first, others)

    def level_sizes(self) -> Sequence[int]:
        return summed_level_sizes(self._policies())

    def describe(self) -> str:
        return self._default.describe()

    def _policy_of(self, job: Job) -> Policy:
        return self._tenants[job.service.tenant].policy

    def _policies(self) -> list[Policy]:
        """All policies. Another thread may call this."""
        of_tenants = (tenant.policy for tenant in list(self._tenants.values()))
        return [self._default, *(policy for policy in of_tenants if policy is not self._default)]

    def _alone(self) -> _Tenant | None:
        """The tenant, if it is the only one that counts."""
        if len(self._tenants) != 1 or self._ahead:
            return None
        return next(iter(self._tenants.values()))

    def _current_costs(self) -> TokenCosts:
        return TokenCosts.of(self.limits, self._times, self._max_model_len)

    def _join(self, name: str) -> _Tenant:
        """A tenant gets its first job."""
        policy = self._default if self._default_is_free else self._make_policy()
        self._default_is_free = False
        counter = self._ahead.pop(name, 0.0)
        if self._tenants:
            counter = max(counter, self._order.earliest_round)
        self._num_joined += 1
        weight = self._weights.get(name, 1.0)
        tenant = _Tenant(name, weight, -self._num_joined, policy, counter)
        self._tenants[name] = self._of_rank[tenant.rank] = tenant
        self._order.add(tenant)
        return tenant

    def _leave(self, tenant: _Tenant) -> None:
        """A tenant has no job any more."""
        del self._tenants[tenant.name], self._of_rank[tenant.rank]
        self._order.remove(tenant)
        if not self._tenants:
            self._ahead.clear()
            self._earliest_round = 0.0
        elif tenant.counter > self._order.earliest_round:
            self._ahead[tenant.name] = tenant.counter
        if tenant.policy is self._default:
            self._default_is_free = True
        else:
            self._num_demotions_before += tenant.policy.num_demotions
            self._num_promotions_before += tenant.policy.num_promotions

    def _charge(self, tenant: _Tenant, rounds: float) -> None:
        counter = tenant.counter + rounds / tenant.weight
        if math.floor(counter) == math.floor(tenant.counter):
            tenant.counter = counter
            return
        self._order.remove(tenant)
        tenant.counter = counter
        self._order.add(tenant)


def _in_order(items: Sequence[_T], last_first: bool) -> Iterable[_T]:
    return reversed(items) if last_first else items


class _WalkOfTenants:
    """Yields the next job of the tenant in the earliest round. Each job puts its tenant back.

    Jobs in flight have their seats in other batches, so they do not count.
    """

    def __init__(
        self,
        order: _Order,
        of_rank: Mapping[float, _Tenant],
        walked: dict[int, Job],
        now: float,
        in_flight: Collection[int],
    ) -> None:
        """
        Args:
            walked: gets the jobs that are yielded.
        """
        self._order = order
        self._next = [*order.all]  # sorted, so it is a heap
        self._of_rank = of_rank
        self._walked = walked
        self._now = now
        self._in_flight = in_flight
        self._walks: dict[float, Walk] = {}  # by rank, of tenants that have begun
        self._rounds: dict[float, float] = {}  # to which they are put back
        self._open = [*PLACES]

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        while self._next:
            round_, rank = self._next[0]
            walk = self._walks[rank] if rank in self._walks else self._begin(rank)
            job = next(walk, None)
            if job is None:
                heappop(self._next)
                continue
            if job.number not in self._in_flight:
                self._rounds[rank] = round_ + 1 / self._of_rank[rank].weight
                heapreplace(self._next, (self._rounds[rank], rank))
            self._walked[job.number] = job
            return job
        raise StopIteration

    def skip(self, place: Place) -> None:
        if place not in self._open:
            return
        self._open.remove(place)
        for walk in self._walks.values():
            walk.skip(place)
        # Of a thousand tenants, most may have no job at the other places.
        rounds = {rank: round_ for other in self._open for round_, rank in self._order.at[other]}
        self._next = [(self._rounds.get(rank, round_), rank) for rank, round_ in rounds.items()]
        heapify(self._next)

    def _begin(self, rank: float) -> Walk:
        walk = self._walks[rank] = self._of_rank[rank].policy.walk(self._now, self._in_flight)
        for place in PLACES:
            if place not in self._open:
                walk.skip(place)
        return walk


class _EstimateOfTenants:
    """Estimates of jobs of several tenants. A tenant's policy makes its own when it is needed."""

    def __init__(
        self, tenants: Mapping[str, _Tenant], walked: Mapping[int, Job], now: float
    ) -> None:
        self._tenants = tenants
        self._position = {number: position for position, number in enumerate(walked)}
        self._now = now
        self._of_tenant: dict[float, NextRunEstimate] = {}  # by rank

    def of_tenant(self, tenant: _Tenant) -> NextRunEstimate:
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
