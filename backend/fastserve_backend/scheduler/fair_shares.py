"""Fair shares of the machine for tenants, over any policy.

The base is VTC, the virtual token counter (Sheng et al., Fairness in Serving Large Language Models,
arXiv 2401.00588). VTC runs each job to its end. Here jobs are preempted at every token, so tenants
take turns in rounds, as in deficit round robin (Shreedhar and Varghese, 1995). Otherwise tenants
would take each other's KV at every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import (
    BatchLimits,
    IterationTimes,
    Policy,
    Scheduled,
    summed_level_sizes,
)
from fastserve_backend.scheduler.tenant_order import (
    EstimateOfTenants,
    Tenant,
    TenantOrder,
    WalkOfTenants,
)
from fastserve_backend.scheduler.tenant_speed import TenantSpeed
from fastserve_backend.scheduler.token_costs import TokenCosts
from fastserve_backend.scheduler.walk import Walk

# A round gives a tenant of weight 1 the time of so many output tokens, with such a context. With an
# eighth of that, a hundred tenants swap each other's KV five times as often, and the machine does
# 13% less work (docs/fair_shares.md). With more, a tenant waits longer for its next turn.
_ROUND_TOKENS = 64
_ROUND_CONTEXT = 1024
_T = TypeVar("_T")


class FairShares:
    """One policy for each tenant with jobs. The tenant that has had the least comes first.

    A tenant's counter is the service that its jobs have had (``TokenCosts``), over its weight. A
    batch is filled seat by seat: each seat goes to the tenant in the earliest round, and puts it
    one round back for the rest of this batch. So tenants in the same round share the seats by
    weight. The order of a tenant's jobs, and their turns, are those of its policy.

    Jobs are charged when their batch is sent. So it makes no difference how many batches are in
    flight. Seats stay empty while a job could run only where ``TenantSpeed`` bounds the batch.

    **Bound**: two tenants of weights v and w have jobs for all S seats, and memory for them. Then
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
        self._largest_weight = max([1.0, *weights.values()])
        self._max_model_len = max_model_len
        self._default = make_policy()
        self._default_is_free = True  # the next tenant to have jobs gets the default policy
        self._derive_costs()
        self._num_joined = 0
        self._tenants: dict[str, Tenant] = {}
        self._of_rank: dict[float, Tenant] = {}
        self._order = TenantOrder()
        # Counters of tenants without jobs, if they have had more than the others.
        self._ahead: dict[str, float] = {}
        self._forgot_up_to = 0.0
        self._places: dict[int, Place] = {}  # by job number
        self._walked: dict[int, Job] = {}  # by the latest walk, in its order
        self._walked_before: dict[int, Job] = {}  # by the walk before it
        self._num_new: dict[float, int] = {}  # by rank: jobs of the latest walk without KV
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
        """Whether the job has a turn before the other jobs of its tenant; or, if it is new, whether
        its tenant has KV of fewer jobs on the device than its share. Others make room for it then,
        even if they have to compute again: a flood must not keep the KV memory for itself."""
        tenant = self._tenants[job.service.tenant]
        if tenant.policy.has_turn(job):
            return True
        num_begun = tenant.num_at[Place.DEVICE] + self._num_new.get(tenant.rank, 0)
        share = tenant.weight / self._order.total_weight
        return len(self._tenants) > 1 and num_begun <= share * self._order.num_on_device

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
        self._walked_before, self._walked, self._num_new = self._walked, {}, {}
        alone = self._alone()
        if alone is not None:
            return alone.policy.walk(now, in_flight)
        return WalkOfTenants(
            self._order, self._of_rank, self._walked, self._num_new, now, in_flight
        )

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        """Those of the tenant that comes first. Seats that it leaves empty are for the others, as
        far as each keeps its share of its speed."""
        if not self._tenants:
            return self._default.limits_for(now, num_prompts, num_decodes)
        _, rank = self._order.all[0]
        limits = self._of_rank[rank].policy.limits_for(now, num_prompts, num_decodes)
        if len(self._tenants) == 1:
            return limits
        most = self._most_seats()
        return limits if limits.max_seqs == most else replace(limits, max_seqs=most)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        if self._alone() is not None:
            return  # its counter is compared with none
        seconds, charged = self._costs.seconds, dict[str, float]()
        for job, num_tokens in batch:
            name = job.service.tenant
            charged[name] = charged.get(name, 0.0) + seconds(job, num_tokens)
        for name, service_s in charged.items():
            self._charge(self._tenants[name], service_s / self._round_s)
        if self._ahead and self._order.earliest_round > self._forgot_up_to:
            self._forgot_up_to = self._order.earliest_round
            ahead = self._ahead.items()
            self._ahead = {name: has for name, has in ahead if has > self._forgot_up_to}

    def charge(self, tenant: str, seconds: float) -> None:
        """As of ``ChargesTenants``. It counts like the time of tokens, and is remembered if the
        tenant has no jobs by now."""
        rounds = seconds / self._round_s
        if tenant in self._tenants:
            if self._alone() is None:  # else its counter is compared with none
                self._charge(self._tenants[tenant], rounds)
        elif self._tenants:
            counter = max(self._ahead.get(tenant, 0.0), self._order.earliest_round)
            self._ahead[tenant] = counter + rounds / self._weights.get(tenant, 1.0)

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
        self._derive_costs()
        for policy in self._policies():
            policy.recalibrate()

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """First the jobs of the walk before the present one, in its order: the batch is likely to
        be the same again. Then tenant by tenant, by round. So KV of the tenants that have had the
        most leaves first."""
        alone = self._alone()
        if alone is not None:
            return alone.policy.next_run_estimate(now)
        return EstimateOfTenants(self._tenants, self._walked_before, now)

    def on_place_changed(self, job: Job) -> None:
        tenant = self._tenants[job.service.tenant]
        self._order.count(tenant, self._places[job.number], -1)
        self._order.count(tenant, job.place, 1)
        self._places[job.number] = job.place
        tenant.policy.on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        if not isinstance(estimate, EstimateOfTenants):
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

    def _alone(self) -> Tenant | None:
        """The tenant, if it is the only one that counts."""
        if len(self._tenants) != 1 or self._ahead:
            return None
        return next(iter(self._tenants.values()))

    def _most_seats(self) -> int:
        """Of a batch with jobs of several tenants."""
        total = self._order.total_weight
        if not self._speed.needs_bound(self._largest_weight / total):
            return self.limits.max_seqs
        tenants = self._tenants.values()
        return self._speed.most_seats((sum(one.num_at), one.weight / total) for one in tenants)

    def _derive_costs(self) -> None:
        self._costs = TokenCosts.of(self.limits, self._times, self._max_model_len)
        context = min(_ROUND_CONTEXT, self._max_model_len)
        self._round_s = self._costs.output_s(_ROUND_TOKENS, context)
        self._speed = TenantSpeed(
            self.limits.max_seqs, lambda number: self._times.decodes_s(number, context)
        )

    def _join(self, name: str) -> Tenant:
        """A tenant gets its first job."""
        policy = self._default if self._default_is_free else self._make_policy()
        self._default_is_free = False
        counter = self._ahead.pop(name, 0.0)
        if self._tenants:
            counter = max(counter, self._order.earliest_round)
        self._num_joined += 1
        weight = self._weights.get(name, 1.0)
        tenant = Tenant(name, weight, -self._num_joined, policy, counter)
        self._tenants[name] = self._of_rank[tenant.rank] = tenant
        self._order.total_weight += weight
        self._order.add(tenant)
        return tenant

    def _leave(self, tenant: Tenant) -> None:
        """A tenant has no job any more."""
        del self._tenants[tenant.name], self._of_rank[tenant.rank]
        self._order.remove(tenant)
        self._order.total_weight -= tenant.weight
        if not self._tenants:
            self._order.total_weight = 0.0  # without rounding errors
            self._ahead.clear()
            self._forgot_up_to = 0.0
        elif tenant.counter > self._order.earliest_round:
            self._ahead[tenant.name] = tenant.counter
        if tenant.policy is self._default:
            self._default_is_free = True
        else:
            self._num_demotions_before += tenant.policy.num_demotions
            self._num_promotions_before += tenant.policy.num_promotions

    def _charge(self, tenant: Tenant, rounds: float) -> None:
        counter = tenant.counter + rounds / tenant.weight
        if math.floor(counter) == math.floor(tenant.counter):
            tenant.counter = counter
            return
        self._order.remove(tenant)
        tenant.counter = counter
        self._order.add(tenant)


def _in_order(items: Sequence[_T], last_first: bool) -> Iterable[_T]:
    return reversed(items) if last_first else items
