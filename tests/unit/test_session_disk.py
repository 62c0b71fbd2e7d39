"""KV of paused sessions on the disk: what is written, what makes room, and who waits for it."""

from __future__ import annotations

from array import array
from dataclasses import replace

from fastserve_backend.job import FinishReason, Job, ServiceLevel
from jobs import make_job
from kv_desk import SLOW_LINK, Desk

DEVICE, HOST = 4, 6  # blocks; each turn here has 3


class Sessions(Desk):
    """A desk with a small host, and turns of sessions."""

    def __init__(self, num_slots: int = 100, **options: object) -> None:
        super().__init__(DEVICE, HOST, num_slots=num_slots, **options)  # type: ignore[arg-type]
        self._num_jobs = 0

    def turn(self, session: str, tokens: range | array[int] = range(40)) -> Job:
        job = make_job(self._num_jobs, 1, max_tokens=8)
        self._num_jobs += 1
        job.prompt_ids = array("i", tokens)
        job.service = ServiceLevel(session_id=session)
        self.manager.on_arrival(job, self.now)
        return job

    def next_turn(self, before: Job) -> Job:
        return self.turn(before.service.session_id, before.prompt_ids + before.output_ids)

    def end(self, job: Job) -> None:
        job.finish_reason = FinishReason.STOP
        self.manager.release(job, self.now)
        self.tiers.check_integrity()

    def serve(self, session: str, tokens: range | array[int] = range(40)) -> Job:
        """A turn whose KV is then on the device, and on the host if that has room."""
        job = self.turn(session, tokens)
        self.run(job)
        self.end(job)
        self.offer()
        self.end_copies()
        return job

    def need_device(self) -> None:
        job = make_job(self._num_jobs, 60, max_tokens=8)
        self._num_jobs += 1
        self.run(job)
        self.end(job)

    def send_to_disk(self, session: str = "a") -> Job:
        """A turn whose KV is then on the disk alone."""
        first = self.serve(session)
        self.need_device()
        self.serve(f"{session} pushes")
        assert self.end_disk_copies() == [(first.number, "write")]
        self.offer()  # the other's KV takes its place on the host
        self.end_copies()
        assert self.tiers.host.num_held(first.number) == 0
        assert self.tiers.disk.has(first.number)
        return first


def test_what_leaves_a_full_host_comes_back_from_the_disk() -> None:
    desk = Sessions()
    first = desk.send_to_disk()
    second = desk.next_turn(first)
    assert (second.num_computed, set(desk.manager.not_ready)) == (0, {second.number})
    desk.offer()
    assert desk.end_disk_copies() == [(first.number, "read")]
    desk.start_round()
    assert (second.num_computed, set(desk.manager.not_ready)) == (40, set())
    assert desk.tiers.disk.slots.num_used == 0
    desk.offer(second)
    assert desk.kinds() == [(second.number, "swap_in")]
    assert desk.counters.session_hit_tokens == 40
    assert (desk.counters.disk_write_bytes, desk.counters.disk_read_bytes) == (300, 300)


def test_a_turn_with_another_salt_reads_nothing_from_the_disk() -> None:
    desk = Sessions()
    first = desk.send_to_disk()
    second = make_job(90, 0, max_tokens=8)
    second.prompt_ids = first.prompt_ids + first.output_ids
    second.service = replace(first.service, cache_salt="other")
    desk.manager.on_arrival(second, desk.now)
    assert (second.num_computed, set(desk.manager.not_ready)) == (0, set())
    assert desk.tiers.disk.has(first.number)


def test_nothing_is_written_while_the_host_has_room() -> None:
    desk = Sessions()
    first = desk.serve("a")
    desk.need_device()
    desk.offer()
    assert desk.tiers.host.num_held(first.number) == 3
    assert not desk.manager.wants_round
    assert desk.disk_begun == []


def test_no_job_waits_for_a_write() -> None:
    desk = Sessions()
    desk.serve("a")
    desk.need_device()
    desk.serve("b")
    assert [one.is_write for one in desk.disk_begun] == [True]
    late, urgent = make_job(91, 60, max_tokens=8), make_job(90, 60, max_tokens=8)
    desk.run(late)
    desk.offer(urgent, late)
    assert desk.kinds() == [(91, "swap_out")]  # into the blocks that are being written
    desk.end_disk_copies()
    assert desk.tiers.disk.slots.num_used == 0


