"""Where layers have windows: which blocks jobs hold, give back, and get from others."""

from __future__ import annotations

from array import array

from fastserve_backend.job import FinishReason, Job
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds, LayerKind
from jobs import make_job
from kv_desk import Desk

BLOCK = 16
WINDOW = 4 * BLOCK
KINDS = (LayerKind(None, 1), LayerKind(WINDOW, 2))
HELD_BY_WINDOW = 2 * 4  # blocks of the groups with windows, of a job at the end of a block


def desk_of(num_blocks: int = 400, **keys: object) -> Desk:
    return Desk(num_blocks, kinds=KINDS, **{"prefix_caching": True} | keys)  # type: ignore[arg-type]


def prefill(desk: Desk, job: Job, chunk: int) -> None:
    """Runs the job's prompt in chunks."""
    while job.num_uncomputed > 1 and not job.output_ids:
        count = min(chunk, job.num_uncomputed)
        assert desk.offer(job, tokens=count) == [job]
        desk.send(job, tokens=count)
        desk.end_step(job)


def end(desk: Desk, job: Job) -> None:
    job.finish_reason = FinishReason.STOP
    desk.manager.release(job, desk.now)


def test_a_job_ten_windows_long_holds_a_window_of_the_windowed_groups() -> None:
    desk = desk_of(prefix_caching=False)
    job = make_job(0, 10 * WINDOW)
    prefill(desk, job, chunk=2 * BLOCK)
    assert desk.held(job) == [40 + HELD_BY_WINDOW]
    most = BlockNeeds(BLOCK, KINDS, step_tokens=2 * BLOCK).most(10 * WINDOW)
    assert desk.counters.peak_blocks <= most
    for _ in range(2 * WINDOW):  # decodes
        desk.run(job)
        desk.end_step(job)
        assert desk.held(job)[0] <= -(-job.num_computed // BLOCK) + HELD_BY_WINDOW + 2


def test_blocks_that_a_step_ahead_reads_are_kept_until_the_step_before_has_ended() -> None:
    desk = desk_of(prefix_caching=False)
    job = make_job(0, 4 * WINDOW)
    desk.run(job)  # its step has not ended
    num_held = desk.held(job)
    assert num_held == [3 * 16]
    first_step = job.num_computed
    assert desk.offer(job, in_flight=[job], going_on=[job]) == [job]
    desk.send(job)
    assert desk.held(job) == [3 * 17]
    desk.manager.on_step_finished([(0, first_step)])
    seen = KINDS[1].first_seen(first_step, BLOCK)
    assert desk.tiers.device.first(0, 1) == seen
    assert desk.held(job) == [17 + 2 * (17 - seen)]


def test_a_job_begins_behind_blocks_of_an_ended_job_though_its_windows_first_blocks_are_gone() -> (
    None
):
    desk = desk_of()
    first = make_job(0, 10 * WINDOW)
    prefill(desk, first, chunk=2 * BLOCK)
    end(desk, first)
    second = make_job(1, 10 * WINDOW + 5)
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 10 * WINDOW
    assert desk.offer(second) == [second]
    assert (second.num_ready, second.num_uncomputed) == (10 * WINDOW, 5)
    assert desk.held(second) == [41 + HELD_BY_WINDOW + 2]
    assert desk.tiers.device.first(1, 1) == 36


def test_a_job_refers_to_what_another_holds_and_to_what_that_one_has_freed() -> None:
    desk = desk_of()
    common = 6 * WINDOW
    source = make_job(0, common + 2 * BLOCK)
    prefill(desk, source, chunk=BLOCK)
    # It is two blocks past what is common: so much of the window before that is in the cache.
    device = desk.tiers.device
    assert device.first(0, 1) == 22
    job = make_job(1, common + 40)
    job.prompt_ids[common:] = array("i", range(900, 940))
    desk.manager.on_arrival(job, desk.now)
    assert job.num_ready == common
    assert desk.offer(job) == [job]
    assert (job.num_ready, job.num_shared) == (common, common)
    assert device.table(1)[:24] == device.table(0)[:24]
    assert device.first(1, 1) == 20
    assert device.table(1, 1)[4:8] == device.table(0, 1)[:4]
    assert device.num_shared == 24 + 4
    desk.send(job)
    assert desk.counters.prefix_cached_tokens == common


def test_a_shorter_prefix_is_taken_where_a_longer_ones_window_is_lost() -> None:
    desk = desk_of(num_blocks=150)
    first = make_job(0, 8 * WINDOW)
    prefill(desk, first, chunk=2 * WINDOW)
    end(desk, first)
    device = desk.tiers.device
    keys = list(desk.manager._prefixes._keys.wanted(make_job(1, 8 * WINDOW + 1)))
    last = device._published.pop((keys[-1], 1, 0))  # one group lacks the last block now
    del device._cached[last], device._keys[last]
    device._free.append(last)
    second = make_job(2, 8 * WINDOW + 1)
    desk.manager.on_arrival(second, desk.now)
    assert second.num_ready == 8 * WINDOW - BLOCK


def test_a_job_whose_first_step_was_not_sent_begins_anew() -> None:
    desk = desk_of()
    source = make_job(0, 4 * WINDOW)
    prefill(desk, source, chunk=BLOCK)
    job = make_job(1, 4 * WINDOW + 3)
    assert desk.offer(job) == [job]
    assert job.num_shared > 0
    end(desk, source)
    assert desk.offer() == []
    assert (desk.held(job), job.num_ready) == ([0], 0)
    assert desk.offer(job) == [job]
    assert job.num_shared == 4 * WINDOW  # of the ended job
