"""Properties of priorities over every policy, in random histories."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import Policy
from fastserve_backend.scheduler.priority_classes import PriorityClasses
from fastserve_backend.scheduler.promotion import Promotion
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job
from matrices import random_examples
from policies import POLICIES, by_priority
from test_policy_properties import History

HISTORIES = {
    "seed": st.integers(0, 2**32),
    "name": st.sampled_from(POLICIES),
    "num_stages": st.integers(1, 3),
    "chunk": st.booleans(),
    "refuses": st.booleans(),
}


class PriorityHistory(History):
    """Jobs of random priorities. ``check_batch`` checks the order, and that a job is left out only
    if it does not fit beside more urgent jobs."""

    has_across = False

    def make_policy(self) -> Policy:
        make = super().make_policy
        self.across = Promotion(self.starvation_s, lambda job: 0.0) if self.has_across else None
        self.classes = PriorityClasses(make, self.across)
        return self.classes

    def make_job(self, number: int, prompt_len: int, max_tokens: int, arrival_s: float) -> Job:
        priority = self.rng.choice([-2, 0, 0, 1, 7])
        return make_job(
            number, prompt_len, max_tokens=max_tokens, arrival_s=arrival_s, priority=priority
        )

    def by_priority(self) -> list[Job]:
        jobs = list(self.known.values())
        ordered = sorted(
            (job for job in jobs if job.outranks_all),
            key=lambda job: 0 if self.across is None else self.across.turn_number(job),
        )
        for priority in sorted({job.service.priority for job in jobs}):
            of_class = [job for job in jobs if job.service.priority == priority]
            inner = self.classes._policy_of(of_class[0])
            ordered += [job for job in by_priority(inner, of_class) if not job.outranks_all]
        return ordered

    @contextmanager
    def order_kept(self, changed: list[Job] | None = None) -> Iterator[None]:
        yield  # test_policy_properties.py checks each policy alone

    def check_known(self) -> None:
        assert sum(self.policy.level_sizes()) == len(self.known)
        if self.has_across:
            self.check_starvation()


class BoundedHistory(PriorityHistory):
    """No job of any priority waits longer than the bound across priorities."""

    has_across = True


class OnePriorityHistory(PriorityHistory):
    make_job = History.make_job


@pytest.mark.slow
@random_examples(100)
@given(**HISTORIES)
def test_no_job_runs_while_a_more_urgent_one_could(
    seed: int, name: str, num_stages: int, chunk: bool, refuses: bool
) -> None:
    PriorityHistory(seed, name, num_stages, chunk, refuses).run()


@pytest.mark.slow
@random_examples(100)
@given(**HISTORIES)
def test_nobody_waits_longer_than_the_bound_across_priorities(
    seed: int, name: str, num_stages: int, chunk: bool, refuses: bool
) -> None:
    BoundedHistory(seed, name, num_stages, chunk, refuses).run()


@pytest.mark.slow
@random_examples(100)
@given(**HISTORIES)
def test_with_one_priority_all_decisions_are_those_of_the_policy_alone(
    seed: int, name: str, num_stages: int, chunk: bool, refuses: bool
) -> None:
    alone, wrapped = (
        kind(seed, name, num_stages, chunk, refuses) for kind in (History, OnePriorityHistory)
    )
    for history in (alone, wrapped):
        history.run()
    alone_batches, batches = (
        [[(job.number, num_tokens) for job, num_tokens in batch] for batch in history.batches]
        for history in (alone, wrapped)
    )
    assert batches == alone_batches