def test_a_failed_read_means_that_the_turn_computes_again() -> None:
    desk = Sessions()
    second = desk.next_turn(desk.send_to_disk())
    desk.offer()
    desk.end_disk_copies(succeeded=False)
    desk.start_round()
    assert (second.num_computed, set(desk.manager.not_ready)) == (0, set())
    assert (desk.counters.disk_failures, desk.tiers.disk.slots.num_used) == (1, 0)


def test_after_a_failed_write_nothing_more_is_written() -> None:
    desk = Sessions()
    first = desk.serve("a")
    desk.need_device()
    desk.serve("b")
    desk.end_disk_copies(succeeded=False)
    desk.offer()  # b gets the host's blocks, as without a disk
    desk.end_copies()
    assert desk.next_turn(first).num_computed == 0
    desk.need_device()
    desk.serve("c")
    assert desk.disk_begun == []
    assert desk.tiers.disk.slots.num_used == 0


def test_a_turn_does_not_wait_for_a_disk_that_has_become_slow() -> None:
    desk = Sessions()
    second = desk.next_turn(desk.send_to_disk())
    desk.offer()
    desk.now += 1e3
    desk.start_round()
    assert (second.num_computed, set(desk.manager.not_ready)) == (0, set())
    desk.run(second)
    desk.end(second)
    desk.end_disk_copies()  # late
    assert desk.tiers.disk.slots.num_used == 0


def test_kv_that_is_computed_sooner_than_read_is_computed() -> None:
    desk = Sessions(disk=SLOW_LINK)
    second = desk.next_turn(desk.send_to_disk())
    assert (second.num_computed, set(desk.manager.not_ready)) == (0, set())


def test_what_was_written_first_makes_room_on_the_disk() -> None:
    desk = Sessions(num_slots=3)
    first = desk.send_to_disk()
    desk.need_device()
    desk.serve("b")
    ((other, _),) = desk.end_disk_copies()
    assert other != first.number
    assert (desk.tiers.disk.has(first.number), desk.tiers.disk.has(other)) == (False, True)


def test_a_disk_too_small_for_a_turn_gets_nothing() -> None:
    desk = Sessions(num_slots=2)
    desk.serve("a")
    desk.need_device()
    other = desk.serve("b")
    assert desk.disk_begun == []
    assert desk.tiers.host.num_held(other.number) == 3


def test_kv_on_the_disk_is_given_up_when_the_session_pauses_too_long() -> None:
    desk = Sessions(session_ttl_s=50.0)
    desk.send_to_disk()
    desk.now += 60.0
    desk.start_round()
    assert desk.tiers.disk.slots.num_used == 0
    desk.tiers.check_integrity()


def test_a_turn_that_returns_in_time_gets_what_is_read_later() -> None:
    desk = Sessions(session_ttl_s=50.0)
    first = desk.send_to_disk()
    desk.now = 50.0
    second = desk.next_turn(first)
    desk.now = 51.5
    desk.start_round()
    desk.offer()
    desk.end_disk_copies()
    desk.start_round()
    assert second.num_computed == 40


def test_a_cancelled_turn_leaves_what_was_read_to_the_next() -> None:
    desk = Sessions()
    second = desk.next_turn(desk.send_to_disk())
    desk.offer()
    second.finish_reason = FinishReason.CANCELLED
    desk.manager.release(second, desk.now)
    desk.end_disk_copies()
    third = desk.next_turn(second)
    assert third.num_computed == 40


def test_what_several_sessions_begin_with_crosses_once_and_takes_one_place() -> None:
    desk = Sessions(prefix_caching=True)
    first = desk.serve("a", range(40))
    second = desk.serve("b", array("i", [*range(32), *range(90, 98)]))  # two blocks are the same
    desk.need_device()
    written = []
    for _ in range(2):
        desk.offer()
        written += [len(one.slots) for one in desk.disk_begun]
        desk.end_disk_copies()
    slots = desk.tiers.disk.slots
    assert (written, slots.num_used, slots.num_shared) == ([3, 1], 4, 2)

    desk.serve("c", range(200, 260))  # all of the host but two blocks
    assert {desk.tiers.host.num_held(job.number) for job in (first, second)} == {0}
    turns = desk.next_turn(first), desk.next_turn(second)
    desk.offer()
    # Nobody has used what the host had of both.
    assert [len(one.slots) for one in desk.disk_begun] == [1, 1]
    desk.end_disk_copies()
    desk.start_round()
    assert [turn.num_computed for turn in turns] == [40, 40]
