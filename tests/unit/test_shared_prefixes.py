"""Concurrent jobs with equal beginnings: which job computes, which waits, and what they share."""

from __future__ import annotations

from array import array

import pytest
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.offers import OfferAnswer
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.scheduler.base import BatchLimits, fill_batch
from jobs import make_job
from kv_desk import SLOW_LINK, Desk
from loop_driver import BLOCK_SIZE, Rig
from policies import LinearTimes, Listed, make_policy, skip_join


def desk_of(num_blocks: int, num_host_blocks: int = 100, **kv_cache: object) -> Desk:
    return Desk(num_blocks, num_host_blocks, **{"prefix_caching": True} | kv_cache)  # type: ignore[arg-type]


def other_job(number: int, prompt_len: int) -> Job:
    """One that begins like no other."""
    job = make_job(number, prompt_len)
    first = 1000 * (number + 1)
    job.prompt_ids = array("i", range(first, first + prompt_len))
    return job


def in_part(job: Job, num_common: int) -> Job:
    """The job begins with so many tokens like others, and goes on like no other."""
    first = 1000 * (job.number + 1)
    own = range(first, first + len(job.prompt_ids) - num_common)
    job.prompt_ids = job.prompt_ids[:num_common] + array("i", own)
    return job


def table(desk: Desk, job: Job) -> list[int]:
    return list(desk.tiers.device.table(job.number))


def test_a_job_waits_for_its_beginning_and_refers_to_it() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 70), make_job(1, 50)
    desk.run_first(first, second)
    assert desk.offer(second) == [second]
    assert table(desk, second)[:3] == table(desk, first)[:3]
    assert (second.num_ready, second.num_uncomputed, desk.held(second)) == (48, 2, [4])
    assert desk.tiers.device.num_used == 5 + 1
    desk.send(second)
    assert second.num_computed == 50
    assert desk.counters.prefix_cached_tokens == 48


def test_many_jobs_behind_one_beginning_hold_it_once() -> None:
    desk = desk_of(10 + 8)
    jobs = [in_part(make_job(number, 161), 160) for number in range(8)]
    desk.run_first(*jobs)
    assert desk.offer(*jobs[1:]) == jobs[1:]
    assert (desk.tiers.device.num_used, desk.tiers.device.num_shared) == (10 + 8, 10)


def test_who_has_a_beginning_does_not_lose_it_with_the_job_that_computed_it() -> None:
    desk = desk_of(30)
    first, second, third = make_job(0, 70), make_job(1, 70), make_job(2, 70)
    desk.run_first(first, second)
    desk.run(second)
    desk.manager.release(first, desk.now)
    desk.tiers.device.grow(9, 16 * desk.tiers.device.num_free)  # nothing is left in the cache
    desk.tiers.device.release(9)
    desk.manager.on_arrival(third, desk.now)
    assert third.num_ready == 64
    assert desk.offer(third) == [third]
    assert table(desk, third)[:4] == table(desk, second)[:4]


def test_what_one_job_of_a_step_has_found_is_there_for_the_next() -> None:
    desk = desk_of(20)
    earlier, first, second = make_job(0, 65), make_job(1, 65), make_job(2, 65)
    desk.run(earlier)
    desk.manager.release(earlier, desk.now)
    desk.manager.on_arrival(first, desk.now)
    desk.manager.on_arrival(second, desk.now)
    assert (first.num_ready, second.num_ready) == (64, 64)
    assert desk.held(first, second) == [0, 0]  # no job has it before it runs
    assert desk.offer(first, second) == [first, second]
    assert desk.tiers.device.num_shared == 4


def test_a_job_waits_for_each_chunk_and_no_longer_than_it_is_computed() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 80), make_job(1, 80)
    assert desk.offer(first, second, tokens=32) == [first]
    desk.send(first, tokens=32)
    assert desk.offer(first, second, tokens=32) == [first]
    desk.send(first, tokens=32)
    assert desk.offer(second) == [second]  # the first has no turn
    assert (second.num_ready, second.num_uncomputed) == (64, 16)


