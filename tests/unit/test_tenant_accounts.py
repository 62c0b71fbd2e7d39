"""Limits of tenants: jobs, tokens a minute, and shares of the queue."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import suppress
from itertools import count

import pytest
from fastserve_backend.config_sections import TenantsSection
from fastserve_backend.engine.tenant_accounts import TenantAccounts
from fastserve_backend.errors import InvalidRequestError, TenantLimitError
from fastserve_backend.job import Job, ServiceLevel
from hypothesis import example, given
from hypothesis import strategies as st
from jobs import make_job
from matrices import random_examples


class Queue:
    """Accounts, and a queue of so many places."""

    def __init__(
        self, num_places: int = 100, weights: Mapping[str, float] | None = None, **config: object
    ) -> None:
        section = TenantsSection.model_validate(config)
        self.accounts = TenantAccounts(num_places, section, weights or {})
        self.num_places = num_places
        self.jobs: dict[str, list[Job]] = {}
        self._numbers = count()

    @property
    def num_free(self) -> int:
        return self.num_places - sum(map(len, self.jobs.values()))

    def send(self, tenant: str, now: float = 0.0, prompt_len: int = 1) -> Job:
        job = make_job(next(self._numbers), prompt_len)
        job.service = ServiceLevel(tenant=tenant)
        self.accounts.accept(job, self.num_free, now)
        self.jobs.setdefault(tenant, []).append(job)
        return job

    def send_until_refused(self, tenant: str) -> int:
        """How many jobs were accepted."""
        num_before = len(self.jobs.get(tenant, ()))
        with suppress(TenantLimitError):
            while self.num_free:
                self.send(tenant)
        return len(self.jobs[tenant]) - num_before

    def end(self, job: Job, now: float = 0.0) -> None:
        self.accounts.on_job_end(job, now)
        self.jobs[job.service.tenant].remove(job)


# --- Jobs -------------------------------------------------------------------------------------


def test_a_tenant_has_at_most_so_many_jobs() -> None:
    queue = Queue(tenant_max_queued=3)
    jobs = [queue.send("a") for _ in range(3)]
    message = "^tenant 'a' has 3 unfinished requests, as many as it may; try again in 1 s$"
    with pytest.raises(TenantLimitError, match=message) as refused:
        queue.send("a")
    assert refused.value.retry_after_s == 1.0
    queue.send("b")
    queue.end(jobs[0])
    queue.send("a")


def test_a_flood_leaves_room_for_others() -> None:
    queue = Queue(1000)
    assert queue.send_until_refused("flood") == 800
    with pytest.raises(TenantLimitError, match="has 800 of the 1000 requests that the server"):
        queue.send("flood")
    for number in range(100):
        queue.send(f"tenant-{number}")


def test_floods_share_the_queue_by_weight() -> None:
    queue, rng = Queue(1000, weights={"heavy": 3.0, "light": 1.0}), random.Random(0)
    for _ in range(3000):
        for tenant in ("heavy", "light"):
            with suppress(TenantLimitError):
                queue.send(tenant)
        queue.end(rng.choice([*queue.jobs["heavy"], *queue.jobs["light"]]))
    assert len(queue.jobs["heavy"]) == pytest.approx(600, abs=10)
    assert len(queue.jobs["light"]) == pytest.approx(200, abs=10)


def test_requests_without_a_tenant_may_fill_the_queue_until_one_has_a_tenant() -> None:
    queue = Queue(100)
    assert queue.send_until_refused("") == 100
    for job in queue.jobs[""][:50]:
        queue.end(job)
    queue.send("named")
    assert queue.send_until_refused("") < 40


@random_examples(100)
@given(seed=st.integers(0, 2**32))
@example(seed=32976703)  # the sum of all weights is rounded to less than one of them
def test_nobody_with_several_jobs_takes_the_last_place(seed: int) -> None:
    rng = random.Random(seed)
    weights = {f"tenant-{number}": rng.choice([0.2, 1.0, 1.0, 7.0]) for number in range(6)}
    queue = Queue(rng.randint(1, 60), weights)
    for _ in range(300):
        tenant = rng.choice(list(weights))
        num_jobs, num_free = len(queue.jobs.get(tenant, ())), queue.num_free
        if rng.random() < 0.3 and num_jobs:
            queue.end(rng.choice(queue.jobs[tenant]))
            continue
        if num_free == 0:  # ``Admission`` refuses everybody
            continue
        try:
            queue.send(tenant)
        except TenantLimitError:
            assert num_jobs > 0
        else:
            assert queue.num_free >= num_jobs / 4 - 1
            assert queue.num_free > 0 or num_jobs < 4


# --- Tokens -----------------------------------------------------------------------------------


def test_a_refused_prompt_is_told_when_it_fits() -> None:
    queue = Queue(tenant_tokens_per_minute=600)
    queue.send("a", now=100.0, prompt_len=500)
    message = "^tenant 'a' has used its 600 tokens a minute; try again in 20 s$"
    with pytest.raises(TenantLimitError, match=message) as refused:
        queue.send("a", now=100.0, prompt_len=300)
    assert refused.value.retry_after_s == pytest.approx(20.0)
    queue.send("b", now=100.0, prompt_len=300)
    with pytest.raises(TenantLimitError):
        queue.send("a", now=119.9, prompt_len=300)
    queue.send("a", now=120.1, prompt_len=300)


def test_output_is_charged_as_it_comes() -> None:
    queue = Queue(tenant_tokens_per_minute=60)
    job = queue.send("a", prompt_len=10)
    queue.send("a", prompt_len=10)
    job.output_ids.extend(range(100))
    with pytest.raises(TenantLimitError) as refused:
        queue.send("a", prompt_len=10)
    assert refused.value.retry_after_s == pytest.approx(60 + 10)
    job.output_ids.extend(range(10))
    queue.end(job, now=30.0)
    with pytest.raises(TenantLimitError) as refused:
        queue.send("a", now=30.0, prompt_len=10)
    assert refused.value.retry_after_s == pytest.approx(60 + 10 + 10 - 30)


def test_a_prompt_larger_than_a_minutes_tokens_needs_a_full_bucket() -> None:
    queue = Queue(tenant_tokens_per_minute=60)
    queue.send("a", prompt_len=100)
    with pytest.raises(TenantLimitError) as refused:
        queue.send("a", prompt_len=100)
    assert refused.value.retry_after_s == pytest.approx(100.0)
    queue.send("a", now=100.1, prompt_len=100)


@random_examples(100)
@given(seed=st.integers(0, 2**32))
def test_no_tenant_gets_more_than_its_tokens(seed: int) -> None:
    """Beyond its rate it gets at most a minute's tokens, and the output of accepted jobs."""
    rng = random.Random(seed)
    tokens_a_minute = rng.randint(10, 300)
    queue = Queue(tenant_tokens_per_minute=tokens_a_minute)
    now, num_prompt, num_output = 0.0, 0, 0
    for _ in range(100):
        now += rng.expovariate(1.0)
        unfinished = queue.jobs.get("a", [])
        for job in unfinished:
            job.output_ids.extend(range(rng.randint(0, 2)))
        num_output = sum(len(job.output_ids) for job in unfinished)
        if unfinished and rng.random() < 0.3:
            queue.end(rng.choice(unfinished), now)
        prompt_len = rng.randint(1, 60)
        try:
            queue.send("a", now, prompt_len)
        except TenantLimitError as error:
            with pytest.raises(TenantLimitError):
                queue.send("a", now + 0.9 * error.retry_after_s, prompt_len)
            now += 0.9 * error.retry_after_s
        else:
            num_prompt += prompt_len
            most = tokens_a_minute * (1 + now / 60)
            longest = 60 if tokens_a_minute < 60 else 0
            assert num_prompt + num_output <= most + longest + 1e-6


# --- Who is known -----------------------------------------------------------------------------


def test_with_a_file_other_tenants_are_refused() -> None:
    queue = Queue(weights={"a": 1.0})
    queue.send("a")
    for tenant in ("b", ""):
        with pytest.raises(InvalidRequestError, match=r"^tenant: got .*the server's tenants_file$"):
            queue.send(tenant)


def test_tenants_without_jobs_and_with_full_buckets_are_forgotten() -> None:
    queue = Queue(tenant_tokens_per_minute=60)
    for number in range(1000):
        queue.end(queue.send(f"tenant-{number}", float(number), prompt_len=10), float(number))
        assert len(queue.accounts) <= 12
    keeps = queue.send("tenant-0", 2000.0, prompt_len=10)
    queue.send("other", 3000.0)
    assert len(queue.accounts) == 2
    queue.end(keeps, 3000.0)
    queue.send("other", 3011.0)
    assert len(queue.accounts) == 1
