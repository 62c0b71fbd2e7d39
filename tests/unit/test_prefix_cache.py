"""What ended jobs leave in the cache, which jobs find it, and when it is lost."""

from __future__ import annotations

from array import array

import pytest
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.prefix_keys import PrefixKeys
from fastserve_backend.scheduler.base import BatchLimits, fill_batch
from jobs import make_job, run_iteration
from kv_desk import Desk
from loop_driver import BLOCK_SIZE, Rig
from policies import Listed, make_policy, skip_join


def keys_of(tokens: list[int], block_size: int = 4) -> list[bytes]:
    job = make_job(0, 0)
    job.prompt_ids, job.num_computed = array("i", tokens), len(tokens)
    return list(PrefixKeys(KVCacheSection(), block_size).held(job))


def test_a_key_is_of_a_full_block_and_of_all_before_it() -> None:
    keys = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(set(keys)) == 2
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 8]) == keys
    assert keys_of([1, 2, 3]) == []
    assert keys_of([1, 2, 3, 4, 5, 6, 7, 0])[0] == keys[0]
    others = [[0, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 0]]
    assert not set(keys[1:]) & {key for tokens in others for key in keys_of(tokens)}


# --- Jobs of the KV manager -------------------------------------------------------------------


def desk_of(num_blocks: int, num_host_blocks: int = 100, **kv_cache: object) -> Desk:
    return Desk(num_blocks, num_host_blocks, **{"prefix_caching": True} | kv_cache)  # type: ignore[arg-type]


def end(desk: Desk, job: Job, reason: FinishReason = FinishReason.STOP) -> None:
    job.finish_reason = reason
    desk.manager.release(job, desk.now)


def arrive(desk: Desk, number: int, prompt_len: int) -> Job:
    job = make_job(number, prompt_len)
    desk.manager.on_arrival(job, desk.now)
    return job


def test_a_job_begins_behind_what_was_kept_and_computes_one_token_at_least() -> None:
    desk = desk_of(10)
    first = make_job(0, 64)
    desk.run(first)
    end(desk, first)
    second, third = arrive(desk, 1, 64), arrive(desk, 2, 80)
    assert (second.num_ready, third.num_ready) == (48, 64)
    assert desk.held(second, third) == [0, 0]  # they only know of the blocks
    assert desk.counters.prefix_cached_tokens == 0
    assert desk.offer(second) == [second]
    assert (second.num_ready, desk.held(second)) == (48, [4])
    desk.send(second)
    assert (desk.counters.prefix_cached_tokens, desk.counters.recomputed_jobs) == (48, 0)


def test_a_conversation_goes_on_behind_its_last_answer() -> None:
    desk = desk_of(10)
    first = make_job(0, 30)
    desk.run(first)
    for _ in range(8):
        desk.run(first)
    assert first.num_computed == 38
    end(desk, first)
    second = make_job(1, 0)
    second.prompt_ids = first.prompt_ids + first.output_ids + array("i", [1, 2])
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 32


def test_a_job_that_waited_finds_what_was_kept_meanwhile() -> None:
    desk = desk_of(10)
    first, second = make_job(0, 40), arrive(desk, 1, 40)
    desk.run(first)
    assert second.num_ready == 0
    end(desk, first)
    desk.round.find_prefix(second)
    assert second.num_ready == 32
    assert desk.offer(second) == [second]


def hostage_of(desk: Desk) -> Job:
    """A waiting job whose first 64 tokens are kept."""
    first = make_job(0, 65)
    desk.run(first)
    end(desk, first)
    return arrive(desk, 5, 65)


def test_a_job_that_waits_keeps_nothing_from_a_more_urgent_one() -> None:
    desk = desk_of(10, write_back=True)
    waiting = hostage_of(desk)
    urgent = arrive(desk, 1, 65)
    for _ in range(20):  # its blocks are neither copied ahead nor to fill the reserve
        desk.offer()
        assert desk.begun == []
    assert desk.offer(urgent) == [urgent]
    assert (urgent.num_ready, desk.held(waiting)) == (64, [0])
    desk.send(urgent)
    assert desk.offer(waiting) == [waiting]  # both have it now
    assert (waiting.num_ready, desk.tiers.device.num_shared) == (64, 4)