def test_a_prefill_that_is_in_flight_is_waited_for_unless_it_has_ended() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 80), make_job(1, 80)
    assert desk.offer(first, tokens=32) == [first]
    desk.send(first, tokens=32)
    assert desk.offer(second, in_flight=[first]) == []
    first.finish_reason = FinishReason.CANCELLED
    assert desk.offer(second, in_flight=[first]) == [second]
    assert second.num_ready == 32


def test_little_in_common_is_used_but_not_waited_for() -> None:
    desk = desk_of(20, times=LinearTimes(1 / 16, least_s=1.0))  # one block in an iteration
    first, second = make_job(0, 17), make_job(1, 17)
    assert desk.offer(first, second) == [first, second]
    third = make_job(2, 40)
    desk.send(first, second)
    assert desk.offer(third) == [third]
    assert third.num_ready == 16


def test_a_step_that_is_not_sent_leaves_nothing_behind() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 64), make_job(1, 64)
    desk.run(first)
    for _ in range(2):
        assert desk.offer(second) == [second]
        assert (second.num_ready, desk.tiers.device.num_shared) == (48, 3)
    assert desk.counters.prefix_cached_tokens == 0
    desk.manager.release(first, desk.now)
    desk.manager.start_round(9.0, set())
    assert (second.num_ready, desk.held(first, second)) == (0, [0, 0])


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
def test_a_job_leaves_only_what_no_other_has(strategy: str) -> None:
    desk = desk_of(12, strategy=strategy)
    jobs = [in_part(make_job(number, 65), 64) for number in (2, 3)]
    urgent = other_job(0, 5 * 16)
    desk.run_first(*jobs)
    desk.run(jobs[1])
    assert desk.tiers.device.num_free == 12 - 6
    desk.run(other_job(1, 5 * 16))
    desk.starving.add(0)
    desk.offer(urgent)
    desk.end_copies()
    # Both leave, since one alone would free one block.
    assert desk.held(*jobs) == [0, 0]
    assert desk.offer(urgent) == [urgent]


def test_two_who_leave_together_free_what_both_have() -> None:
    desk = desk_of(8, strategy="recompute")
    jobs = [in_part(make_job(number, 65), 64) for number in (1, 2)]
    urgent = other_job(0, 8 * 16)
    desk.run_first(*jobs)
    desk.run(jobs[1])
    assert desk.offer(urgent) == [urgent]
    assert desk.held(*jobs) == [0, 0]


@pytest.mark.parametrize("strategy", ["reactive", "proactive"])
def test_a_beginning_crosses_the_link_once(strategy: str) -> None:
    desk = desk_of(7, strategy=strategy)
    first, second = (in_part(make_job(number, 65), 64) for number in (2, 1))
    desk.run_first(first, second)
    desk.run(second)
    before = desk.counters.swap_out_bytes
    desk.offer(other_job(5, 32))  # the first is in the way
    for job in (first, second):
        state = desk.round._state
        assert desk.manager._swapping.swap_out(job, state)
        desk.end_copies()
    assert (desk.counters.swap_out_bytes - before) // 100 == 5 + 1
    assert (desk.tiers.host.num_used, desk.tiers.host.num_shared) == (6, 4)
    # The device lost nothing yet: what is in its cache is not copied back.
    assert desk.offer(first) == []
    assert [len(one.device_blocks) for one in desk.begun] == [1]
    desk.end_copies()
    assert desk.offer(first) == [first]


def on_the_host_alone(desk: Desk) -> Job:
    """A job of 64 tokens that was swapped out, and of which nothing is left on the device."""
    job, other = make_job(1, 64), other_job(7, 16 * desk.tiers.device.num_blocks)
    desk.run(job)
    desk.offer(other)
    desk.end_copies()
    desk.run(other)
    desk.manager.release(other, desk.now)
    assert desk.tiers.is_swapped_out(1)
    return job


