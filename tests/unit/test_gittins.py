"""The lengths that the Gittins policy learns, and the resulting order of jobs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fastserve_backend.config_sections import Objective
from fastserve_backend.job import FinishReason, Job, Place
from fastserve_backend.scheduler.base import BatchLimits, Scheduled
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.gittins_index import Capacity, GittinsIndex
from fastserve_backend.scheduler.learned_lengths import LearnedLengths
from fastserve_backend.scheduler.length_distribution import (
    DistributionOfPredicted,
    LengthDistribution,
)
from jobs import make_job, run_iteration
from policies import ENDLESS, NEVER_S, TIMES, by_priority, iterate, one_job, select

MAX_TOKENS = 512


def learned(lengths: Sequence[int], max_tokens: int = MAX_TOKENS) -> LengthDistribution:
    distribution = LengthDistribution(max_tokens)
    for length in lengths:
        reached = distribution.bin_of(length)
        distribution.count_passed(0, reached)
        distribution.count_ended(reached)
    return distribution


def policy(
    objective: Objective = "jct", limits: BatchLimits | None = None, starvation_s: float = NEVER_S
) -> Gittins:
    limits = limits or one_job()
    learned = LearnedLengths(MAX_TOKENS, objective, Capacity(limits.max_seqs, ENDLESS))
    return Gittins(limits, TIMES, learned, max_model_len=MAX_TOKENS, starvation_s=starvation_s)


def finish(policy: Gittins, job: Job, reason: FinishReason = FinishReason.STOP) -> None:
    job.finish_reason = reason
    policy.remove(job)


def teach(policy: Gittins, lengths: Sequence[int], predicted_tokens: int | None = None) -> None:
    """Serves jobs of these lengths one by one, then updates the indices."""
    for number, length in enumerate(lengths):
        job = make_job(1_000_000 + number, 1, predicted_tokens=predicted_tokens)
        policy.add(job, 0.0)
        for _ in range(length):
            iterate(policy, 0.0)
        finish(policy, job)
    for _ in range(20):
        assert select(policy, 0.0) == []


# --- The distribution -------------------------------------------------------------------------


def test_lengths_are_uniform_before_anything_is_known() -> None:
    distribution = LengthDistribution(MAX_TOKENS)
    edges = np.array(distribution.edges)
    np.testing.assert_allclose(distribution.survival()[0], 1 - edges / MAX_TOKENS, atol=1e-12)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 100, 2048])
def test_every_length_has_a_bin(max_tokens: int) -> None:
    distribution = LengthDistribution(max_tokens)
    edges = distribution.edges
    assert edges[0] == 0
    assert edges[-1] == max_tokens
    for length in range(1, max_tokens + 1):
        index = distribution.bin_of(length)
        assert edges[index] < length <= edges[index + 1]


def test_what_is_learned_converges_to_the_truth() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.geometric(1 / 60, size=3000), 1, MAX_TOKENS)
    distribution = learned(lengths.tolist())
    truth = [(lengths > edge).mean() for edge in distribution.edges]
    np.testing.assert_allclose(distribution.survival()[0], truth, atol=0.03)


def test_jobs_that_have_not_ended_count_as_long() -> None:
    """Ten jobs of 8 tokens ended; ten others are at 100 and go on."""
    distribution = learned([8] * 10)
    for _ in range(10):
        distribution.count_passed(0, distribution.bin_of(100))
    survival = dict(zip(distribution.edges, distribution.survival()[0], strict=True))
    assert survival[8] == pytest.approx(0.5, abs=0.2)
    assert survival[8] > 0.4


def test_old_traffic_is_forgotten() -> None:
    distribution = learned([8] * 3000 + [200] * 12_000)
    assert distribution.survival()[0, distribution.bin_of(200)] > 0.95


def test_bins_that_nobody_came_to_follow_the_others() -> None:
    """A tenth of the jobs ended in each bin up to 32; the others are still running there."""
    distribution = LengthDistribution(MAX_TOKENS)
    beyond = distribution.bin_of(32)
    for _ in range(50):
        for index in range(beyond):
            distribution.count_passed(index, index + 1)
        distribution.count_passed(0, beyond)
    slow = distribution.survival()[0]
    for _ in range(40):
        for index in range(beyond):
            distribution.count_passed(0, index)
            distribution.count_ended(index)
    fast = distribution.survival()[0]
    after = distribution.bin_of(200)
    assert fast[after] / fast[beyond] < 0.3 * slow[after] / slow[beyond]


def test_a_class_of_predictions_begins_around_its_lengths_and_learns_what_they_are_worth() -> None:
    of_all = learned([300] * 50)
    distribution = DistributionOfPredicted(of_all, 32, 63)
    survival = dict(zip(distribution.edges, distribution.survival()[0], strict=True))
    assert survival[16] > 0.95
    assert 0.3 < survival[47] < 0.8
    assert survival[187] < 0.3
    for _ in range(100):  # useless predictions
        reached = distribution.bin_of(300)
        distribution.count_passed(0, reached)
        distribution.count_ended(reached)
    np.testing.assert_allclose(distribution.survival()[0], of_all.survival()[0], atol=0.05)


# --- The index --------------------------------------------------------------------------------

# One job at a time with endless memory: a token costs an iteration.
ONE_SEAT = Capacity(max_seqs=1, kv_tokens=ENDLESS)
EXPONENTS: dict[Objective, float] = {"jct": 0.0, "balanced": 0.5, "normalized_latency": 1.0}


def by_definition(
    lengths: Sequence[int],
    objective: Objective,
    taken: Callable[[int], float],
    extra: float,
    age: int,
    most: int,
) -> float:
    """The formula for equally likely lengths, summed over all jobs.

    Args:
        taken: cost of the first n tokens.
    """
    left = [min(length, most) for length in lengths if length > age]
    return max(
        sum(length ** -EXPONENTS[objective] for length in left if length <= stop)
        / sum(extra + taken(min(length, stop)) - taken(age) for length in left)
        for stop in range(age + 1, most + 1)
    )


class Exact(LengthDistribution):
    """Lengths that are known exactly, in bins of one token."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.edges = list(range(max(lengths) + 1))
        self._lengths = lengths

    def survival(self) -> np.ndarray:
        def share(age: int, edge: int) -> float:
            left = [length for length in self._lengths if length > age]
            return sum(length > edge for length in left) / max(1, len(left))

        return np.array([[share(age, edge) for edge in self.edges] for age in self.edges])


