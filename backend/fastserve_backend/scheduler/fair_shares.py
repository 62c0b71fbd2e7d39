"""Fair shares of the machine for tenants, over any policy.

The counters are those of VTC, the virtual token counter (Sheng et al., Fairness in Serving Large
Language Models, arXiv 2401.00588). VTC serves the tenant with the smallest counter first. Here the
policy orders the jobs of all tenants, and only a tenant that has had more than its share waits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import NextRunEstimate
from fastserve_backend.scheduler.base import BatchLimits, IterationTimes, Policy, Scheduled
from fastserve_backend.scheduler.tenant_counters import Tenant, TenantCounters
from fastserve_backend.scheduler.tenant_order import EstimateOfTenants, WalkOfTenants, parted
from fastserve_backend.scheduler.tenant_speed import TenantSpeed
from fastserve_backend.scheduler.token_costs import TokenCosts
from fastserve_backend.scheduler.walk import Walk

# A tenant of weight 1 may be ahead of others by the time of so many output tokens, with such a
# context. With fewer, tenants take each other's KV more often (docs/fair_shares.md). With more, a
# flood delays others for longer.
TOLERANCE_TOKENS = 4096
_CONTEXT = 1024
# A selection passes over so many jobs of tenants that are held back, for each seat.
_PASSED_PER_SEAT = 4


class FairShares:
    """A policy orders the jobs of all tenants. A tenant that has had more than its share comes
    behind all others, see ``TenantCounters``.

    Jobs are charged when their batch is sent. So it makes no difference how many batches are in
    flight. Seats stay empty while a job could run only where ``TenantSpeed`` bounds the batch.

    **Bound**: two tenants of weights v and w have jobs for all seats, memory and tokens for them,
    and start with equal counters. Then the counter of the one, service over weight, exceeds that of
    the other by at most a tolerance and what it gets in one batch. For once it exceeds it by a
    tolerance, the one is held back, and the other leaves it no seat.

    **Saving**: a tenant that asks for less than its share saves a tolerance up at most. When no
    tenant has jobs, all counters are forgotten.

    While one tenant alone has jobs, the decisions are those of its policy, and so they are while
    nobody is held back. A decision costs O(log tenants), and O(seats) for jobs that it passes over.
    """

    def __init__(
        self,
        policy: Policy,
        times: IterationTimes,
        weights: Mapping[str, float],
        max_model_len: int,
        tolerance_tokens: int = TOLERANCE_TOKENS,
    ) -> None:
        """
        Args:
            weights: by tenant; all others have the weight 1.
            max_model_len: most tokens of one job.
            tolerance_tokens: a tenant of weight 1 may be ahead by the time of so many output
                tokens.
        """
        self._policy = policy
        self._times = times
        self._largest_weight = max([1.0, *weights.values()])
        self._max_model_len = max_model_len
        self._tolerance_tokens = tolerance_tokens
        self._tenants = TenantCounters(weights)
        self._derive_costs()
        self._places: dict[int, Place] = {}  # by job number
        self._num_new: dict[str, int] = {}  # by tenant: jobs of the latest walk without KV
        self._in_flight: Collection[int] = ()  # at the latest walk

    @property
    def limits(self) -> BatchLimits:
        return self._policy.limits

    @property
    def num_demotions(self) -> int:
        return self._policy.num_demotions

    @property
    def num_promotions(self) -> int:
        return self._policy.num_promotions

    @property
    def quanta_s(self) -> Sequence[float | None]:
        return self._policy.quanta_s

    def has_turn(self, job: Job) -> bool:
        """Whether the job has a turn; or, if it is new and others are held back, whether its tenant
        has KV of fewer jobs on the device than its share. Others make room for it then, even if
        they have to compute again: a flood must not keep the KV memory for itself."""
        if self._policy.has_turn(job):
            return True
        tenants = self._tenants
        tenant = tenants.of[job.service.tenant]
        if tenant.is_held or not tenants.num_held:
            return False
        num_begun = len(tenant.jobs_at[Place.DEVICE]) + self._num_new.get(tenant.name, 0)
        share = tenant.weight / tenants.total_weight
        return num_begun <= share * tenants.num_at(Place.DEVICE)

    def add(self, job: Job, now: float) -> None:
        tenants = self._tenants
        tenant = tenants.of.get(job.service.tenant) or tenants.join(job.service.tenant)
        self._places[job.number] = job.place
        tenants.add_job(tenant, job, job.place)
        self._policy.add(job, now)

    def remove(self, job: Job) -> None:
        self._policy.remove(job)
        tenant = self._tenants.of[job.service.tenant]
        self._tenants.remove_job(tenant, job, self._places.pop(job.number))
        if not tenant.num_jobs:
            self._tenants.leave(tenant)

    def walk(self, now: float, in_flight: Collection[int]) -> Walk:
        self._num_new, self._in_flight = {}, in_flight
        walk = self._policy.walk(now, in_flight)
        if len(self._tenants.of) <= 1:
            return walk
        return WalkOfTenants(
            walk,
            self._tenants,
            lambda: self._policy.next_run_estimate(now),
            _PASSED_PER_SEAT * self.limits.max_seqs,
            self._num_new,
        )

    def limits_for(self, now: float, num_prompts: int, num_decodes: int) -> BatchLimits:
        """Those of the policy. Seats that it leaves empty for one tenant are for the others, as far
        as each keeps its share of its speed."""
        limits = self._policy.limits_for(now, num_prompts, num_decodes)
        if len(self._tenants.of) <= 1:
            return limits
        most = self._most_seats()
        return limits if limits.max_seqs == most else replace(limits, max_seqs=most)

    def on_batch_sent(self, batch: Sequence[Scheduled]) -> None:
        self._policy.on_batch_sent(batch)
        if len(self._tenants.of) == 1:
            return  # its counter is compared with none
        seconds, charged, num_sent = self._costs.seconds, dict[str, float](), dict[str, int]()
        for job, num_tokens in batch:
            name = job.service.tenant
            charged[name] = charged.get(name, 0.0) + seconds(job, num_tokens)
            num_sent[name] = num_sent.get(name, 0) + 1
        of = self._tenants.of
        all_run = {name for name, number in num_sent.items() if self._all_run(of[name], number)}
        self._tenants.charge(charged, all_run)

    def charge(self, tenant: str, seconds: float) -> None:
        """As of ``ChargesTenants``. It counts like the time of tokens, and is remembered if the
        tenant has no jobs by now."""
        tenants = self._tenants
        if tenant not in tenants.of:
            if tenants.of:
                tenants.charge_absent(tenant, seconds)
        elif len(tenants.of) > 1:  # else its counter is compared with none
            tenants.charge({tenant: seconds})

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        self._policy.on_iteration_finished(ran, now)

    def on_predicted(self, job: Job) -> None:
        self._policy.on_predicted(job)

    def recalibrate(self) -> None:
        self._derive_costs()
        self._policy.recalibrate()

    def next_run_estimate(self, now: float) -> NextRunEstimate:
        """That of the policy, with jobs of tenants that are held back behind all others. So their
        KV leaves first."""
        estimate = self._policy.next_run_estimate(now)
        return EstimateOfTenants(self._tenants, estimate) if self._tenants.num_held else estimate

    def on_place_changed(self, job: Job) -> None:
        tenant = self._tenants.of[job.service.tenant]
        self._tenants.remove_job(tenant, job, self._places[job.number])
        self._tenants.add_job(tenant, job, job.place)
        self._places[job.number] = job.place
        self._policy.on_place_changed(job)

    def by_next_run(
        self, place: Place, estimate: NextRunEstimate, *, last_first: bool
    ) -> Iterator[Job]:
        if not isinstance(estimate, EstimateOfTenants):
            return self._policy.by_next_run(place, estimate, last_first=last_first)
        tenants = self._tenants
        jobs = self._policy.by_next_run(place, estimate.of_policy, last_first=last_first)
        num_first = (tenants.num_held_at if last_first else tenants.num_open_at)[place]
        return parted(
            jobs, lambda job: tenants.of[job.service.tenant].is_held is last_first, num_first
        )

    def level_sizes(self) -> Sequence[int]:
        return self._policy.level_sizes()

    def describe(self) -> str:
        return self._policy.describe()

    def _all_run(self, tenant: Tenant, num_sent: int) -> bool:
        """Whether all jobs of the tenant run, if so many are in the batch."""
        num_others = tenant.num_jobs - num_sent
        if num_others > len(self._in_flight):
            return False
        numbers = (number for jobs in tenant.jobs_at for number in jobs)
        return num_others <= sum(number in self._in_flight for number in numbers)

    def _most_seats(self) -> int:
        """Of a batch with jobs of several tenants."""
        total = self._tenants.total_weight
        if not self._speed.needs_bound(self._largest_weight / total):
            return self.limits.max_seqs
        tenants = self._tenants.of.values()
        return self._speed.most_seats((one.num_jobs, one.weight / total) for one in tenants)

    def _derive_costs(self) -> None:
        self._costs = TokenCosts.of(self.limits, self._times, self._max_model_len)
        context = min(_CONTEXT, self._max_model_len)
        self._tenants.tolerance_s = self._costs.output_s(self._tolerance_tokens, context)
        self._speed = TenantSpeed(
            self.limits.max_seqs, lambda number: self._times.decodes_s(number, context)
        )
