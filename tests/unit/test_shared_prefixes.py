"""Concurrent jobs with equal beginnings: which job computes, which waits, what is copied, and that
lost KV is never copied."""

from __future__ import annotations

from array import array

import pytest
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.kv_cache.round import StepVerdict
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


def kept_in_part(desk: Desk) -> None:
    """Job 1 is on the device. Its first two blocks are also kept from a job that ended."""
    earlier, first = make_job(0, 33), make_job(1, 65)
    earlier.prompt_ids = earlier.prompt_ids[:32] + array("i", [7])
    desk.run(first)
    desk.run(earlier)
    desk.manager.release(earlier, desk.now)


def copied(desk: Desk) -> tuple[list[int], list[int]]:
    return list(desk.copies.from_blocks), list(desk.copies.to_blocks)


def test_a_job_waits_for_its_beginning_and_copies_it() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 70), make_job(1, 50)
    desk.run_first(first, second)
    assert desk.offer(second) == [second]
    tables = [list(desk.tiers.device.table(number)) for number in (0, 1)]
    assert copied(desk) == (tables[0][:3], tables[1][:3])
    assert (second.num_ready, second.num_uncomputed, len(tables[1])) == (48, 2, 4)
    desk.send(second)
    assert second.num_computed == 50
    assert desk.counters.prefix_cached_tokens == 48


def test_the_copy_of_a_job_is_a_source_too() -> None:
    desk = desk_of(30)
    first, second, third = make_job(0, 70), make_job(1, 70), make_job(2, 70)
    desk.run_first(first, second)
    desk.run(second)
    desk.manager.release(first, desk.now)
    desk.tiers.device.grow(9, 16 * desk.tiers.device.num_free)  # nothing is kept
    desk.tiers.device.release(9)
    desk.manager.on_arrival(third, desk.now)
    assert (third.num_computed, third.num_shared) == (0, 64)
    assert desk.offer(third) == [third]
    assert copied(desk)[0] == list(desk.tiers.device.table(1)[:4])


def test_what_a_job_that_goes_first_has_recalled_is_not_computed_by_the_next() -> None:
    desk = desk_of(20)
    earlier, first, second = make_job(0, 65), make_job(1, 65), make_job(2, 65)
    desk.run(earlier)
    desk.manager.release(earlier, desk.now)
    desk.manager.on_arrival(first, desk.now)
    desk.manager.on_arrival(second, desk.now)
    assert (first.num_ready, second.num_ready) == (64, 64)
    assert desk.held(first, second) == [0, 0]  # no job has it before this one runs
    desk.run_first(first, second)
    assert desk.offer(second) == [second]
    assert second.num_shared == 64


def test_a_beginning_that_is_kept_in_part_is_copied_from_there() -> None:
    desk = desk_of(20)
    kept_in_part(desk)
    second = make_job(2, 65)
    desk.manager.on_arrival(second, desk.now)
    assert (second.num_ready, second.num_uncomputed) == (64, 1)
    assert desk.offer(second) == [second]
    assert (second.num_computed, second.num_shared, second.num_uncomputed) == (32, 32, 1)
    tables = [list(desk.tiers.device.table(number)) for number in (1, 2)]
    assert copied(desk) == (tables[0][2:4], tables[1][2:4])


def test_a_job_waits_for_each_chunk_and_no_longer_than_it_is_computed() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 80), make_job(1, 80)
    assert desk.offer(first, second, tokens=32) == [first]
    desk.send(first, tokens=32)
    assert desk.offer(first, second, tokens=32) == [first]
    desk.send(first, tokens=32)
    assert desk.offer(second) == [second]  # the first has no turn
    assert (second.num_shared, second.num_uncomputed) == (64, 16)


def test_a_prefill_that_is_in_flight_is_waited_for_unless_it_has_ended() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 80), make_job(1, 80)
    assert desk.offer(first, tokens=32) == [first]
    desk.send(first, tokens=32)
    assert desk.offer(second, in_flight=[first]) == []
    first.finish_reason = FinishReason.CANCELLED
    assert desk.offer(second, in_flight=[first]) == [second]
    assert second.num_shared == 32


def test_little_in_common_is_copied_but_not_waited_for() -> None:
    desk = desk_of(20, times=LinearTimes(1 / 16, least_s=1.0))  # one block in an iteration
    first, second = make_job(0, 17), make_job(1, 17)
    assert desk.offer(first, second) == [first, second]
    third = make_job(2, 40)
    desk.send(first, second)
    assert desk.offer(third) == [third]
    assert third.num_shared == 16