@pytest.mark.slow
@pytest.mark.parametrize("objective", EXPONENTS)
@pytest.mark.parametrize("capacity", [ONE_SEAT, Capacity(max_seqs=4, kv_tokens=100)])
@pytest.mark.parametrize("seed", range(3))
def test_the_index_is_the_formula(seed: int, capacity: Capacity, objective: Objective) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 30) for _ in range(12)]
    index = GittinsIndex(Exact(lengths), objective, capacity)
    prompt = 3  # the middle of its bin

    def taken(num_tokens: int) -> float:
        memory = (prompt * num_tokens + num_tokens**2 / 2) / capacity.kv_tokens
        return max(num_tokens / capacity.max_seqs, memory)

    longest = max(lengths)
    for extra, age in itertools.product((0.0, 0.05), range(longest)):
        for most in range(age + 1, longest + 1):
            expected = by_definition(lengths, objective, taken, extra, age, most)
            assert index.of(extra, prompt, age, most) == pytest.approx(expected)


@pytest.mark.parametrize("objective", EXPONENTS)
@pytest.mark.parametrize(("num_jobs", "longest"), [(1000, 32), (5000, 8), (60_000, 4)])
def test_jobs_that_outlived_all_others_keep_an_order(
    objective: Objective, num_jobs: int, longest: int
) -> None:
    """There the share of jobs that ran as long falls below rounding errors, and then to 0."""
    max_tokens = 32_768
    lengths = learned([1 + n % longest for n in range(num_jobs)], max_tokens)
    index = GittinsIndex(lengths, objective, ONE_SEAT)
    ages = range(2 * longest, max_tokens, 97)
    values = np.array([index.of(extra, 1, age, max_tokens) for extra in (0.0, 5.0) for age in ages])
    assert np.isfinite(values).all()
    assert (values > 0).all()
    # A job of any age is worth more if it is sure to end soon.
    for age in (100, 1000):
        assert index.of(0.0, 1, age, age + 1) > index.of(0.0, 1, age, max_tokens)


