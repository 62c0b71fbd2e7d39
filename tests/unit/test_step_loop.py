"""The step loop with modelled ranks on a virtual clock: events of jobs and their times."""

from __future__ import annotations

import pytest
from fastserve_backend.job import FinishReason, JobState
from fastserve_backend.job_trace import JobTrace, Period
from fastserve_backend.scheduler.base import BatchLimits
from jobs import make_job
from loop_driver import Rig
from policies import make_policy, one_job, skip_join


def test_one_job_from_arrival_to_end() -> None:
    rig = Rig(skip_join())
    job = make_job(0, 3, max_tokens=3)
    rig.loop.jobs.add(job)
    assert not rig.loop.is_idle
    assert (job.state, rig.pool.num_used) == (JobState.WAITING, 0)
    assert rig.run_cycle() == 3.0
    assert (job.state, job.num_computed, len(job.output_ids)) == (JobState.RUNNING, 3, 1)
    assert (job.first_scheduled_s, job.first_token_s, rig.loop.jobs.num_running) == (0.0, 3.0, 1)
    rig.run_cycle()
    assert job.num_computed == 4
    assert rig.run_cycle() == 5.0
    assert (job.state, job.last_token_s, job.executed_s) == (JobState.FINISHED, 5.0, 5.0)
    assert not rig.loop.is_idle  # its last token is not delivered yet
    assert rig.run_cycle() == 5.0
    assert rig.loop.is_idle
    assert rig.loop.jobs.num_running == 0
    assert rig.ends == [(0, FinishReason.LENGTH)]
    assert rig.delivery.num_tokens == {0: 3}
    assert rig.pool.num_used == 0
    assert rig.iterations_s == [3.0, 1.0, 1.0]
    counters = rig.counters
    assert (counters.prompt_tokens, counters.generation_tokens, counters.iterations) == (3, 3, 3)
    assert (counters.compute_s, counters.iteration_s, counters.between_s) == (5.0, 5.0, 0.0)
    assert (counters.preemptions, counters.recomputed_jobs, counters.peak_blocks) == (0, 0, 2)


def test_a_preempted_job_is_counted_once_and_only_its_own_iterations_are_executed() -> None:
    rig = Rig(skip_join())
    long, short = make_job(0, 8, max_tokens=3), make_job(1, 1, max_tokens=3, arrival_s=2.0)
    long.trace = JobTrace()
    rig.loop.jobs.add(long)
    assert rig.run_cycle() == 8.0
    rig.loop.jobs.add(short)
    rig.run_cycle()
    assert (long.state, short.state) == (JobState.PREEMPTED, JobState.RUNNING)
    rig.run()
    assert long.trace.periods == [Period("preemption", 8.0, 11.0, num_blocks=0)]
    assert [number for number, _ in rig.ends] == [1, 0]
    assert (long.num_preemptions, short.num_preemptions, rig.counters.preemptions) == (1, 0, 1)
    assert (long.executed_s, long.last_token_s) == (10.0, 13.0)
    assert (short.first_scheduled_s, short.executed_s, short.last_token_s) == (8.0, 3.0, 11.0)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_job_that_ends_sinks_no_further(max_tokens: int) -> None:
    rig = Rig(skip_join())
    jobs = [make_job(number, 4, max_tokens=max_tokens) for number in range(3)]
    for job in jobs:
        rig.loop.jobs.add(job)
    joined = jobs[0].queue_level
    rig.run()
    assert {job.queue_level for job in jobs} == {joined + max_tokens - 1}
    assert rig.loop.policy.num_demotions == 3 * (max_tokens - 1)


def test_a_prediction_that_comes_when_its_job_has_ended_came_too_late() -> None:
    rig = Rig(skip_join())
    rig.loop.jobs.add(make_job(0, 3, max_tokens=1))
    assert rig.loop.jobs.on_prediction(0, 5)
    rig.run_cycle()
    assert not rig.loop.jobs.on_prediction(0, 5)