def test_a_job_that_needs_others_blocks_copies_none() -> None:
    desk = desk_of(8, strategy="recompute")
    first, second, least = make_job(1, 64), make_job(0, 64), other_job(2, 32)
    desk.run(first)
    desk.run(least)
    assert desk.offer(second) == [second]
    assert (second.num_shared, copied(desk)) == (0, ([], []))
    assert (least.num_computed, first.num_computed) == (0, 64)


def test_of_a_step_that_is_not_sent_nothing_is_copied_or_counted() -> None:
    desk = desk_of(20)
    first, second = make_job(0, 64), make_job(1, 64)
    desk.run(first)
    for _ in range(2):
        assert desk.offer(second) == [second]
        assert (second.num_shared, len(copied(desk)[0])) == (48, 3)
    assert desk.counters.prefix_cached_tokens == 0
    desk.manager.release(first, desk.now)
    desk.manager.start_round(9.0, set())
    assert second.num_ready == 0
    assert desk.tiers.device.num_held(first.number) == 0


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
def test_a_source_keeps_its_blocks_until_they_are_copied(strategy: str) -> None:
    desk = desk_of(11, strategy=strategy)
    source, second, urgent = make_job(5, 64), make_job(3, 64), other_job(0, 80)
    desk.run(source)
    assert desk.offer(second, urgent) == [second]  # this takes blocks from nobody
    assert desk.begun == []
    desk.send(second)
    copies = desk.copies
    assert desk.offer(urgent, in_flight=[second]) == []
    assert (desk.begun, source.num_computed) == ([], 64)
    desk.manager.on_step_finished(copies)
    desk.offer(urgent, in_flight=[second])
    assert desk.begun or source.num_computed == 0


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_nobody_leaves_for_what_a_source_that_ended_will_free(
    strategy: str, is_ahead: bool
) -> None:
    desk = desk_of(12, strategy=strategy)
    source, second = make_job(1, 64), make_job(2, 64)
    idle, urgent = other_job(3, 64), other_job(0, 64)
    desk.run(source)
    desk.run(idle)
    assert desk.offer(second) == [second]
    desk.send(second)
    copies = desk.copies
    desk.manager.release(source, desk.now)
    going_on = [second] if is_ahead else None
    assert desk.offer(urgent, in_flight=[second], going_on=going_on) == []
    assert (desk.held(source, idle), desk.begun) == ([4, 4], [])
    desk.manager.on_step_finished(copies)
    assert desk.offer(urgent) == [urgent]
    assert desk.held(source, idle) == [0, 4]


def test_a_running_job_is_not_made_to_leave_by_the_step_that_copies_from_it() -> None:
    desk = desk_of(13, strategy="recompute")
    source, idle = make_job(3, 64), other_job(2, 64)
    second, urgent = make_job(0, 64), other_job(1, 80)
    desk.run(idle)
    desk.run(source)
    offered = [second, urgent]
    assert desk.offer(*offered, in_flight=[source], going_on=[source]) == offered
    assert desk.verdict is not StepVerdict.TOO_EARLY
    assert desk.held(source, idle) == [4, 0]


@pytest.mark.parametrize("with_write_back", [False, True])
def test_a_source_that_ends_frees_its_blocks_when_they_are_copied(with_write_back: bool) -> None:
    desk = desk_of(20)
    source, second, third = make_job(0, 64), make_job(1, 64), make_job(2, 64)
    desk.run(source)
    copies = []
    for job in (second, third):
        assert desk.offer(job) == [job]
        copies.append(desk.copies)
        desk.send(job)
    assert [one.sources for one in copies] == [{0}, {0}]
    if with_write_back:
        desk.tiers.write_back(source.number, 64, 2)
    desk.manager.release(source, desk.now)
    for one in copies:
        assert desk.held(source) == [4]
        desk.manager.on_step_finished(one)
    if with_write_back:
        assert desk.held(source) == [4]
        desk.end_copies()
    assert desk.held(source) == [0]
    later = make_job(3, 64)
    desk.manager.on_arrival(later, desk.now)
    assert (later.num_computed, later.num_shared) == (0, 48)
    desk.round.find_prefix(later)
    # The blocks are kept, except those still being copied to the host.
    assert (later.num_computed, later.num_shared) == ((0, 48) if with_write_back else (48, 0))