def test_a_known_length_is_shortest_remaining_time() -> None:
    index = GittinsIndex(Exact([20] * 5), "jct", ONE_SEAT)
    values = [index.of(0.0, 1, age, 20) for age in range(20)]
    assert values == sorted(values)
    assert values[15] == pytest.approx(1 / 5)


def test_with_a_falling_hazard_those_that_ran_least_come_first() -> None:
    """In this case the Gittins policy is least attained service, which MLFQ approximates."""
    lengths = Exact([1] * 50 + [2] * 20 + [4] * 10 + [16] * 5 + [64] * 5)
    index = GittinsIndex(lengths, "jct", ONE_SEAT)
    values = [index.of(0.0, 1, age, 64) for age in (0, 1, 2, 4)]
    assert values == sorted(values, reverse=True)


def test_worth_by_length_favours_young_jobs_more() -> None:
    lengths = list(range(1, 41))
    jct = GittinsIndex(Exact(lengths), "jct", ONE_SEAT)
    normalized = GittinsIndex(Exact(lengths), "normalized_latency", ONE_SEAT)
    assert jct.of(0.0, 1, 20, 40) > jct.of(0.0, 1, 0, 40)
    assert normalized.of(0.0, 1, 20, 40) < normalized.of(0.0, 1, 0, 40)


def test_what_it_takes_to_begin_lowers_the_index() -> None:
    index = GittinsIndex(learned([40] * 100), "jct", ONE_SEAT)
    values = [index.of(extra, 1, 0, MAX_TOKENS) for extra in (0.0, 2.0, 30.0, 1e3, 1e9)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1] > 0


def test_a_long_context_lowers_the_index_where_memory_is_scarcer_than_seats() -> None:
    lengths = learned([40] * 100)
    scarce, ample = (
        GittinsIndex(lengths, "jct", Capacity(16, kv_tokens)) for kv_tokens in (8_000, 8_000_000)
    )
    prompts = (10, 2000, 8000)
    by_memory = [scarce.of(0.0, prompt, 0, MAX_TOKENS) for prompt in prompts]
    assert by_memory == sorted(by_memory, reverse=True)
    assert by_memory[0] > 10 * by_memory[-1]
    by_seats = [ample.of(0.0, prompt, 0, MAX_TOKENS) for prompt in prompts]
    assert by_seats == pytest.approx([by_seats[0]] * 3)


# --- The policy -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "old_is_first"),
    [
        ([64] * 40, 40, True),  # the old job is near its end
        (([2] * 9 + [400]) * 8, 5, False),  # the old job is one of the few long ones
    ],
)
def test_a_running_job_makes_way_for_a_new_one_unless_it_is_about_to_end(
    lengths: list[int], num_tokens: int, old_is_first: bool
) -> None:
    gittins = policy()
    teach(gittins, lengths)
    old, new = make_job(0, 1), make_job(1, 1)
    gittins.add(old, 0.0)
    for _ in range(num_tokens):
        iterate(gittins, 0.0)
    gittins.add(new, 1.0)
    assert by_priority(gittins, [old, new]) == ([old, new] if old_is_first else [new, old])


def test_long_prompts_wait_for_short_ones() -> None:
    gittins = policy()
    long, short = make_job(0, 500), make_job(1, 3)
    for job in (long, short):
        gittins.add(job, 0.0)
    assert by_priority(gittins, [long, short]) == [short, long]


