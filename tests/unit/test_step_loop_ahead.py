"""The step loop sends the next step before the running one has ended: its jobs and its time."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from fastserve_backend.engine.steps_ahead import LEAD_S, LEAD_SHARE
from fastserve_backend.job import FinishReason, JobState
from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.rank_protocol.messages import NO_TOKEN, CopyResult, StepResult
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits, Scheduled
from fastserve_backend.scheduler.skip_join_mlfq import SkipJoinMLFQ
from jobs import make_job
from loop_driver import Rig, WatchedExecutor
from policies import TIMES, make_policy, one_job, quanta, skip_join

# How long before its end an iteration of 1 s decides the next one.
LEAD = LEAD_S + LEAD_SHARE


def fcfs(rig_limits: BatchLimits | None = None, *, num_blocks: int = 100, **options: object) -> Rig:
    policy = make_policy("fcfs", rig_limits or BatchLimits(4, 100))
    return Rig(policy, num_blocks=num_blocks, ahead=True, **options)  # type: ignore[arg-type]


def send_ahead(rig: Rig) -> None:
    """Sends the next step at once, however long the running one may still take."""
    rig.loop._run_next(behind=rig.loop._end_early())


def turn_until(rig: Rig, time_s: float) -> None:
    while rig.clock.now() < time_s:
        rig.run_cycle()


def test_a_job_is_sent_its_next_step_before_its_token_is_known() -> None:
    rig = fcfs()
    job = make_job(0, 3, max_tokens=4)
    rig.loop.jobs.add(job)
    assert rig.run_cycle() == pytest.approx(3 - LEAD_S - 3 * LEAD_SHARE)  # time to choose
    assert (job.num_pending, job.num_computed, len(job.output_ids)) == (1, 3, 0)
    assert rig.run_cycle() == 3.0
    assert (job.num_pending, job.num_computed, len(job.output_ids)) == (1, 4, 1)
    assert len(rig.executor.blocks_in_use) == 1
    assert rig.run_cycle() == pytest.approx(4 - LEAD)
    assert rig.run_cycle() == 4.0
    rig.run()
    assert rig.clock.now() == 6.0
    assert rig.ends == [(0, FinishReason.LENGTH)]
    assert rig.delivery.num_tokens == {0: 4}
    assert rig.iterations_s == [3.0, 1.0, 1.0, 1.0]
    assert (rig.executor.num_ahead, rig.counters.iterations, job.executed_s) == (3, 4, 6.0)
    assert (rig.counters.between_s, rig.counters.iteration_s) == (0.0, 6.0)
    assert job.num_preemptions == 0


def test_the_place_of_a_job_that_is_to_end_goes_to_the_next_at_once() -> None:
    rig = fcfs(one_job())
    ending, waiting = make_job(0, 2, max_tokens=2), make_job(1, 2, max_tokens=1)
    rig.run([ending, waiting])
    assert (ending.last_token_s, waiting.last_token_s) == (3.0, 5.0)
    assert waiting.first_scheduled_s == pytest.approx(3.0 - LEAD)
    assert (rig.counters.iterations, rig.executor.num_ahead) == (3, 2)


@pytest.mark.parametrize("name", ["fcfs", "skip_join_mlfq", "gittins", "speculative"])
def test_a_job_that_ends_by_itself_runs_one_token_too_many_that_nobody_sees(name: str) -> None:
    rig = Rig(make_policy(name, BatchLimits(4, 100)), ahead=True, eos_token_ids=(0,))
    job = make_job(0, 4, max_tokens=9)
    rig.loop.jobs.add(job)
    turn_until(rig, 4.0)
    assert job.finish_reason is FinishReason.STOP
    assert (len(job.output_ids), rig.pool.num_held(0)) == (1, 2)  # a step still writes there
    assert rig.loop.jobs.num_running == 0
    rig.run()
    assert rig.ends == [(0, FinishReason.STOP)]
    assert rig.loop.jobs.num_running == 0
    assert (rig.clock.now(), rig.counters.generation_tokens) == (5.0, 1)
    assert rig.delivery.num_tokens == {0: 1}
    assert rig.pool.num_used == 0
    assert sum(rig.loop.policy.level_sizes()) == 0


def test_who_arrives_before_the_choice_is_in_the_next_step_who_comes_later_in_the_one_after() -> (
    None
):
    for arrival_s, first_s in ((8 - LEAD_S - 0.9, 8.0), (8 - LEAD_S - 0.7, 9.0)):
        rig = Rig(skip_join(BatchLimits(1, 100)), ahead=True)
        long, short = make_job(0, 8, max_tokens=3), make_job(1, 1, max_tokens=2)
        short.arrival_s = arrival_s
        rig.run([long, short])
        assert short.first_token_s == first_s + 1
        assert (long.num_preemptions, rig.counters.preemptions) == (1, 1)


def test_a_preempted_job_waits_though_its_last_step_has_not_ended() -> None:
    rig = Rig(skip_join(BatchLimits(1, 100)), ahead=True)
    long, short = make_job(0, 8, max_tokens=3), make_job(1, 1, max_tokens=3)
    rig.loop.jobs.add(long)
    rig.run_cycle()
    rig.loop.jobs.add(short)
    rig.run_cycle()  # chooses
    assert rig.clock.now() == 8.0
    assert (long.state, short.state) == (JobState.PREEMPTED, JobState.RUNNING)
    assert (long.num_pending, len(long.output_ids)) == (0, 1)
    rig.run()
    assert [number for number, _ in rig.ends] == [1, 0]
    assert (long.executed_s, long.last_token_s) == (10.0, 13.0)


def test_chunks_of_a_prefill_follow_each_other() -> None:
    rig = fcfs(BatchLimits(4, 100, prefill_chunk_tokens=4))
    job, other = make_job(0, 10, max_tokens=2), make_job(1, 1, max_tokens=6)
    rig.run([job, other])
    assert (job.first_token_s, job.last_token_s) == (10.0, 11.0)
    assert rig.delivery.num_tokens == {0: 2, 1: 6}
    assert rig.executor.num_ahead == rig.counters.iterations - 1
    assert rig.executor.num_partial == 2


def test_steps_with_penalties_are_sent_ahead_too() -> None:
    rig = fcfs()
    job, other = make_job(0, 2, max_tokens=3), make_job(1, 2, max_tokens=6)
    job.params = SamplingParams(max_tokens=3, presence_penalty=0.5)
    rig.run([job, other])
    assert rig.delivery.num_tokens == {0: 3, 1: 6}
    assert (rig.counters.iterations, rig.executor.num_ahead) == (6, 5)


def test_a_step_that_ends_before_it_was_expected_to_is_followed_as_ever() -> None:
    rig = fcfs()
    rig.predict_s = lambda step: 100.0
    rig.run([make_job(0, 3, max_tokens=4)])
    assert (rig.clock.now(), rig.executor.num_ahead) == (6.0, 0)
    assert rig.delivery.num_tokens == {0: 4}


class Charged(SkipJoinMLFQ):
    """A policy that records the tokens charged to each job."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.tokens: Counter[int] = Counter()

    def on_iteration_finished(self, ran: Sequence[Scheduled], now: float) -> None:
        super().on_iteration_finished(ran, now)
        self.tokens.update({job.number: num_tokens for job, num_tokens in ran})