@pytest.mark.parametrize("host_dtype", ["same", "int8"])
def test_a_job_is_a_source_when_it_is_back_if_its_kv_is_as_it_was(host_dtype: str) -> None:
    desk = desk_of(5, host_dtype=host_dtype)
    source, urgent, second = make_job(1, 60), other_job(0, 60), make_job(2, 40)
    desk.run(source)
    desk.offer(urgent)
    assert desk.kinds() == [(1, "swap_out")]
    desk.manager.on_arrival(second, desk.now)
    assert second.num_shared == 0
    desk.end_copies()
    desk.manager.release(urgent, desk.now)
    desk.offer(source)
    assert desk.kinds() == [(1, "swap_in")]
    desk.manager.on_arrival(second, desk.now)
    assert second.num_shared == 0
    desk.end_copies()
    desk.manager.on_arrival(second, desk.now)
    assert second.num_shared == (32 if host_dtype == "same" else 0)


@pytest.mark.parametrize("strategy", ["reactive", "proactive"])
def test_what_a_job_was_to_copy_before_it_was_swapped_out_it_computes(strategy: str) -> None:
    desk = desk_of(12, strategy=strategy)
    kept_in_part(desk)
    first, job, urgent = make_job(1, 65), make_job(5, 64), other_job(0, 80)
    assert desk.offer(job) == [job]
    assert (job.num_computed, job.num_shared) == (32, 16)
    kv_round = desk.manager.start_round(
        8.0, set()
    )  # the step was not sent, and the next one has no tokens for it
    kv_round.find_prefix(job)
    assert desk.offer(urgent) == []
    assert desk.kinds() == [(5, "swap_out")]
    desk.end_copies()
    desk.manager.release(first, desk.now)
    assert desk.offer(job) == []
    desk.end_copies()
    assert desk.offer(job) == [job]
    assert copied(desk) == ([], [])
    assert job.num_ready == 32


def test_a_job_that_lost_its_kv_is_no_source() -> None:
    desk = desk_of(5, link=SLOW_LINK)
    source, urgent, second = make_job(1, 60), other_job(0, 60), make_job(2, 40)
    desk.run(source)
    desk.starving.add(0)
    assert desk.offer(urgent) == [urgent]
    assert source.num_computed == 0
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 16  # the kept tokens; no job has the rest


def test_what_a_step_that_was_not_sent_recalled_and_copied_is_there_for_the_next() -> None:
    desk = desk_of(20)
    kept_in_part(desk)
    second = make_job(2, 65)
    for _ in range(2):
        assert desk.offer(second) == [second]
        assert (second.num_computed, second.num_shared) == (32, 32)


def test_a_job_that_begins_with_one_token_is_a_source_at_the_second_try_too() -> None:
    desk = desk_of(20)
    earlier, first, second = make_job(0, 65), make_job(1, 65), make_job(2, 65)
    desk.run(earlier)
    desk.manager.release(earlier, desk.now)
    assert desk.offer(first) == [first]
    desk.run(first)
    assert desk.offer(second) == [second]
    assert second.num_shared == 64


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
def test_the_blocks_that_a_waiting_job_is_to_copy_to_stay_free(strategy: str) -> None:
    desk = desk_of(10, strategy=strategy)
    first, second, least = make_job(0, 63), make_job(1, 64), other_job(2, 95)
    desk.run_first(first, second, least)
    assert desk.offer(second) == [second]
    assert (second.num_shared, desk.begun) == (48, [])


def test_the_blocks_that_a_waiting_job_has_stay_its_own() -> None:
    desk = desk_of(10, strategy="recompute")
    first, second, least = make_job(0, 63), make_job(1, 64), other_job(2, 47)
    assert desk.offer(second) == [second]  # in a step that is not sent
    assert desk.offer(first, second, least) == [first]
    assert desk.held(second) == [4]


def test_a_job_that_could_not_copy_does_not_wait() -> None:
    desk = desk_of(12, strategy="recompute")
    first, second, least = make_job(0, 64), make_job(1, 65), other_job(9, 127)
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
    assert (third.num_shared, copied(desk)) == (0, ([], []))


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
    assert len(rig.iterations_s) == sum(not step.copy_from for step in steps) < len(steps)
    assert rig.pool.num_used == 0


def test_a_job_queues_for_what_it_does_not_copy() -> None:
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