def test_max_tokens_bound_the_length() -> None:
    gittins = policy()
    teach(gittins, [300] * 20)
    whole, bounded = make_job(0, 1, max_tokens=400), make_job(1, 1, max_tokens=8)
    for job in (whole, bounded):
        gittins.add(job, 0.0)
    assert by_priority(gittins, [whole, bounded]) == [bounded, whole]


@pytest.mark.parametrize(
    ("reason", "counts"),
    [
        (FinishReason.STOP, True),
        (FinishReason.LENGTH, False),
        (FinishReason.CANCELLED, False),
        (FinishReason.ERROR, False),
    ],
)
def test_only_lengths_of_jobs_that_ended_by_themselves_count(
    reason: FinishReason, counts: bool
) -> None:
    gittins = policy()
    job = make_job(0, 1)
    gittins.add(job, 0.0)
    for _ in range(10):
        iterate(gittins, 0.0)
    finish(gittins, job, reason)
    assert gittins.num_learned == counts


def test_starved_jobs_have_their_turns_one_after_the_other() -> None:
    """For 30 s two long prompts wait behind an endless row of short jobs."""
    gittins = policy(starvation_s=30.0)
    teach(gittins, [400] * 20)
    short = make_job(0, 1)
    gittins.add(short, 0.0)
    iterate(gittins, 0.0)
    starving = [make_job(1, 450, arrival_s=1.0), make_job(2, 450, arrival_s=2.0)]
    for job in starving:
        gittins.add(job, job.arrival_s)
    ran = [iterate(gittins, float(now))[0].number for now in range(1, 38)]
    assert ran[:30] == [0] * 30
    assert ran[30:] == [1, 0, 0, 0, 0, 0, 0]  # a first token ends a turn
    # First tokens get a tenth of the time, and this one took 450 s.
    assert iterate(gittins, 31.0 + 10 * 450)[0].number == 2
    assert gittins.num_promotions == 2


def test_a_job_that_starves_in_flight_but_does_not_run_is_promoted() -> None:
    gittins = policy(starvation_s=30.0)
    job = make_job(0, 400)
    gittins.add(job, 0.0)
    select(gittins, 0.0)
    select(gittins, 31.0, [0])
    select(gittins, 31.1)
    assert gittins.num_promotions == 1


def test_a_promoted_job_that_ends_makes_room_for_the_next() -> None:
    gittins = policy(starvation_s=90.0)
    first, second = make_job(0, 400), make_job(1, 400)
    for job in (first, second):
        gittins.add(job, 0.0)
    assert iterate(gittins, 90.0) == [first]
    gittins.remove(first)
    assert iterate(gittins, 91.0) == [second]
    assert gittins.num_promotions == 1
    select(gittins, 90.0 + 10 * 400)
    assert gittins.num_promotions == 2


def test_jobs_with_short_predictions_come_first() -> None:
    gittins = policy()
    long, unknown, short = (
        make_job(number, 1, predicted_tokens=predicted)
        for number, predicted in enumerate((300, None, 5))
    )
    for job in (long, unknown, short):
        gittins.add(job, 0.0)
    assert by_priority(gittins, [long, unknown, short])[0] is short
    assert by_priority(gittins, [long, short]) == [short, long]


def test_a_job_predicted_long_has_its_first_token_as_soon_as_without_a_prediction() -> None:
    gittins = policy()
    teach(gittins, [20] * 40)
    long, unknown = make_job(0, 1, predicted_tokens=400), make_job(1, 1)
    for job in (long, unknown):
        gittins.add(job, 0.0)
    assert gittins.next_run_estimate(0.0)(long)[0] == gittins.next_run_estimate(0.0)(unknown)[0]
    assert iterate(gittins, 0.0) == [long]
    assert by_priority(gittins, [long, unknown]) == [unknown, long]