def test_a_prediction_is_of_the_whole_answer() -> None:
    rig = Rig(skip_join())
    rest, over = make_job(0, 9, max_tokens=3), make_job(1, 9, max_tokens=3)
    rest.num_earlier, over.num_earlier = 4, 6
    for job in (rest, over):
        rig.loop.jobs.add(job)
        assert rig.loop.jobs.on_prediction(job.number, 5)
    assert (rest.predicted_tokens, over.predicted_tokens) == (1, 1)
    rig.loop.jobs.on_prediction(rest.number, 50)
    assert rest.predicted_tokens == 46
    rest.finish_reason = FinishReason.STOP
    assert not rest.ended_by_itself  # nothing is to be learned from a part


def test_an_end_of_sequence_token_ends_a_job_unless_it_is_ignored() -> None:
    rig = Rig(skip_join(), eos_token_ids=(5, 0))
    rig.run([make_job(0, 2, max_tokens=9)])
    assert rig.ends == [(0, FinishReason.STOP)]
    assert rig.delivery.num_tokens == {0: 1}


# --- Chunks -----------------------------------------------------------------------------------


def test_a_partial_prefill_advances_and_gives_no_token() -> None:
    rig = Rig(skip_join(BatchLimits(4, 100, prefill_chunk_tokens=4)))
    job, other = make_job(0, 10, max_tokens=2), make_job(1, 1, max_tokens=3)
    rig.loop.jobs.add(job)
    rig.loop.jobs.add(other)
    seen = []
    for _ in range(4):
        now = rig.run_cycle()
        seen.append((now, job.num_computed, len(job.output_ids), len(other.output_ids)))
    assert seen == [(4.0, 4, 0, 1), (8.0, 8, 0, 2), (10.0, 10, 1, 3), (11.0, 11, 2, 3)]
    assert (job.first_token_s, job.executed_s) == (10.0, 11.0)
    assert rig.executor.num_partial == 2
    rig.run()
    assert rig.delivery.num_tokens == {0: 2, 1: 3}
    assert rig.counters.generation_tokens == 5


# --- Memory -----------------------------------------------------------------------------------


def test_a_job_whose_blocks_were_taken_computes_them_again() -> None:
    rig = Rig(skip_join(), num_blocks=3)
    long, short = make_job(0, 8, max_tokens=3), make_job(1, 5, max_tokens=1, arrival_s=1.0)
    rig.loop.jobs.add(long)
    rig.run_cycle()
    assert rig.pool.num_held(0) == 2
    rig.loop.jobs.add(short)
    assert rig.run_cycle() == 13.0
    assert (rig.pool.num_held(0), long.num_computed) == (0, 0)
    assert (len(long.output_ids), long.state) == (1, JobState.PREEMPTED)
    assert rig.run_cycle() == 22.0  # its prompt and its token again, 9 s
    assert (long.num_computed, len(long.output_ids)) == (9, 2)
    rig.run()
    assert (long.executed_s, long.num_preemptions) == (18.0, 1)
    assert rig.counters.recomputed_jobs == 1
    assert rig.counters.peak_blocks == 3
    assert rig.delivery.num_tokens == {0: 3, 1: 1}


def test_a_job_without_memory_waits_and_keeps_its_place() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(4, 100)), num_blocks=3)
    jobs = [make_job(n, 8, max_tokens=2) for n in range(2)]
    for job in jobs:
        rig.loop.jobs.add(job)
    rig.run_cycle()
    assert [job.state for job in jobs] == [JobState.RUNNING, JobState.WAITING]
    rig.run()
    assert [number for number, _ in rig.ends] == [0, 1]
    assert jobs[1].first_scheduled_s == 9.0
    assert rig.counters.recomputed_jobs == 0


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("name", ["mlfq", "skip_join_mlfq"])
@pytest.mark.parametrize("chunk_tokens", [7, 10])
def test_promotions_and_chunks_do_not_stop_progress_when_memory_is_short(
    name: str, num_stages: int, chunk_tokens: int
) -> None:
    # Jobs starve while others run, and every promoted one takes the blocks of another: without a
    # place that lasts until a token, no prefill would ever be complete. Chunks of 10 leave a
    # single token for the last.
    limits = BatchLimits(1, 15, chunk_tokens)
    rig = Rig(
        make_policy(name, limits, starvation_s=20.0, longest=16.0),
        num_blocks=10,
        num_stages=num_stages,
    )
    rig.run([make_job(number, 21, max_tokens=8) for number in range(12)])
    assert rig.delivery.num_tokens == dict.fromkeys(range(12), 8)
    assert rig.counters.recomputed_jobs > 0