@pytest.mark.parametrize("strategy", ["reactive", "proactive"])
def test_a_new_job_begins_with_what_the_host_has(strategy: str) -> None:
    desk = desk_of(12, strategy=strategy)
    first = on_the_host_alone(desk)
    second = make_job(2, 64)
    desk.manager.on_arrival(second, desk.now)
    assert desk.offer(second) == []
    assert desk.kinds() == [(2, "swap_in")]
    assert len(desk.begun[0].device_blocks) == 3
    desk.end_copies()
    assert desk.offer(second) == [second]
    assert (second.num_computed, second.num_uncomputed) == (48, 16)
    assert desk.counters.prefix_cached_tokens == 48
    desk.send(second)
    assert desk.offer(first) == [first]  # all of its KV is on the device again
    assert (desk.begun, desk.tiers.device.num_shared) == ([], 4)


def test_a_new_job_computes_what_takes_longer_to_copy() -> None:
    desk = desk_of(12, strategy="reactive")
    on_the_host_alone(desk)
    for is_out in (True, False):
        for _ in range(200):
            desk.manager._costs.link.observe(is_out, 1, 1000.0)
    second = make_job(2, 64)
    assert desk.offer(second) == [second]
    assert second.num_uncomputed == 64


def test_no_job_leaves_for_what_a_new_one_would_copy() -> None:
    desk = desk_of(12)
    on_the_host_alone(desk)
    other = other_job(3, 9 * 16)
    desk.run(other)
    second = make_job(4, 64)
    desk.offer(second, in_flight=[other])
    assert (desk.begun, second.num_computed) == ([], 0)


def test_a_new_job_whose_copy_fails_computes_its_beginning() -> None:
    desk = desk_of(12)
    on_the_host_alone(desk)
    second = make_job(2, 64)
    desk.offer(second)
    desk.end_copies(succeeded=False)
    assert second.num_computed == 0
    assert desk.offer(second) == [second]


def test_a_job_of_which_the_device_has_all_is_back_at_once() -> None:
    desk = desk_of(9)
    job = make_job(1, 64)
    desk.run(job)
    desk.offer()
    assert desk.manager._swapping.swap_out(job, desk.round._state)
    desk.end_copies()
    assert desk.tiers.is_swapped_out(1)
    assert desk.offer(job) == [job]
    assert (desk.begun, desk.held(job)) == ([], [5])


@pytest.mark.parametrize("host_dtype", ["same", "int8"])
def test_what_a_job_brings_back_is_found_if_it_is_as_it_was(host_dtype: str) -> None:
    desk = desk_of(5, host_dtype=host_dtype)
    first, urgent, second = make_job(1, 60), other_job(0, 80), make_job(2, 40)
    desk.run(first)
    desk.offer(urgent)
    assert desk.kinds() == [(1, "swap_out")]
    desk.end_copies()
    assert desk.offer(urgent) == [urgent]  # overwrites what the first has left
    desk.send(urgent)
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 0
    desk.manager.release(urgent, desk.now)
    desk.offer(first)
    assert desk.kinds() == [(1, "swap_in")]
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 0
    desk.end_copies()
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == (32 if host_dtype == "same" else 0)


def test_a_job_that_lost_its_kv_finds_what_is_left() -> None:
    desk = desk_of(5, link=SLOW_LINK)
    source, urgent, second = make_job(1, 60), other_job(0, 60), make_job(2, 40)
    desk.run(source)
    desk.starving.add(0)
    assert desk.offer(urgent) == [urgent]
    assert source.num_computed == 0
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 16


def test_nobody_finds_what_a_failed_job_has_computed() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 64), make_job(1, 64)
    desk.run(first)
    first.finish_reason = FinishReason.ERROR
    desk.manager.release(first, desk.now)
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 0


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
def test_the_blocks_that_a_waiting_job_needs_beside_its_beginning_stay_free(strategy: str) -> None:
    desk = desk_of(6, strategy=strategy)
    first, second, least = make_job(0, 63), make_job(1, 64), other_job(2, 31)
    desk.run_first(first, second, least)
    assert desk.offer(second) == [second]
    assert (second.num_ready, desk.begun) == (48, [])