def test_a_job_that_was_looked_at_in_vain_has_nothing() -> None:
    desk = desk_of(10)
    waiting = hostage_of(desk)
    kv_round = desk.manager.start_round(1.0, ())
    kv_round.find_prefix(waiting)  # and then it gets no tokens in the batch
    assert (waiting.num_ready, desk.held(waiting)) == (64, [0])


def test_of_three_jobs_with_one_beginning_the_most_urgent_has_it_first() -> None:
    desk = desk_of(20)
    jobs = [hostage_of(desk), arrive(desk, 3, 65), arrive(desk, 1, 65)]
    for job in reversed(jobs):  # each in its own round: no later one has to compute it
        assert desk.offer(job) == [job]
        assert job.num_uncomputed == 1
        desk.send(job)
        desk.manager.on_step_finished()


def test_where_memory_is_short_kept_blocks_go_first_and_what_is_left_is_found() -> None:
    desk = desk_of(6)
    waiting = hostage_of(desk)
    other = make_job(1, 49)
    other.prompt_ids = array("i", range(500, 549))
    assert desk.offer(other) == [other]
    desk.send(other)
    desk.round.find_prefix(waiting)
    assert waiting.num_ready == 32  # four blocks had to go, of which two kept nothing


def test_a_job_that_computes_again_goes_on_from_what_is_left_of_it() -> None:
    desk = desk_of(4, 0, strategy="recompute")
    urgent, least = make_job(0, 20), make_job(1, 60)
    urgent.prompt_ids = array("i", range(500, 520))
    desk.run(least)
    assert desk.offer(urgent) == [urgent]
    assert (least.num_computed, desk.counters.recomputed_jobs) == (0, 1)
    desk.round.find_prefix(least)
    assert least.num_ready == 32


def test_what_urgent_jobs_wait_for_nobody_recalls() -> None:
    desk = desk_of(12)
    first, other, urgent = make_job(0, 64), make_job(9, 80), make_job(1, 160)
    other.prompt_ids, urgent.prompt_ids = array("i", range(200, 280)), array("i", range(300, 460))
    desk.run(first)
    end(desk, first)
    desk.run(other)
    assert desk.offer(urgent, tokens=48) == [urgent]
    run_iteration(urgent, 48)
    less = make_job(2, 65)
    limits = BatchLimits(4, 1000)
    kv_round = desk.manager.start_round(8.0, {9})
    assert fill_batch(Listed([urgent, less]), limits, {9}, kv_round) == []
    assert desk.held(less) == [0]
    end(desk, other)
    kv_round = desk.manager.start_round(9.0, set())
    assert [job for job, _ in fill_batch(Listed([urgent, less]), limits, (), kv_round)] == [urgent]


def test_a_prompt_that_waits_for_tokens_costs_no_job_its_kv() -> None:
    desk = desk_of(10, 0, strategy="recompute")
    first, a, b = make_job(0, 33), make_job(3, 32), make_job(4, 32)
    a.prompt_ids, b.prompt_ids = array("i", range(100, 132)), array("i", range(200, 232))
    desk.run(first)
    end(desk, first)
    desk.run(a, b)
    urgent, waiting = make_job(1, 60), make_job(2, 0)
    urgent.prompt_ids = array("i", range(300, 360))
    waiting.prompt_ids = array("i", [*range(32), *range(400, 460)])
    kv_round = desk.manager.start_round(9.0, set())
    batch = fill_batch(Listed([urgent, waiting, a, b]), BatchLimits(4, 100), (), kv_round)
    assert [job for job, _ in batch] == [urgent, a, b]
    assert desk.counters.recomputed_jobs == 0