# --- Pipeline stages --------------------------------------------------------------------------


def test_the_first_stage_takes_the_next_batch_while_the_second_works() -> None:
    rig = Rig(make_policy("fcfs", one_job()), num_stages=2)
    jobs = [make_job(n, 4, max_tokens=2) for n in range(2)]
    for job in jobs:
        rig.loop.jobs.add(job)
    assert rig.run_cycle() == 2.0  # the first stage is free, no result yet
    assert [job.state for job in jobs] == [JobState.RUNNING, JobState.WAITING]
    assert rig.run_cycle() == 4.0
    assert jobs[1].first_scheduled_s == 2.0
    assert rig.loop.jobs.num_running == 2
    assert [len(job.output_ids) for job in jobs] == [1, 0]
    rig.run()
    # Both jobs run at once: prefills of 4 s and decodes of 1 s, half of each in each stage.
    assert [(job.first_token_s, job.last_token_s) for job in jobs] == [(4.0, 6.5), (6.0, 7.0)]
    assert [job.num_preemptions for job in jobs] == [0, 0]
    assert rig.executor.most_unfinished == 2


def test_waiting_for_a_stage_counts_as_queueing() -> None:
    rig = Rig(make_policy("fcfs", one_job()), num_stages=2)
    long, short = make_job(0, 8, max_tokens=1), make_job(1, 1, max_tokens=2)
    rig.run([long, short])
    # The second stage takes its first batch at 8 s, which the first had done at 4.5 s.
    assert (short.first_token_s, short.last_token_s) == (8.5, 9.5)
    assert (long.executed_s, short.executed_s) == (8.0, 2.0)
    assert rig.iterations_s == [8.0, 1.0, 1.0]
    assert rig.counters.iteration_s == rig.counters.compute_s == 10.0


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_as_many_batches_as_stages_are_in_flight(num_stages: int) -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(2, 100)), num_stages=num_stages)
    rig.run([make_job(n, 1, max_tokens=20) for n in range(2 * num_stages)])
    assert rig.executor.most_unfinished == num_stages
    assert rig.counters.iterations == 20 * num_stages
    # Each batch of two has its token every second, one stage behind the other.
    assert rig.clock.now() == pytest.approx(20 + (num_stages - 1) / num_stages)


def test_no_more_batches_than_stages_are_in_flight_when_their_times_differ() -> None:
    rig = Rig(make_policy("fcfs", one_job()), num_stages=2)
    rig.run([make_job(0, 16, max_tokens=1)] + [make_job(n, 1, max_tokens=1) for n in range(1, 5)])
    assert rig.executor.most_unfinished <= 2


def test_a_wake_up_lets_an_arrival_enter_a_free_first_stage() -> None:
    rig = Rig(make_policy("fcfs", one_job()), num_stages=2)
    rig.loop.jobs.add(make_job(0, 8, max_tokens=1))
    assert rig.run_cycle() == 4.0
    late = make_job(1, 2, max_tokens=1, arrival_s=5.0)
    rig.executor.wake_s = 5.0
    assert rig.run_cycle() == 5.0
    assert rig.ends == []
    rig.loop.jobs.add(late)
    rig.executor.wake_s = 5.5  # the stage is busy until 6 s: the next arrival can only wait
    assert rig.run_cycle() == 6.0
    assert late.first_scheduled_s == 5.0
    rig.executor.wake_s = float("inf")
    assert rig.run_cycle() == 8.0
    rig.run()
    assert rig.ends == [(0, FinishReason.LENGTH), (1, FinishReason.LENGTH)]
    assert late.last_token_s == 9.0  # it enters the second stage when the first job has left it


# --- Ends -------------------------------------------------------------------------------------


