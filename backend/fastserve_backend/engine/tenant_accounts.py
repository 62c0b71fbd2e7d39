"""What each tenant may still send: jobs, tokens a minute, and its share of the queue."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from fastserve_client import protocol

from fastserve_backend.config_sections import TenantsSection
from fastserve_backend.dynamic_threshold import may_take_place
from fastserve_backend.errors import InvalidRequestError, TenantLimitError
from fastserve_backend.job import Job

# Under load a job ends, and makes room for another one, about once in this time.
_JOB_END_S = 1.0


@dataclass(slots=True)
class _Account:
    """A tenant that has jobs, or has not all its tokens back yet."""

    weight: float
    tokens_left: float
    updated_s: float
    jobs: dict[int, Job] = field(default_factory=dict)  # unfinished, by number
    num_charged: int = 0  # output tokens of these jobs that are charged by now


class TenantAccounts:
    """Counts each tenant's unfinished jobs and tokens, and refuses what exceeds its limits.

    **Queue**: a tenant gets another place as ``may_take_place`` says. Its share is its weight over
    the weights of all tenants with jobs. The rule holds once the server knows a tenant by name.
    Before, requests without a tenant may fill the queue.

    **Tokens**: a bucket holds the tokens of a minute, and is refilled at that rate. A prompt is
    charged when its job is accepted, and output as it comes. A job is accepted if the bucket has
    its prompt, or is full. Output may overdraw it.

    Tenants without jobs and with full buckets are forgotten. Not thread-safe.
    """

    def __init__(
        self, max_queued: int, config: TenantsSection, weights: Mapping[str, float]
    ) -> None:
        """
        Args:
            max_queued: most unfinished jobs of all tenants.
            weights: by tenant. If there are any, other tenants are refused.
        """
        self._max_queued = max_queued
        self._max_jobs = config.tenant_max_queued
        self._tokens_a_minute = config.tenant_tokens_per_minute
        self._weights = weights
        self._shares_queue = bool(weights)
        self._accounts: dict[str, _Account] = {}
        self._total_weight = 0.0  # of tenants with jobs
        self._full_again: list[tuple[float, str]] = []  # heap of (time, tenant without jobs)

    def __len__(self) -> int:
        """Tenants that are remembered."""
        return len(self._accounts)

    def accept(self, job: Job, num_free: int, now: float) -> None:
        """Count the job until ``on_job_end``.

        Args:
            num_free: jobs that the queue can still take.

        Raises:
            InvalidRequestError: the tenant is unknown.
            TenantLimitError: the job exceeds a limit of its tenant.
        """
        name = job.service.tenant
        if self._weights and name not in self._weights:
            allowed = "must be a name in the server's tenants_file"
            raise InvalidRequestError(protocol.TENANT, name, allowed)
        self._shares_queue |= name != ""
        self._forget(now)
        account = self._accounts.get(name) or self._new_account(name, now)
        self._check_jobs(name, account, num_free)
        if self._tokens_a_minute is not None:
            self._update(account, self._tokens_a_minute, now)
            self._take_prompt(name, account, self._tokens_a_minute, len(job.prompt_ids))
        if not account.jobs:
            self._total_weight += account.weight
        account.jobs[job.number] = job
        self._accounts[name] = account

    def on_job_end(self, job: Job, now: float) -> None:
        """An accepted job has ended."""
        name = job.service.tenant
        account = self._accounts[name]
        if self._tokens_a_minute is not None:
            self._update(account, self._tokens_a_minute, now)
            account.num_charged -= len(job.output_ids)
        del account.jobs[job.number]
        if account.jobs:
            return
        self._total_weight -= account.weight
        missing_s = 0.0
        if self._tokens_a_minute is not None:
            missing_s = 60 * (1 - account.tokens_left / self._tokens_a_minute)
        heapq.heappush(self._full_again, (now + missing_s, name))
        self._forget(now)

    def _new_account(self, name: str, now: float) -> _Account:
        return _Account(self._weights.get(name, 1.0), self._tokens_a_minute or 0, now)

    def _check_jobs(self, name: str, account: _Account, num_free: int) -> None:
        num_jobs = len(account.jobs)
        if self._max_jobs is not None and num_jobs >= self._max_jobs:
            reason = f"has {num_jobs} unfinished requests, as many as it may"
            raise TenantLimitError(name, reason, _JOB_END_S)
        total_weight = self._total_weight + (0.0 if account.jobs else account.weight)
        share = min(1.0, account.weight / total_weight)  # sums of weights are rounded
        if self._shares_queue and not may_take_place(num_jobs, num_free, share):
            reason = f"has {num_jobs} of the {self._max_queued} requests that the server takes"
            raise TenantLimitError(name, reason, _JOB_END_S)

    def _take_prompt(
        self, name: str, account: _Account, tokens_a_minute: int, num_tokens: int
    ) -> None:
        missing = min(num_tokens, tokens_a_minute) - account.tokens_left
        if missing > 0:
            reason = f"has used its {tokens_a_minute} tokens a minute"
            raise TenantLimitError(name, reason, 60 * missing / tokens_a_minute)
        account.tokens_left -= num_tokens

    def _update(self, account: _Account, tokens_a_minute: int, now: float) -> None:
        """Charge the output that has come since the last update, and refill the bucket."""
        num_outputs = sum(len(job.output_ids) for job in account.jobs.values())
        passed_s = max(0.0, now - account.updated_s)
        left = account.tokens_left - (num_outputs - account.num_charged)
        account.tokens_left = min(tokens_a_minute, left + passed_s / 60 * tokens_a_minute)
        account.num_charged = num_outputs
        account.updated_s += passed_s

    def _forget(self, now: float) -> None:
        """Forget tenants without jobs whose buckets are full by now."""
        while self._full_again and self._full_again[0][0] <= now:
            _, name = heapq.heappop(self._full_again)
            account = self._accounts.get(name)
            if account is None or account.jobs:
                continue
            if self._tokens_a_minute is not None:
                self._update(account, self._tokens_a_minute, now)
                # It has had jobs since, so there is a later entry.
                if account.tokens_left < self._tokens_a_minute:
                    continue
            del self._accounts[name]