@pytest.mark.parametrize("num_blocks", [100, 8])  # with 8, some choices ahead are discarded
@pytest.mark.parametrize("share", [0.25, 1.0, 1.05])
def test_each_job_is_charged_once_for_all_its_tokens(num_blocks: int, share: float) -> None:
    policy = Charged(BatchLimits(3, 100), quanta(), TIMES)
    rig = Rig(policy, num_blocks=num_blocks, ahead=True)
    predict_s = rig.predict_s
    rig.predict_s = lambda step: share * predict_s(step)
    jobs = [make_job(number, 1 + 5 * (number % 3), max_tokens=12) for number in range(12)]
    for job in jobs:
        job.arrival_s = 2.5 * job.number
    ran: Counter[int] = Counter()
    last: dict[int, int] = {}  # charged with the step that ends the job, which is demoted no more
    send_step = rig.loop._work.send_step

    def noting(batch: list[Scheduled], *arguments: Any, **options: Any) -> None:
        ran.update({job.number: num_tokens for job, num_tokens in batch})
        last.update({job.number: num_tokens for job, num_tokens in batch})
        send_step(batch, *arguments, **options)

    rig.loop._work.send_step = noting
    rig.run(jobs)
    assert rig.counters.preemptions > 0
    num_alone = rig.counters.iterations - rig.executor.num_ahead
    assert num_alone > 10 if num_blocks < 100 else num_alone < 10
    for job in jobs:
        assert policy.tokens[job.number] == ran[job.number] - last[job.number]


def test_levels_are_those_of_steps_that_are_not_sent_ahead() -> None:
    def levels(ahead: bool, slower: float) -> list[int]:
        rig = Rig(skip_join(), ahead=ahead)
        predict_s = rig.predict_s
        rig.predict_s = lambda step: predict_s(step) / slower
        job = make_job(0, 1, max_tokens=30)
        rig.loop.jobs.add(job)
        seen = []
        while len(job.output_ids) < 29:
            rig.run_cycle()
            if len(seen) < len(job.output_ids):
                seen.append(job.queue_level)
        return seen

    # The last step counts only with its predicted remaining time.
    for slower in (1.0, 4.0):
        differ = sum(a != b for a, b in zip(levels(False, 1.0), levels(True, slower), strict=True))
        assert differ <= 4


def test_a_job_that_had_ended_was_not_preempted() -> None:
    rig = Rig(skip_join(BatchLimits(1, 100)), ahead=True, eos_token_ids=(0,))
    ending, short = make_job(0, 8, max_tokens=9), make_job(1, 1, max_tokens=2)
    short.arrival_s = 1.0
    rig.run([ending, short])
    assert (ending.last_token_s, short.last_token_s) == (8.0, 9.0)
    assert (ending.num_preemptions, rig.counters.preemptions) == (0, 0)