def test_a_job_that_could_not_run_then_does_not_wait() -> None:
    desk = desk_of(13, strategy="recompute")
    first, second, least = make_job(0, 64), make_job(1, 129), other_job(9, 127)
    desk.run(least)
    assert desk.offer(first, second, tokens=16) == [first, second]


def test_a_waiting_job_keeps_its_tokens_of_the_iteration() -> None:
    desk = desk_of(100)
    decode, first, second = other_job(3, 8), make_job(0, 40), make_job(1, 40)
    desk.run(decode)
    kv_round = desk.manager.start_round(9.0, set())
    jobs = [first, second, other_job(2, 40), decode]
    batch = fill_batch(Listed(jobs), BatchLimits(8, 100), set(), kv_round)
    assert batch == [(first, 40), (decode, 1)]


def test_of_those_who_wait_for_one_as_many_are_looked_at_as_have_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = desk_of(1000)
    offered: list[int] = []
    kv_round = desk.manager.start_round(1.0, set())
    offer = kv_round.offer

    def note(job: Job, num_tokens: int) -> OfferAnswer:
        offered.append(job.number)
        return offer(job, num_tokens)

    monkeypatch.setattr(kv_round, "offer", note)
    jobs = [make_job(number, 64) for number in range(1000)]
    batch = fill_batch(Listed(jobs), BatchLimits(8, 640), set(), kv_round)
    assert [job for job, _ in batch] == jobs[:1]
    assert offered == list(range(10))


@pytest.mark.parametrize("keys", [{"prefix_caching": False}, {"strategy": "defer"}])
def test_nothing_is_shared_where_it_is_not_wanted(keys: dict[str, object]) -> None:
    desk = desk_of(400, **keys)
    first, second, third = (make_job(number, 64, max_tokens=8) for number in range(3))
    desk.run(first, second)
    desk.manager.on_arrival(third, desk.now)
    assert desk.offer(third) == [third]
    assert (third.num_ready, desk.tiers.device.num_shared) == (0, 0)


# --- In the step loop -------------------------------------------------------------------------


def tokens_of(step: Step) -> int:
    return sum(array("i", step.query_lens))


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("chunk", [None, 7])
def test_of_jobs_that_come_together_one_computes_what_they_have_in_common(
    num_stages: int, ahead: bool, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    common, own = 6 * BLOCK_SIZE, 3
    policy = make_policy("fcfs", BatchLimits(8, 100, chunk))
    kv_cache = KVCacheSection(prefix_caching=True)
    rig = Rig(policy, num_blocks=200, num_stages=num_stages, ahead=ahead, kv_cache=kv_cache)
    steps: list[Step] = []
    submit = rig.executor.submit
    monkeypatch.setattr(rig.executor, "submit", lambda step: (steps.append(step), submit(step)))
    jobs = [make_job(number, common + own, max_tokens=4) for number in range(5)]
    for job in jobs[1:]:
        job.prompt_ids[common:] = array("i", (job.number * 100 + n for n in range(own)))
    rig.run(jobs)
    decodes = 5 * 3
    assert sum(map(tokens_of, steps)) == common + 5 * own + decodes
    assert rig.counters.prefix_cached_tokens == 4 * common
    assert rig.counters.preemptions == 0
    assert len(rig.iterations_s) == len(steps)
    assert rig.executor.most_sharing > 1
    assert rig.pool.num_used == 0


def test_a_job_queues_for_what_it_does_not_get_from_others() -> None:
    """Iterations take a second a token of prefill here, and quanta double from 1 s on."""
    policy = skip_join(BatchLimits(1, 100))
    rig = Rig(policy, kv_cache=KVCacheSection(prefix_caching=True))
    first, second = (make_job(n, 8 * BLOCK_SIZE + 1, max_tokens=3) for n in range(2))
    rig.loop.jobs.add(first)
    rig.run_cycle()
    rig.loop.jobs.add(second)
    assert (first.queue_level, second.queue_level) == (6, 0)
    rig.run()
    assert second.num_cached_tokens == 8 * BLOCK_SIZE