def test_a_prediction_may_come_late() -> None:
    gittins = policy()
    early, late = make_job(0, 1, predicted_tokens=40), make_job(1, 1)
    for job in (early, late):
        gittins.add(job, 0.0)
    assert iterate(gittins, 0.0) == [early]
    late.predicted_tokens = 2
    gittins.on_predicted(late)
    assert by_priority(gittins, [early, late]) == [late, early]
    assert select(gittins, 1.0) == [(late, 1)]
    late.predicted_tokens = 300  # while the job is in flight
    gittins.on_predicted(late)
    run_iteration(late)
    gittins.on_iteration_finished([Scheduled(late, 1)], 2.0)
    assert by_priority(gittins, [early, late]) == [early, late]


def test_what_is_learned_of_a_class_changes_its_order_alone() -> None:
    """Jobs with a prediction of 20 tokens turn out to have 200."""
    gittins = policy()
    teach(gittins, [200] * 30, predicted_tokens=20)
    liar, honest = make_job(0, 1, predicted_tokens=20), make_job(1, 1, predicted_tokens=60)
    for job in (liar, honest):
        gittins.add(job, 0.0)
    assert by_priority(gittins, [liar, honest]) == [honest, liar]


def test_a_new_index_reaches_all_jobs_within_some_selections() -> None:
    gittins = policy()
    waiting = [make_job(number, 1 + number % 7) for number in range(300)]
    for job in waiting:
        gittins.add(job, 0.0)
    before = [gittins.next_run_estimate(0.0)(job) for job in waiting]
    short = make_job(1000, 1)
    gittins.add(short, 0.0)
    run_iteration(short)
    finish(gittins, short)
    for _ in range(300):
        select(gittins, 0.0)
    after = [gittins.next_run_estimate(0.0)(job) for job in waiting]
    assert all(old != new for old, new in zip(before, after, strict=True))
    assert after == [(gittins.key(job), job.number) for job in waiting]


def test_a_pending_token_that_a_job_turns_out_not_to_have_is_not_learned() -> None:
    gittins = policy()
    for number in range(40):
        job = make_job(number, 1)
        gittins.add(job, 0.0)
        for _ in range(2):
            iterate(gittins, 0.0)
        select(gittins, 0.0)
        job.on_sent(1)
        gittins.on_iteration_finished(
            [Scheduled(job, 1)], 0.0
        )  # the next step is sent before this step's token is known
        job.num_pending = 0  # a stop word in the second token
        finish(gittins, job)
    seen = learned([2] * 40)
    of_all = gittins._learned.of_all.lengths
    assert of_all.goes_on().tolist() == seen.goes_on().tolist()


def test_a_prefill_that_has_one_token_left_has_passed_no_length() -> None:
    gittins = policy()
    for number in range(10):
        job = make_job(number, 5)
        gittins.add(job, 0.0)
        for num_tokens in (4, 1):
            select(gittins, 0.0)
            run_iteration(job, num_tokens)
            gittins.on_iteration_finished([Scheduled(job, num_tokens)], 0.0)
        finish(gittins, job)
    assert (
        gittins._learned.of_all.lengths.goes_on().tolist() == learned([1] * 10).goes_on().tolist()
    )


def test_a_prefill_that_has_one_token_left_has_begun() -> None:
    """The policy still offers it when no new job can start."""
    gittins = policy()
    job, new = make_job(0, 5), make_job(1, 1)
    for one in (job, new):
        gittins.add(one, 0.0)
    select(gittins, 0.0)
    run_iteration(job, 4)
    gittins.on_iteration_finished([Scheduled(job, 4)], 1.0)
    walk = gittins.walk(1.0, ())
    walk.skip(Place.NOWHERE)
    assert list(walk) == [job]


def test_a_turn_is_as_old_as_its_session() -> None:
    gittins = policy()
    teach(gittins, [*range(1, 10), 40, 60] * 4)  # whoever has run long will run long
    old, new = make_job(0, 1), make_job(1, 1)
    old.session_tokens = 20
    for job in (old, new):
        gittins.add(job, 0.0)
    assert by_priority(gittins, [old, new]) == [new, old]
    iterate(gittins, 0.0)
    old.output_ids.extend([7] * (2 * MAX_TOKENS))  # a session may be longer than a job
    finish(gittins, old)