def test_the_jobs_of_the_latest_step_are_said_to_run() -> None:
    rig = fcfs(BatchLimits(2, 100))
    for number in range(6):
        rig.loop.jobs.add(make_job(number, 1, max_tokens=1 + number % 2))
    while not rig.loop.is_idle:
        rig.run_cycle()
        assert rig.loop.jobs.num_running <= 2
        if len(rig.loop.jobs) > 1:
            assert rig.loop.jobs.num_running == 2
    assert rig.loop.jobs.num_running == 0


# --- Memory -----------------------------------------------------------------------------------


def test_a_running_job_makes_room_for_a_more_urgent_one_when_its_step_has_ended() -> None:
    rig = Rig(skip_join(), num_blocks=3, ahead=True)
    long, short = make_job(0, 8, max_tokens=3), make_job(1, 5, max_tokens=1)
    rig.loop.jobs.add(long)
    rig.run_cycle()
    rig.loop.jobs.add(short)
    assert rig.run_cycle() == 8.0
    assert rig.executor.num_ahead == 0
    rig.run_cycle()
    assert (rig.pool.num_held(0), long.num_computed, long.state) == (0, 0, JobState.PREEMPTED)
    rig.run()
    assert (short.last_token_s, long.last_token_s) == (13.0, 23.0)
    assert rig.counters.recomputed_jobs == 1
    assert rig.loop.jobs.num_running == 0


def test_the_blocks_of_a_job_that_is_to_end_are_waited_for() -> None:
    rig = fcfs(num_blocks=4)
    jobs = [
        make_job(0, 8, max_tokens=1),
        make_job(1, 3, max_tokens=5),
        make_job(2, 8, max_tokens=1),
    ]
    rig.run(jobs)
    assert rig.counters.recomputed_jobs == 0
    # The job is chosen next to the decode that was sent while its blocks were in use.
    assert (jobs[0].last_token_s, jobs[2].last_token_s) == (11.0, 20.0)
    assert rig.executor.num_ahead == rig.counters.iterations - 1


def test_a_running_job_waits_for_the_blocks_of_an_ending_one_before_others_go_on() -> None:
    rig = fcfs(num_blocks=4)
    first, ending, last = (
        make_job(n, size, max_tokens=m) for n, size, m in ((0, 7, 3), (1, 3, 2), (2, 1, 4))
    )
    rig.run([first, ending, last])
    assert (ending.last_token_s, first.last_token_s, last.last_token_s) == (11.0, 12.0, 13.0)
    assert rig.counters.preemptions == rig.counters.recomputed_jobs == 0


# --- Ends -------------------------------------------------------------------------------------


def test_a_job_cancelled_with_two_steps_under_way_keeps_its_blocks_until_both_end() -> None:
    rig = fcfs()
    job = make_job(0, 4, max_tokens=9)
    rig.loop.jobs.add(job)
    rig.run_cycle()
    send_ahead(rig)
    rig.loop.jobs.cancel(0)
    assert rig.ends == [(0, FinishReason.CANCELLED)]
    assert rig.run_cycle() == 4.0
    assert rig.pool.num_held(0) == 2
    turn_until(rig, 5.0)
    assert (rig.pool.num_used, len(job.output_ids), sum(rig.loop.policy.level_sizes())) == (0, 0, 0)
    assert rig.loop.is_idle


class NaNRanks(WatchedExecutor):
    """Ranks whose second step returns NaN instead of a token."""

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        result = super().collect(timeout_s)
        if isinstance(result, StepResult) and result.step_id == 1:
            result.token_ids = array("i", [NO_TOKEN]).tobytes()
        return result


class NaNRig(Rig):
    def make_executor(self, model: LatencyModel, link: Link) -> WatchedExecutor:
        return NaNRanks(model, self.clock, link, self.ahead)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_job_without_a_token_fails_and_frees_its_blocks(ahead: bool) -> None:
    rig = NaNRig(make_policy("fcfs", one_job()), ahead=ahead)
    broken, later = make_job(0, 4, max_tokens=9), make_job(1, 4, max_tokens=2)
    rig.run([broken, later])
    assert rig.ends == [(0, FinishReason.ERROR), (1, FinishReason.LENGTH)]
    assert rig.delivery.num_tokens == {0: 1, 1: 2}
    ((number, _, error),) = rig.delivery.closed
    assert number == 0
    assert error is not None
    assert "NaN" in error
    assert rig.pool.num_used == 0


def test_when_the_ranks_are_lost_both_steps_are() -> None:
    rig = fcfs()
    jobs = [make_job(n, 4, max_tokens=3) for n in range(2)]
    for job in jobs:
        rig.loop.jobs.add(job)
    rig.run_cycle()
    assert [job.num_pending for job in jobs] == [1, 1]
    send_ahead(rig)
    assert [job.num_pending for job in jobs] == [2, 2]
    rig.loop.jobs.cancel(1)
    rig.loop.suspend(Rig(make_policy("fcfs", one_job())).loop.kv)
    assert (jobs[0].num_pending, jobs[0].num_computed, jobs[0].state) == (0, 0, JobState.PREEMPTED)
    assert sum(rig.loop.policy.level_sizes()) == 1
