"""Speculative scheduling: order, wrong and late predictions, aging, EWT, and comparison with other
policies."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Sequence
from math import ceil, log2

import pytest
from fastserve_backend.job import Job
from fastserve_backend.scheduler.base import BatchLimits, Policy, Scheduled
from fastserve_backend.scheduler.keyed_policy import KeyedPolicy
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from fastserve_backend.scheduler.speculative import Speculative
from fastserve_backend.scheduler.srpt import SRPT
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from matrices import random_examples
from policies import AGING, TIMES, by_priority, iterate, one_job, quanta, select, speculative

HARDLY = 1e-9  # aging that only decides between equals


def predict(policy: Policy, job: Job, num_tokens: int) -> None:
    job.predicted_tokens = num_tokens
    policy.on_predicted(job)


def with_predictions(*predictions: int) -> list[Job]:
    """Jobs from number 1 on that have their first token."""
    return [
        make_job(number, 1, predicted_tokens=predicted, computed=True)
        for number, predicted in enumerate(predictions, 1)
    ]


# --- Order ------------------------------------------------------------------------------------


def test_the_shortest_remaining_time_runs_first() -> None:
    policy = speculative(aging=HARDLY)
    long_output = make_job(1, 1, predicted_tokens=11, computed=True)  # 10 s
    short_output = make_job(2, 4, predicted_tokens=3, computed=True)  # 2 s
    prompt = make_job(0, 9, predicted_tokens=1)  # 9 s
    jobs = [long_output, prompt, short_output]
    for job in jobs:
        policy.add(job, 0.0)
    assert by_priority(policy, jobs) == [short_output, prompt, long_output]


def test_a_job_predicted_long_has_its_first_token_as_soon_as_without_a_prediction() -> None:
    policy = speculative(aging=HARDLY)
    shorter = make_job(0, 1, predicted_tokens=7, computed=True)  # 6 s left
    long = make_job(1, 3, predicted_tokens=500)  # its prefill fits the queue of 4 s
    for job in (shorter, long):
        policy.add(job, 0.0)
    assert by_priority(policy, [shorter, long]) == [long, shorter]
    assert iterate(policy, 0.0) == [long]
    assert by_priority(policy, [shorter, long]) == [shorter, long]


def test_the_order_changes_as_jobs_progress() -> None:
    policy = speculative(aging=HARDLY)
    first, second = make_job(0, 6, predicted_tokens=4), make_job(1, 2, predicted_tokens=5)
    policy.add(first, 0.0)
    assert iterate(policy, 0.0) == [first]  # 3 s left of 9
    run_iteration(second)
    policy.add(second, 6.0)  # 4 s
    assert by_priority(policy, [first, second]) == [first, second]


def test_the_context_grows_while_a_job_decodes() -> None:
    class Growing:
        def prefill_s(self, num_tokens: int) -> float:
            return 1.0 * num_tokens

        def decode_s(self, context_tokens: int) -> float:
            return 1.0 * context_tokens

        def decodes_s(self, num_jobs: int, context_tokens: int) -> float:
            return num_jobs * self.decode_s(context_tokens)

        def score_s(self, num_tokens: int) -> float:
            return 1.0 * num_tokens

    policy = Speculative(one_job(), quanta(longest=1000.0, base_s=lambda: 141.0), Growing(), HARDLY)
    # A context of 11, then 12 to 19, of which 16 is a middle one: 11 + 8 · 16 = 139 s.
    job = make_job(0, 10, predicted_tokens=10, computed=True)
    other, longer = (make_job(n, n + 137, predicted_tokens=1) for n in (1, 3))  # 138 and 140 s
    jobs = [job, other, longer]
    for each in jobs:
        policy.add(each, 0.0)
    assert by_priority(policy, jobs) == [other, job, longer]


def test_max_tokens_bound_a_prediction_unless_they_force_the_length() -> None:
    policy = speculative(aging=HARDLY)
    bounded = make_job(0, 1, max_tokens=5, predicted_tokens=100, computed=True)
    forced = make_job(1, 1, max_tokens=5, predicted_tokens=100, ignore_eos=True, computed=True)
    between = make_job(2, 1, predicted_tokens=50, computed=True)
    jobs = [forced, between, bounded]
    for job in jobs:
        policy.add(job, 0.0)
    assert by_priority(policy, jobs) == [bounded, between, forced]


def test_a_job_with_a_prediction_is_at_the_level_of_its_remaining_time() -> None:
    policy = speculative()
    job, unpredicted = make_job(0, 2, predicted_tokens=9), make_job(1, 8)
    for each in (job, unpredicted):
        policy.add(each, 0.0)
    assert job.queue_level == 4  # 10 s: quanta of 1, 2, 4, 8, 16, …
    assert policy.level_sizes() == [0, 0, 0, 1, 1, 0, 0]
    policy.remove(unpredicted)
    assert iterate(policy, 0.0) == [job]
    assert job.queue_level == 3  # 8 s
    assert policy.level_sizes() == [0, 0, 0, 1, 0, 0, 0]
    policy.remove(job)
    assert sum(policy.level_sizes()) == 0


# --- Predictions that are wrong, late or repeated ---------------------------------------------


def test_a_job_that_outlives_its_prediction_is_demoted() -> None:
    policy = speculative(aging=HARDLY)
    job, other = make_job(0, 1, predicted_tokens=4), make_job(1, 1, predicted_tokens=2)
    policy.add(job, 0.0)
    for now in range(4):
        assert iterate(policy, float(now)) == [job]
    policy.add(other, 4.0)
    assert by_priority(policy, [job, other]) == [job, other]  # it should end by now
    assert policy.num_demotions == 0
    assert iterate(policy, 4.0) == [job]  # 5 tokens: more than 4, so 8; 3 s left
    assert policy.num_demotions == 1
    assert by_priority(policy, [job, other]) == [other, job]


def test_a_late_prediction_that_is_outlived_already_is_doubled_until_it_is_not() -> None:
    policy = speculative(aging=HARDLY)
    job = make_job(0, 1)
    policy.add(job, 0.0)
    for now in range(20):
        iterate(policy, float(now))
    demotions = policy.num_demotions  # by the queues
    predict(policy, job, 3)  # 24: 4 s left
    assert policy.num_demotions == demotions
    shorter, longer = with_predictions(4, 6)
    for other in (shorter, longer):
        policy.add(other, 20.0)
    assert by_priority(policy, [job, shorter, longer]) == [shorter, job, longer]


def test_a_prediction_may_come_while_the_job_is_in_flight() -> None:
    policy = speculative(aging=HARDLY)
    job, other = make_job(0, 1), make_job(1, 1, predicted_tokens=5, computed=True)
    policy.add(job, 0.0)
    assert select(policy, 0.0) == [(job, 1)]
    predict(policy, job, 9)
    assert select(policy, 0.0, [0]) == []
    policy.add(other, 0.0)
    run_iteration(job)
    policy.on_iteration_finished([Scheduled(job, 1)], 1.0)
    assert by_priority(policy, [job, other]) == [other, job]
    assert sum(policy.level_sizes()) == 2


def test_a_new_prediction_replaces_the_old_one() -> None:
    policy = speculative(aging=HARDLY)
    job, other = make_job(0, 1, predicted_tokens=9), make_job(1, 1, predicted_tokens=5)
    for each in (job, other):
        policy.add(each, 0.0)
    predict(policy, job, 2)
    assert by_priority(policy, [job, other]) == [job, other]


def test_a_job_in_a_queue_competes_with_its_quantum() -> None:
    policy = speculative(aging=HARDLY)
    queued = make_job(0, 3)  # quantum 4 s
    shorter, longer = with_predictions(4, 6)
    jobs = [queued, shorter, longer]
    for job in jobs:
        policy.add(job, 0.0)
    assert by_priority(policy, jobs) == [shorter, queued, longer]


# --- Aging and waiting times ------------------------------------------------------------------


def test_a_long_job_comes_up_by_its_age_and_then_runs_on() -> None:
    """Short jobs arrive as fast as they are served. Those that arrive more than 40 / 0.5 = 80 s
    later do not overtake the long one."""
    policy = speculative(aging=0.5)
    long = make_job(0, 1, predicted_tokens=41, computed=True)
    policy.add(long, 0.0)
    ran_at = []
    for now in range(200):
        policy.add(make_job(now + 1, 1, predicted_tokens=1), float(now))
        (job,) = iterate(policy, float(now))
        if job is long:
            ran_at.append(now)
        if job is not long or len(ran_at) == 40:
            policy.remove(job)
    first = ran_at[0]
    assert 60 < first <= 80
    assert ran_at == list(range(first, first + 40))


def test_estimated_wait_times_by_hand() -> None:
    policy = speculative(BatchLimits(max_seqs=2, max_tokens=100), aging=0.5)
    four = make_job(0, 1, predicted_tokens=5, computed=True)
    ten = make_job(1, 2, predicted_tokens=11, computed=True)
    twenty = make_job(2, 1, predicted_tokens=21, computed=True)
    queued = make_job(3, 3)  # in the queue of 4 s
    jobs = [four, ten, twenty, queued]
    for job in jobs:
        policy.add(job, 0.0)

    def waits(now: float) -> list[float]:
        ewt = policy.next_run_estimate(now)
        return [ewt(job)[0] for job in jobs]

    # Earlier jobs run their remaining times, two at once; the queued one runs 4 + 8 s until it is
    # in the queue of 16 s, 4 + 8 + 16 s until that of 32 s.
    assert waits(0.0) == [0, (4 + 12) / 2, (4 + 10 + 28) / 2, 4 / 2]
    # 12 s later ten's 10 s are 4, the queue of 4 s, and twenty's 20 are 14.
    assert waits(12.0) == [0, 4 / 2, (4 + 10 + 12) / 2, 4 / 2]
    # Then age makes up for the last 2 s within 4.
    assert waits(36.0) == [0, 0, 4, 4 / 2]


# --- Against other policies -------------------------------------------------------------------


def serve(
    policies: Sequence[Policy],
    seed: int,
    new_job: Callable[[random.Random, int, float], Job],
    check: Callable[[float, list[list[Scheduled]], list[Job]], None],
) -> None:
    """Serves the same random jobs by all policies in parallel, as a step loop would, with pipeline
    stages and batches that could not run. ``check`` gets the time, each policy's batch, and the
    jobs that the first policy could choose from."""
    rng = random.Random(seed)
    num_stages = rng.randint(1, 3)
    jobs: list[dict[int, Job]] = [{} for _ in policies]
    flights: list[tuple[float, list[list[Scheduled]]]] = []
    now = 0.0
    number = 0
    while number < 40 or jobs[0]:
        while number < 40 and (not jobs[0] or rng.random() < 0.5):
            state = rng.getstate()
            for policy, known in zip(policies, jobs, strict=True):
                rng.setstate(state)  # a copy of the job for each policy
                known[number] = new_job(rng, number, now)
                policy.add(known[number], now)
            number += 1
        while len(flights) < num_stages:
            flying = {job.number for _, flight in flights for job, _ in flight[0]}
            waiting = [job for job in jobs[0].values() if job.number not in flying]
            batches = [select(policy, now, flying) for policy in policies]
            check(now, batches, waiting)
            if rng.random() < 0.2:
                break
            if not batches[0]:
                break
            flights.append((now, batches))
        if not flights:
            continue
        _, batches = flights.pop(0)
        now += rng.choice([0.5, 1.0, 3.0])
        for policy, known, batch in zip(policies, jobs, batches, strict=True):
            for job, num_tokens in batch:
                run_iteration(job, num_tokens)
            policy.on_iteration_finished(batch, now)
            for job, _ in batch:
                if len(job.output_ids) == job.params.max_tokens:
                    policy.remove(job)
                    del known[job.number]


def described(batches: list[list[Scheduled]]) -> list[list[tuple[int, int]]]:
    return [[(job.number, num_tokens) for job, num_tokens in batch] for batch in batches]


def some_limits(seed: int) -> BatchLimits:
    rng = random.Random(seed)
    return rng.choice([BatchLimits(rng.randint(1, 5), 100), BatchLimits(3, 20, 10)])


def test_a_promoted_job_comes_before_those_with_a_prediction() -> None:
    policy = Speculative(one_job(), quanta(starvation_s=30.0), TIMES, HARDLY)
    unknown, known = make_job(0, 8), make_job(1, 1, predicted_tokens=2)
    policy.add(unknown, 0.0)
    policy.add(known, 29.0)
    assert iterate(policy, 29.0) == [known]
    select(policy, 30.0)
    assert policy.next_run_estimate(30.0)(unknown)[0] == 0.0
    assert iterate(policy, 30.0) == [unknown]
    assert iterate(policy, 31.0) == [known]
    assert policy.num_promotions == 1


@pytest.mark.slow
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_without_predictions_the_schedule_is_that_of_skip_join(seed: int) -> None:
    limits = some_limits(seed)
    queues = quanta(starvation_s=random.Random(seed).choice([5.0, 30.0]))
    ours, reference = (
        Speculative(limits, queues, TIMES, AGING),
        SkipJoinMLFQ(limits, queues, TIMES),
    )

    def new_job(rng: random.Random, number: int, now: float) -> Job:
        return make_job(number, rng.randint(1, 20), max_tokens=rng.randint(1, 25), arrival_s=now)

    def check(now: float, batches: list[list[Scheduled]], waiting: list[Job]) -> None:
        ours_batch, reference_batch = described(batches)
        assert ours_batch == reference_batch
        assert ours.level_sizes() == reference.level_sizes()
        assert ours.num_demotions == reference.num_demotions
        assert ours.num_promotions == reference.num_promotions
        our_key, key = ours.next_run_estimate(now), reference.next_run_estimate(now)
        for (job, _), (twin, _) in zip(*batches, strict=True):
            assert our_key(job) == key(twin)

    serve([ours, reference], seed, new_job, check)


@pytest.mark.slow
@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_with_perfect_predictions_the_schedule_is_that_of_srpt(seed: int) -> None:
    """This holds for jobs with their first token."""
    limits = some_limits(seed)

    def new_job(rng: random.Random, number: int, now: float) -> Job:
        length = rng.randint(2, 25)
        return make_job(
            number,
            rng.randint(1, 20),
            max_tokens=length,
            arrival_s=now,
            ignore_eos=True,
            predicted_tokens=length,
            computed=True,
        )

    def check(now: float, batches: list[list[Scheduled]], waiting: list[Job]) -> None:
        ours, reference = described(batches)
        assert ours == reference

    ours = speculative(limits, aging=HARDLY)
    serve([ours, SRPT(limits, TIMES)], seed, new_job, check)
    assert ours.num_demotions == 0


def remaining_s(job: Job) -> float:
    """Remaining seconds by the prediction, doubled as often as it was outlived, at 1 s a token of
    prompt and output."""
    assert job.predicted_tokens is not None
    predicted = max(1, job.predicted_tokens)
    while len(job.output_ids) > predicted:
        predicted *= 2
    if not job.params.ignore_eos:
        predicted = min(predicted, job.params.max_tokens)
    return job.num_uncomputed + max(0.0, predicted - len(job.output_ids) - 1.0)


class ByDefinition(KeyedPolicy):
    """Sorts all jobs at each selection by their remaining time less their aging."""

    now = 0.0

    def key(self, job: Job) -> float:
        left_s = remaining_s(job)
        assert job.predicted_tokens is not None
        is_minor = job.num_uncomputed <= 0.1 * job.predicted_tokens
        if not job.output_ids and is_minor:  # as in the queue of its prefill
            left_s = min(left_s, 2.0 ** ceil(log2(job.num_uncomputed)))
        return left_s - AGING * (self.now - job.arrival_s)

    def walk(self, now: float, in_flight: Collection[int]) -> Iterable[Job]:
        self.now = now
        self._jobs.reorder(self.key)
        return super().walk(now, in_flight)


@pytest.mark.slow
@random_examples(60)
@given(seed=st.integers(0, 2**32))
def test_the_schedule_is_that_of_sorting_all_jobs_at_each_selection(seed: int) -> None:
    limits = some_limits(seed)
    ours, reference = speculative(limits), ByDefinition(limits)

    def new_job(rng: random.Random, number: int, now: float) -> Job:
        return make_job(
            number,
            rng.randint(1, 20),
            max_tokens=rng.randint(1, 25),
            arrival_s=now,
            ignore_eos=rng.random() < 0.5,
            predicted_tokens=rng.randint(0, 30),
        )

    def check(now: float, batches: list[list[Scheduled]], waiting: list[Job]) -> None:
        batch, expected = described(batches)
        assert batch == expected
        for job in waiting:  # no job starves: much later arrivals do not overtake
            assert batches[0][0].job.arrival_s <= job.arrival_s + remaining_s(job) / AGING

    serve([ours, reference], seed, new_job, check)