def test_where_memory_is_short_jobs_are_not_looked_through_for_what_one_has_recalled() -> None:
    desk = desk_of(6, strategy="recompute")
    first, running = make_job(0, 33), make_job(1, 64)
    running.prompt_ids = array("i", range(100, 164))
    desk.run(first)
    end(desk, first)
    desk.run(running)
    waiting = [make_job(number, 96) for number in range(2, 100)]
    for job in waiting[:-1]:
        job.prompt_ids = array("i", range(200, 296))
    desk.manager.on_arrival(waiting[-1], desk.now)
    assert waiting[-1].num_ready == 32
    looked_at = []
    kv_round = desk.manager.start_round(9.0, {1})
    jobs = (job for job in waiting if looked_at.append(job) is None)
    assert fill_batch(Listed(jobs), BatchLimits(4, 1000), {1}, kv_round) == []
    assert len(looked_at) == 1


@pytest.mark.parametrize(
    ("keys", "swaps", "reason", "is_kept"),
    [
        ({}, 0, FinishReason.CANCELLED, True),
        ({}, 1, FinishReason.LENGTH, True),
        ({"host_dtype": "int8"}, 0, FinishReason.LENGTH, True),
        ({"host_dtype": "int8"}, 1, FinishReason.LENGTH, False),
        ({"host_dtype": "int8", "device_dtype": "int8"}, 1, FinishReason.LENGTH, True),
        ({}, 0, FinishReason.ERROR, False),
        ({"prefix_caching": False}, 0, FinishReason.LENGTH, False),
        ({"strategy": "defer"}, 0, FinishReason.LENGTH, False),
    ],
)
def test_only_exact_kv_is_kept_and_only_where_it_is_wanted(
    keys: dict[str, object], swaps: int, reason: FinishReason, is_kept: bool
) -> None:
    desk = desk_of(100, **keys)
    job = make_job(0, 40, max_tokens=8)
    job.num_swaps = swaps
    desk.run(job)
    end(desk, job, reason)
    later = arrive(desk, 1, 40)
    assert later.num_ready == (32 if is_kept else 0)


# --- In the step loop -------------------------------------------------------------------------


def test_what_is_kept_shortens_the_prefill_for_which_a_job_queues() -> None:
    """Iterations take a second a token of prefill here, and quanta double from 1 s on."""
    policy = skip_join(BatchLimits(1, 100))
    rig = Rig(policy, kv_cache=KVCacheSection(prefix_caching=True))
    first, *others = (make_job(n, 8 * BLOCK_SIZE + 1, max_tokens=1) for n in range(3))
    others[1].prompt_ids = array("i", range(900, 900 + 8 * BLOCK_SIZE + 1))
    rig.loop.jobs.add(first)
    rig.run()
    for job in others:
        rig.loop.jobs.add(job)
    assert (first.queue_level, others[0].queue_level, others[1].queue_level) == (6, 0, 6)
    begun_s = rig.clock.now()
    rig.run()
    assert others[0].last_token_s == begun_s + 1
    assert others[1].last_token_s == begun_s + 1 + 8 * BLOCK_SIZE + 1


def test_of_many_jobs_with_one_beginning_one_alone_computes_it() -> None:
    policy = make_policy("fcfs", BatchLimits(2, 100))
    rig = Rig(policy, num_blocks=60, kv_cache=KVCacheSection(prefix_caching=True))
    jobs = [make_job(number, 4 * BLOCK_SIZE + 2, max_tokens=3) for number in range(10)]
    rig.run(jobs)
    assert rig.counters.prefix_cached_tokens == 9 * 4 * BLOCK_SIZE
    assert [job.num_cached_tokens for job in jobs] == [0] + [4 * BLOCK_SIZE] * 9
    assert sorted(number for number, _ in rig.ends) == list(range(10))
    assert rig.pool.num_used == 0


def test_what_a_preempted_job_finds_of_its_own_is_no_cached_prompt() -> None:
    policy = make_policy("fcfs", BatchLimits(2, 100))
    kv_cache = KVCacheSection(strategy="recompute", prefix_caching=True)
    rig = Rig(policy, num_blocks=6, kv_cache=kv_cache)
    jobs = [make_job(number, 2 * BLOCK_SIZE + 1, max_tokens=9) for number in range(2)]
    jobs[1].prompt_ids = array("i", range(900, 900 + 2 * BLOCK_SIZE + 1))
    rig.run(jobs)
    assert rig.counters.preemptions > 0
    assert rig.counters.prefix_cached_tokens > 0
    assert [job.num_cached_tokens for job in jobs] == [0, 0]
