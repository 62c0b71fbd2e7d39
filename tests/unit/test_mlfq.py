"""Naive and skip-join MLFQ: worked examples by hand (FastServe §4.1, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fastserve_backend.scheduler.base import BatchLimits, Scheduled, own_time_s
from fastserve_backend.scheduler.mlfq import MLFQ
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from jobs import make_job, run_iteration
from policies import TIMES, by_priority, iterate, mlfq, one_job, quanta, select, skip_join

Make = Callable[..., MLFQ]
BOTH = pytest.mark.parametrize("make", [mlfq, skip_join])


@BOTH
def test_quanta_double_until_they_cover_the_longest_prefill(make: Make) -> None:
    assert make(longest=10.0).quanta_s == (1, 2, 4, 8, 16)
    assert make(longest=8.0).quanta_s == (1, 2, 4, 8)


# --- Joining ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_len", [1, 5, 500])
def test_every_job_joins_q1_of_the_naive_queue(prompt_len: int) -> None:
    policy = mlfq()
    job = make_job(0, prompt_len)
    policy.add(job, 0.0)
    assert job.queue_level == 0


@pytest.mark.parametrize(
    ("prompt_len", "level"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (64, 6), (500, 6)]
)
def test_a_job_joins_the_highest_queue_whose_quantum_covers_its_prefill(
    prompt_len: int, level: int
) -> None:
    policy = skip_join()
    job = make_job(0, prompt_len)
    policy.add(job, 0.0)
    assert job.queue_level == level
    assert policy.level_sizes()[level] == 1


# --- Demotion ---------------------------------------------------------------------------------


def test_a_job_that_used_its_quantum_is_demoted_to_the_next_queue() -> None:
    policy = skip_join()
    job = make_job(0, 3)
    policy.add(job, 0.0)
    iterate(policy, 0.0, elapsed_s=3.0)
    assert job.queue_level == 2  # 3 of 4 s used: it keeps its place
    iterate(policy, 3.0)
    assert job.queue_level == 3
    for now in range(4, 11):
        iterate(policy, float(now))
    assert job.queue_level == 3  # 7 of 8 s: used time was reset by the demotion
    iterate(policy, 11.0)
    assert job.queue_level == 4
    assert policy.num_demotions == 2


def test_demotion_skips_queues_whose_quantum_the_next_iteration_does_not_fit() -> None:
    policy = skip_join()
    job = make_job(0, 2)
    policy.add(job, 0.0)
    assert job.queue_level == 1
    iterate(policy, 0.0, elapsed_s=2.0)
    assert job.queue_level == 2
    for now in range(2, 5):
        iterate(policy, float(now))
    job.output_ids.extend([0] * 26)
    job.num_computed = 0  # its KV was dropped: it is computed again but for the last token
    run_iteration(job, 1)
    policy.on_iteration_finished([Scheduled(job, 1)], 6.0)
    assert job.queue_level == 5
    assert policy.num_demotions == 2


def test_a_job_pays_for_its_own_tokens_alone() -> None:
    """A decode beside a prefill of 16 s uses 1 s of its quantum."""
    policy = skip_join(BatchLimits(max_seqs=2, max_tokens=100))
    decodes, prefills = make_job(0, 3), make_job(1, 16)
    policy.add(decodes, 0.0)
    iterate(policy, 0.0)
    iterate(policy, 3.0)
    assert decodes.queue_level == 3
    policy.add(prefills, 4.0)
    for now in range(4, 11):
        assert iterate(policy, float(now), elapsed_s=17.0) == [decodes, prefills]
    assert decodes.queue_level == 3  # 7 of 8 s
    assert prefills.queue_level == 5
    iterate(policy, 11.0)
    assert decodes.queue_level == 4


def test_chunks_cost_what_the_whole_prefill_does() -> None:
    whole, chunked = make_job(0, 8), make_job(1, 8)
    run_iteration(whole)
    chunks = []
    for num_tokens in (3, 1, 4):
        run_iteration(chunked, num_tokens)
        chunks.append(own_time_s(chunked, num_tokens, TIMES))
    assert own_time_s(whole, 8, TIMES) == sum(chunks) == 8.0


def test_the_naive_queue_demotes_one_level_at_a_time() -> None:
    policy = mlfq()
    job = make_job(0, 32)
    policy.add(job, 0.0)
    iterate(policy, 0.0, elapsed_s=32.0)  # its prefill used the quanta of Q1 to Q5
    assert job.queue_level == 1
    iterate(policy, 32.0)
    assert job.queue_level == 1  # 1 of 2 s
    iterate(policy, 33.0)
    assert job.queue_level == 2


def test_a_chunked_prefill_uses_up_a_quantum_over_several_iterations() -> None:
    policy = skip_join(BatchLimits(max_seqs=1, max_tokens=100, prefill_chunk_tokens=3))
    job = make_job(0, 8)
    policy.add(job, 0.0)
    assert job.queue_level == 3  # that of the whole prefill
    for now in (0.0, 3.0):
        iterate(policy, now, elapsed_s=3.0)
    assert (job.num_computed, len(job.output_ids), job.queue_level) == (6, 0, 3)
    iterate(policy, 6.0, elapsed_s=2.0)
    assert (job.num_computed, len(job.output_ids), job.queue_level) == (8, 1, 4)


def test_a_job_does_not_sink_before_the_last_chunk_of_its_prefill_gave_a_token() -> None:
    policy = mlfq(BatchLimits(max_seqs=1, max_tokens=100, prefill_chunk_tokens=4))
    job = make_job(0, 9)
    policy.add(job, 0.0)
    for now in (0.0, 4.0):  # far over the quantum of 1 s; then a single token is left
        iterate(policy, now, elapsed_s=4.0)
        assert job.queue_level == 0
    iterate(policy, 8.0)
    assert (len(job.output_ids), job.queue_level) == (1, 1)


def test_the_last_queue_keeps_its_jobs_in_order() -> None:
    policy = skip_join(longest=1.0)  # one queue only
    jobs = [make_job(n, 1) for n in range(3)]
    for job in jobs:
        policy.add(job, 0.0)
    for now in range(5):
        assert iterate(policy, float(now)) == [jobs[0]]
    assert policy.num_demotions == 0


# --- Order ------------------------------------------------------------------------------------


def test_a_short_newcomer_overtakes_a_long_running_job() -> None:
    policy = skip_join()
    long, short = make_job(0, 8), make_job(1, 1)
    policy.add(long, 0.0)
    assert iterate(policy, 0.0, elapsed_s=8.0) == [long]
    policy.add(short, 8.0)
    assert iterate(policy, 8.0) == [short]
    assert iterate(policy, 9.0) == [short]  # demoted to level 1, still above
    assert iterate(policy, 10.0) == [short]


def test_the_naive_queue_lets_a_long_prefill_run_before_a_short_newcomer() -> None:
    policy = mlfq()
    long, short = make_job(0, 8), make_job(1, 1)
    for job in (long, short):
        policy.add(job, 0.0)
    assert iterate(policy, 0.0, elapsed_s=8.0) == [long]
    assert iterate(policy, 8.0) == [short]


@pytest.mark.parametrize("kind", [MLFQ, SkipJoinMLFQ])
def test_fifo_within_a_level(kind: type[MLFQ]) -> None:
    policy = kind(BatchLimits(2, 1000), quanta(base_s=lambda: 8.0), TIMES)
    jobs = [make_job(n, 4) for n in range(4)]
    for job in jobs:
        policy.add(job, 0.0)
    assert iterate(policy, 0.0, elapsed_s=0.5) == jobs[:2]
    assert iterate(policy, 1.0, elapsed_s=0.25) == jobs[:2]  # quantum not used up: same places


@BOTH
def test_demoted_jobs_stand_behind_those_already_in_the_queue(make: Make) -> None:
    policy = make()
    first, second, third = (make_job(n, 1) for n in range(3))
    policy.add(first, 0.0)
    policy.add(second, 0.0)
    assert iterate(policy, 0.0) == [first]
    assert iterate(policy, 1.0) == [second]
    policy.add(third, 2.0)
    assert iterate(policy, 2.0) == [third]
    assert by_priority(policy, [third, second, first]) == [first, second, third]
    assert list(policy.level_sizes())[:2] == [0, 3]
    assert iterate(policy, 3.0) == [first]


# --- Promotion --------------------------------------------------------------------------------


@BOTH
def test_promotion_comes_exactly_at_the_threshold(make: Make) -> None:
    policy = make(starvation_s=10.0)
    job = make_job(0, 1)
    policy.add(job, 0.0)
    iterate(policy, 0.0)
    assert job.queue_level == 1  # it has not run since 1 s
    policy.add(make_job(1, 1), 1.0)
    select(policy, 10.9)
    assert (job.queue_level, policy.num_promotions) == (1, 0)
    policy.add(make_job(2, 1), 11.0)
    assert [scheduled.job.number for scheduled in select(policy, 11.0, [1])] == [0]
    assert (job.queue_level, policy.num_promotions) == (0, 1)


def test_a_job_that_never_ran_counts_its_waiting_from_arrival() -> None:
    policy = skip_join(starvation_s=10.0)
    long = make_job(0, 32)
    policy.add(long, 5.0)
    for now in range(5, 15):  # short jobs keep it waiting
        policy.add(make_job(now, 1), float(now))
        assert long not in iterate(policy, float(now), elapsed_s=0.5)
    assert long.queue_level == 5
    policy.add(make_job(99, 1), 15.0)
    iterate(policy, 15.0, elapsed_s=0.5)
    assert long.queue_level == 0
    assert policy.num_promotions == 1


def test_a_promoted_job_with_a_token_comes_before_those_in_q1_for_the_threshold() -> None:
    policy = skip_join(starvation_s=10.0)
    long, stream = make_job(0, 8), make_job(1, 1)
    policy.add(long, 0.0)
    assert iterate(policy, 0.0) == [long]  # its first token
    for now in range(1, 11):
        policy.add(stream := make_job(now, 1), float(now))
        assert iterate(policy, float(now)) == [stream]
    for now in range(11, 21):  # however short the quantum of Q1
        policy.add(make_job(100 + now, 1), float(now))
        assert iterate(policy, float(now)) == [long]
        assert long.queue_level == 0
    assert by_priority(policy, [stream, long])[0] is long
    assert iterate(policy, 21.0) != [long]
    assert long.queue_level == 1  # it has used more than the quantum of Q1


def test_a_turn_lasts_until_there_is_a_token() -> None:
    limits = BatchLimits(max_seqs=1, max_tokens=100, prefill_chunk_tokens=8)
    policy = skip_join(limits, starvation_s=30.0)
    long = make_job(0, 32)
    policy.add(long, 0.0)
    for now in (30.0, 40.0, 50.0, 60.0):
        policy.add(make_job(int(now), 1), now)
        assert iterate(policy, now, elapsed_s=10.0) == [long]
    assert long.num_outputs == 1
    assert iterate(policy, 70.0) != [long]


def test_starved_jobs_have_their_turns_one_after_the_other() -> None:
    policy = skip_join(starvation_s=30.0)
    first, second = make_job(0, 8), make_job(1, 8)
    policy.add(first, 0.0)
    policy.add(second, 0.0)
    key = policy.next_run_estimate(25.0)
    assert (key(first)[0], key(second)[0]) == (0.0, 0.0)  # nobody is before them
    policy.add(make_job(2, 1), 29.5)
    assert iterate(policy, 30.0)[0] is first
    assert second not in iterate(policy, 109.0)  # first tokens get a tenth of the time
    assert iterate(policy, 110.0)[0] is second
    assert policy.num_promotions == 2


def test_only_the_next_turn_counts_for_when_a_job_runs() -> None:
    policy = skip_join(starvation_s=30.0)
    first, second = make_job(0, 32), make_job(1, 32)
    policy.add(first, 0.0)
    policy.add(second, 0.0)
    for number in range(2, 12):  # each has a quantum of 1 s, 2 s, … to run before those two
        policy.add(make_job(number, 1), 25.0)
    key = policy.next_run_estimate(28.0)
    assert key(first)[0] == 2.0
    assert key(second)[0] > 100.0
    select(policy, 30.0)  # the first has its turn
    assert policy.next_run_estimate(31.0)(first)[0] == 0.0
    assert (
        policy.next_run_estimate(31.0)(second)[0] == 319.0
    )  # ten times the prefill of the first, less 1


def test_after_its_turn_a_job_that_cannot_sink_goes_behind_the_others() -> None:
    policy = skip_join(starvation_s=30.0, longest=1.0)
    assert len(policy.quanta_s) == 1
    jobs = [make_job(number, 1) for number in range(4)]
    for job in jobs:
        policy.add(job, 0.0)
    ran = [iterate(policy, float(now))[0].number for now in range(60)]
    # A first token ends a turn, and the next one begins 10 s after it.
    assert ran == 30 * [0] + [1] + 9 * [0] + [2] + 9 * [0] + [3] + 9 * [0]


def test_a_job_that_starves_in_q1_has_a_turn_too() -> None:
    policy = skip_join(starvation_s=30.0)
    first, second = make_job(0, 1), make_job(1, 1)
    policy.add(first, 0.0)
    policy.add(second, 0.0)
    assert iterate(policy, 100.0) == [first]
    assert iterate(policy, 110.0) == [second]
    assert policy.num_promotions == 2


def test_a_job_in_flight_is_not_promoted() -> None:
    policy = skip_join(starvation_s=3.0)
    long, other = make_job(0, 8), make_job(1, 16)
    policy.add(long, 0.0)
    policy.add(other, 90.0)
    assert [scheduled.job for scheduled in select(policy, 0.0)] == [long]
    select(policy, 91.0, [0])
    assert long.queue_level == 3
    run_iteration(long)
    policy.on_iteration_finished([Scheduled(long, 8)], 95.0)
    assert (long.queue_level, policy.num_promotions) == (4, 0)
    policy.remove(other)
    select(policy, 97.9)
    assert long.queue_level == 4  # it waits since 95 s
    select(policy, 98.0)
    assert (long.queue_level, policy.num_promotions) == (0, 1)


def test_a_job_that_starves_in_flight_but_does_not_run_is_promoted() -> None:
    policy = skip_join(starvation_s=3.0)
    long, other = make_job(0, 8), make_job(1, 16)
    policy.add(long, 0.0)
    policy.add(other, 90.0)
    select(policy, 0.0)
    select(policy, 91.0, [0])
    select(policy, 91.1)
    assert (long.queue_level, policy.num_promotions) == (0, 1)


# --- Drift ------------------------------------------------------------------------------------


@pytest.mark.parametrize("skips", [False, True])
def test_recalibration_changes_quanta_and_keeps_the_places_of_jobs(skips: bool) -> None:
    base = [1.0]
    from_base = quanta(longest=8.0, base_s=lambda: base[0])
    policy = (SkipJoinMLFQ if skips else MLFQ)(one_job(), from_base, TIMES)
    jobs = [make_job(n, 1) for n in range(3)]
    for job in jobs:
        policy.add(job, 0.0)
    iterate(policy, 0.0)
    order = by_priority(policy, jobs)
    base[0] = 3.0
    assert policy.quanta_s == (1, 2, 4, 8)
    policy.recalibrate()
    assert policy.quanta_s == (3, 6, 12, 24)
    assert by_priority(policy, jobs) == order
    assert [job.queue_level for job in jobs] == [1, 0, 0]
    for now in (1.0, 2.0):
        assert iterate(policy, now) == [jobs[1]]
        assert jobs[1].queue_level == 0  # 1, then 2 of 3 s
    assert iterate(policy, 3.0) == [jobs[1]]
    assert jobs[1].queue_level == 1


# --- ENST -------------------------------------------------------------------------------------


def test_enst_is_the_time_until_all_above_have_sunk_to_the_queue_of_a_job() -> None:
    # FastServe §4.2. Quanta 1, 2, 4, …; the jobs stand in Q1, Q1, Q2 and Q3.
    policy = skip_join(BatchLimits(max_seqs=2, max_tokens=100))
    first, second, middle, last = (make_job(n, size) for n, size in enumerate((1, 1, 2, 4)))
    for job in (last, second, middle, first):
        policy.add(job, 0.0)
    assert [job.queue_level for job in (first, middle, last)] == [0, 1, 2]
    enst = policy.next_run_estimate(0.0)
    assert enst(first)[0] == enst(second)[0] == 0.0
    assert enst(second) < enst(first)  # FIFO
    # Two jobs run the quantum of Q1; then those and the middle one that of Q2; two at a time.
    assert enst(middle)[0] == 2 * 1 / 2
    assert enst(last)[0] == (2 * 1 + 3 * 2) / 2


def test_enst_of_a_job_that_starves_soon_is_the_time_until_then() -> None:
    policy = skip_join(starvation_s=10.0)
    last = make_job(0, 8)
    policy.add(last, 0.0)
    for number in range(1, 6):
        policy.add(make_job(number, 1), 7.0)
    enst = policy.next_run_estimate(7.0)
    assert enst(last)[0] == 3.0
    assert policy.next_run_estimate(12.0)(last)[0] == 0.0


def test_a_turn_joins_the_queue_to_which_its_session_has_sunk() -> None:
    policy = skip_join()  # quanta of 1, 2, 4, … s
    for number, (session_s, level) in enumerate([(0.0, 1), (2.9, 1), (3.0, 2), (7.0, 3), (1e9, 6)]):
        job = make_job(number, 2)
        job.session_s = session_s
        policy.add(job, 0.0)
        assert job.queue_level == level