def test_a_job_cancelled_in_flight_keeps_its_blocks_until_its_step_ends() -> None:
    rig = Rig(make_policy("fcfs", one_job()), num_stages=2, num_blocks=4)
    flying, waiting = make_job(0, 8, max_tokens=2), make_job(1, 12, max_tokens=2)
    rig.loop.jobs.add(flying)
    assert rig.run_cycle() == 4.0
    rig.loop.jobs.cancel(0)
    assert rig.ends == [(0, FinishReason.CANCELLED)]
    assert rig.delivery.closed == [(0, FinishReason.CANCELLED, None)]
    assert flying.state is JobState.FINISHED
    assert rig.pool.num_held(0) == 2
    rig.loop.jobs.add(waiting)
    rig.run_cycle()
    assert waiting.first_scheduled_s is None  # no memory yet
    assert rig.pool.num_used == 0  # its step has ended
    rig.run()
    assert rig.ends == [(0, FinishReason.CANCELLED), (1, FinishReason.LENGTH)]
    assert (flying.executed_s, len(flying.output_ids)) == (8.0, 0)
    assert waiting.first_scheduled_s == 8.0
    assert rig.delivery.num_tokens == {1: 2}


def test_a_waiting_or_preempted_job_is_cancelled_at_once() -> None:
    rig = Rig(skip_join())
    long, waiting, short = (make_job(n, size, max_tokens=99) for n, size in enumerate((8, 16, 1)))
    rig.loop.jobs.add(long)
    rig.run_cycle()
    rig.loop.jobs.add(waiting)
    rig.loop.jobs.add(short)
    rig.run_cycle()
    assert (long.state, waiting.state) == (JobState.PREEMPTED, JobState.WAITING)
    rig.loop.jobs.cancel(0)
    rig.loop.jobs.cancel(1)
    rig.loop.jobs.cancel(1)  # again: unknown by now
    rig.loop.jobs.cancel(77)
    assert rig.pool.num_held(0) == 0
    assert sum(rig.loop.policy.level_sizes()) == 1
    rig.loop.jobs.cancel_all()
    assert [number for number, _ in rig.ends] == [0, 1, 2]
    assert rig.pool.num_used == 0


def test_a_stop_word_found_while_the_next_step_runs_ends_the_job_after_it() -> None:
    rig = Rig(skip_join())
    job = make_job(0, 2, max_tokens=9)
    rig.delivery.stop_after[0] = 2
    rig.run([job])
    assert rig.ends == [(0, FinishReason.STOP)]
    assert len(job.output_ids) == 2  # the token of the third iteration is ignored
    assert rig.counters.iterations == 3
    assert rig.delivery.num_tokens == {0: 2}
    assert rig.pool.num_used == 0


def test_a_stop_word_in_the_last_token_allowed_is_why_the_job_ends() -> None:
    rig = Rig(skip_join())
    job = make_job(0, 2, max_tokens=2)
    rig.delivery.stop_after[0] = 2
    rig.run([job])
    assert rig.ends == [(0, FinishReason.STOP)]
    assert job.finish_reason is FinishReason.STOP


def test_a_job_has_ended_when_its_last_token_is_delivered() -> None:
    rig = Rig(skip_join())
    rig.loop.jobs.add(make_job(0, 2, max_tokens=1))
    rig.run_cycle()
    assert not rig.loop.jobs
    assert (rig.ends, rig.delivery.num_tokens) == ([], {})
    assert not rig.loop.is_idle
    rig.loop.jobs.cancel_all()
    assert (rig.ends, rig.delivery.num_tokens) == ([(0, FinishReason.LENGTH)], {0: 1})
    assert rig.delivery.closed == []


def test_failure_ends_also_a_job_whose_last_token_was_not_delivered() -> None:
    rig = Rig(skip_join())
    rig.loop.jobs.add(make_job(0, 2, max_tokens=1))
    rig.run_cycle()
    rig.loop.jobs.fail_all("internal error")
    assert rig.ends == [(0, FinishReason.ERROR)]
    assert rig.delivery.closed == [(0, FinishReason.ERROR, "internal error")]


def test_failure_ends_every_job_with_its_reason() -> None:
    rig = Rig(make_policy("fcfs", one_job()), num_stages=2)
    for number in range(3):
        rig.loop.jobs.add(make_job(number, 4, max_tokens=9))
    rig.run_cycle()
    rig.loop.jobs.fail_all("rank 0 died")
    assert rig.ends == [(number, FinishReason.ERROR) for number in range(3)]
    assert rig.delivery.closed == [(n, FinishReason.ERROR, "rank 0 died") for n in range(3)]
