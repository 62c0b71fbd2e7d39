"""Policies with simple times for tests: a prefill takes 1 s a token, a decode 1 s, and quanta are
1, 2, 4, … s."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from fastserve_backend.job import Job, Place
from fastserve_backend.offers import TAKEN, OfferAnswer
from fastserve_backend.scheduler.base import BatchLimits, Policy, Scheduled, fill_batch
from fastserve_backend.scheduler.fcfs import FCFS
from fastserve_backend.scheduler.fixed_priority import FixedPriority
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.gittins_index import Capacity
from fastserve_backend.scheduler.learned_lengths import LearnedLengths
from fastserve_backend.scheduler.mlfq import MLFQ, Quanta
from fastserve_backend.scheduler.sarathi_edf import SarathiEDF
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from fastserve_backend.scheduler.slo import SLO
from fastserve_backend.scheduler.speculative import Speculative
from fastserve_backend.scheduler.srpt import SRPT
from fastserve_backend.scheduler.uniboost import UniBoost
from jobs import run_iteration

POLICIES = (
    "fcfs",
    "fixed_priority",
    "srpt",
    "mlfq",
    "skip_join_mlfq",
    "gittins",
    "slo",
    "speculative",
    "sarathi_edf",
    "uniboost",
)
NEVER_S = 1e9
ENDLESS = 10**12  # KV memory in tokens, so large that seats are scarcer
AGING = 0.5  # of speculative


class Unlimited:
    """Memory for everyone."""

    def find_prefix(self, job: Job) -> None:
        pass

    def offer(self, job: Job, num_tokens: int) -> OfferAnswer:
        return TAKEN


UNLIMITED = Unlimited()


@dataclass(frozen=True)
class LinearTimes:
    """A prefill takes ``token_s`` a token and at least ``least_s``. A decode takes 1 s."""

    token_s: float = 1.0
    least_s: float = 0.0

    def prefill_s(self, num_tokens: int) -> float:
        return max(self.least_s, num_tokens * self.token_s)

    def decode_s(self, context_tokens: int) -> float:
        return 1.0

    def decodes_s(self, num_jobs: int, context_tokens: int) -> float:
        return 1.0

    def score_s(self, num_tokens: int) -> float:
        return num_tokens * self.token_s


TIMES = LinearTimes()


def quanta(
    longest: float = 64.0, starvation_s: float = NEVER_S, base_s: Callable[[], float] = lambda: 1.0
) -> Quanta:
    return Quanta(base_s=base_s, ratio=2.0, longest_job_s=longest, starvation_s=starvation_s)


def one_job() -> BatchLimits:
    return BatchLimits(max_seqs=1, max_tokens=1000)


def mlfq(
    limits: BatchLimits | None = None, starvation_s: float = NEVER_S, longest: float = 64.0
) -> MLFQ:
    return MLFQ(limits or one_job(), quanta(longest, starvation_s), TIMES)


def skip_join(
    limits: BatchLimits | None = None, starvation_s: float = NEVER_S, longest: float = 64.0
) -> SkipJoinMLFQ:
    return SkipJoinMLFQ(limits or one_job(), quanta(longest, starvation_s), TIMES)


def speculative(limits: BatchLimits | None = None, aging: float = AGING) -> Speculative:
    return Speculative(limits or one_job(), quanta(), TIMES, aging)


def make_policy(
    name: str,
    limits: BatchLimits,
    *,
    starvation_s: float = NEVER_S,
    longest: float = 64.0,
    times: LinearTimes = TIMES,
) -> Policy:
    """Builds the policy of this name as the registry would from these values."""
    if name == "fcfs":
        return FCFS(limits)
    if name == "fixed_priority":
        return FixedPriority(limits)
    if name == "srpt":
        return SRPT(limits, times)
    if name == "sarathi_edf":
        return SarathiEDF(limits, first_token_s=10.0, token_s=2.0)
    if name == "uniboost":
        return UniBoost(limits, times)
    if name in ("gittins", "slo"):
        kind = SLO if name == "slo" else Gittins
        return kind(
            limits,
            times,
            LearnedLengths(100, "jct", Capacity(limits.max_seqs, ENDLESS)),
            max_model_len=100,
            starvation_s=starvation_s,
        )
    if name == "mlfq":
        return MLFQ(limits, quanta(longest, starvation_s), times)
    if name == "speculative":
        return Speculative(limits, quanta(longest, starvation_s), times, AGING)
    return SkipJoinMLFQ(limits, quanta(longest, starvation_s), times)


class Listed:
    """A policy's walk along a list."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self._jobs = iter(jobs)

    def __iter__(self) -> Iterator[Job]:
        return self

    def __next__(self) -> Job:
        return next(self._jobs)

    def skip(self, place: Place) -> None:
        jobs = self._jobs
        self._jobs = (job for job in jobs if job.place is not place)


def by_priority(policy: Policy, jobs: Iterable[Job]) -> list[Job]:
    """All of ``jobs`` in the order of their selection."""
    if isinstance(policy, Speculative):  # its jobs are in two orders, which only walk() merges
        known = {job.number for job in jobs}
        return [job for job in policy.walk(0.0, ()) if job.number in known]
    key = policy.next_run_estimate(0.0)
    if isinstance(policy, MLFQ):  # ENST may move a job ahead that starves soon
        return sorted(jobs, key=lambda job: (job.queue_level, key(job)[1]))
    return sorted(jobs, key=key)


def select(policy: Policy, now: float, in_flight: Collection[int] = ()) -> list[Scheduled]:
    """The next batch, whatever memory it takes."""
    jobs = policy.walk(now, in_flight)
    return fill_batch(jobs, policy.limits_for(now, 0, 0), in_flight, UNLIMITED)


def iterate(policy: Policy, now: float, elapsed_s: float = 1.0) -> list[Job]:
    """Select, run and account one iteration; returns its jobs."""
    batch = select(policy, now)
    for job, num_tokens in batch:
        run_iteration(job, num_tokens)
    policy.on_iteration_finished(batch, now + elapsed_s)
    return [job for job, _ in batch]
