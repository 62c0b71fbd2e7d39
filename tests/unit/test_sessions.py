"""KV of paused sessions: who gets it, where it is, and how long it is held."""

from __future__ import annotations

from array import array

import pytest
from fastserve_backend.job import FinishReason, Job, Place, ServiceLevel
from fastserve_backend.kv_cache.session_history import SessionHistory
from jobs import make_job
from kv_desk import Desk
from policies import TIMES


def turn(number: int, prompt: range | array[int], session: str = "a", tenant: str = "") -> Job:
    job = make_job(number, 1, max_tokens=8)
    job.prompt_ids = array("i", prompt)
    job.service = ServiceLevel(session_id=session, tenant=tenant)
    return job


def end(desk: Desk, job: Job, reason: FinishReason = FinishReason.STOP) -> None:
    job.finish_reason = reason
    desk.manager.release(job, desk.now)
    desk.tiers.check_integrity()


def serve(desk: Desk, job: Job) -> None:
    """Runs a turn of one token."""
    desk.manager.on_arrival(job, desk.now)
    desk.run(job)
    end(desk, job)


def next_turn(number: int, before: Job, *added: int) -> Job:
    """The same conversation with the answer and more tokens."""
    prompt = before.prompt_ids + before.output_ids + array("i", added)
    return turn(number, prompt, before.service.session_id, before.service.tenant)


def test_the_next_turn_computes_only_what_is_new() -> None:
    desk = Desk(10)
    first = turn(0, range(40))
    serve(desk, first)
    assert desk.tiers.held.device == 3
    second = next_turn(1, first, 7, 8)
    desk.manager.on_arrival(second, desk.now)
    assert (second.num_computed, second.num_uncomputed) == (40, 3)
    assert desk.tiers.held.device == 0
    desk.run(second)
    assert second.place is Place.DEVICE
    assert (desk.counters.session_hit_tokens, desk.counters.session_miss_tokens) == (40, 40 + 3)


def test_an_edited_history_gets_the_kv_of_what_was_not_edited() -> None:
    desk = Desk(10)
    first = turn(0, range(60))
    serve(desk, first)
    edited = next_turn(1, first)
    edited.prompt_ids[50] = 99
    desk.manager.on_arrival(edited, desk.now)
    assert edited.num_computed == 50
    serve(desk, turn(2, range(60), "b"))
    other = turn(3, range(500, 560), "b")
    desk.manager.on_arrival(other, desk.now)
    assert (other.num_computed, desk.tiers.held.device) == (0, 0)


@pytest.mark.parametrize(("session", "tenant"), [("b", "x"), ("a", "y"), ("", "x")])
def test_nobody_gets_the_kv_of_another_session(session: str, tenant: str) -> None:
    desk = Desk(10)
    first = turn(0, range(40), "a", "x")
    serve(desk, first)
    other = turn(1, first.prompt_ids, session, tenant)
    desk.manager.on_arrival(other, desk.now)
    assert (other.num_computed, desk.tiers.held.device) == (0, 3)


def test_of_two_turns_at_once_the_second_finds_nothing() -> None:
    desk = Desk(20)
    first = turn(0, range(40))
    serve(desk, first)
    one, other = next_turn(1, first), next_turn(2, first)
    for job in (one, other):
        desk.manager.on_arrival(job, desk.now)
    assert (one.num_computed, other.num_computed) == (40, 0)
    desk.run(one, other)
    end(desk, one)
    end(desk, other)
    assert (desk.manager.num_sessions_held, desk.tiers.held.device) == (1, 3)


def test_a_job_gets_held_blocks_at_once_and_nobody_leaves_for_it() -> None:
    desk = Desk(6, 0, strategy="recompute")
    running = make_job(0, 30, max_tokens=8)
    desk.run(running)
    for number, name in ((1, "a"), (2, "b")):
        serve(desk, turn(number, range(30), name))
    assert desk.tiers.held.device == 4
    large = make_job(9, 60, max_tokens=8)
    assert desk.offer(running, large) == [running, large]
    assert (desk.begun, desk.tiers.held.device) == ([], 0)


def test_the_session_that_paused_last_is_held_longest() -> None:
    desk = Desk(10, 0, strategy="recompute")
    turns = [turn(number, range(30), f"{number}") for number in range(4)]
    for job in turns:
        serve(desk, job)
    desk.run(make_job(9, 90, max_tokens=8))
    assert desk.held(*turns) == [0, 0, 2, 2]


def test_held_kv_is_copied_ahead_and_comes_back_from_the_host() -> None:
    desk = Desk(4, 10)
    first = turn(1, range(40))
    serve(desk, first)
    assert desk.manager.wants_round
    desk.offer()
    assert desk.kinds() == [(1, "write_back")]
    assert desk.manager.start_round(desk.now, ()) is not None
    waiting = make_job(0, 60, max_tokens=8)
    assert desk.offer(waiting) == []  # the copy has not ended
    desk.end_copies()
    assert not desk.manager.wants_round
    assert desk.offer(waiting) == [waiting]
    desk.send(waiting)
    desk.manager.on_step_finished()
    held = desk.tiers.held
    assert (held.device, held.idle_host, held.host_alone) == (0, 3, 3)
    end(desk, waiting)
    second = next_turn(2, first, 5)
    desk.manager.on_arrival(second, desk.now)
    assert second.num_computed == 40
    assert desk.offer(second) == []
    assert desk.kinds() == [(2, "swap_in")]
    desk.end_copies()
    assert desk.offer(second) == [second]


def test_a_turn_waits_until_nothing_copies_its_kv() -> None:
    desk = Desk(4, 10)
    first = turn(1, range(40))
    serve(desk, first)
    desk.offer()
    second = next_turn(2, first)
    desk.manager.on_arrival(second, desk.now)
    assert (second.num_computed, set(desk.manager.not_ready)) == (0, {2})
    desk.end_copies()
    desk.start_round()
    assert (second.num_computed, set(desk.manager.not_ready)) == (40, set())


def test_jobs_that_leave_get_the_hosts_blocks_before_sessions() -> None:
    desk = Desk(4, 4)
    first = turn(5, range(60))
    serve(desk, first)
    desk.offer()
    desk.end_copies()
    assert desk.tiers.held.idle_host == 0  # a part of the host is left free for jobs
    desk = Desk(4, 6)
    serve(desk, turn(5, range(60)))
    desk.offer()
    desk.end_copies()
    assert desk.tiers.held.idle_host == 4
    late, urgent = make_job(1, 60, max_tokens=8), make_job(0, 60, max_tokens=8)
    desk.run(late)
    desk.offer(urgent, late)
    assert desk.kinds() == [(1, "swap_out")]
    assert desk.tiers.held.idle_host == 0


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.ERROR])
def test_a_cancelled_turn_gives_its_kv_back_and_a_failed_one_does_not(reason: FinishReason) -> None:
    desk = Desk(10)
    first = turn(0, range(40))
    serve(desk, first)
    second = next_turn(1, first)
    desk.manager.on_arrival(second, desk.now)
    end(desk, second, reason)
    assert desk.tiers.held.device == (3 if reason is FinishReason.CANCELLED else 0)
    third = next_turn(2, first)
    desk.manager.on_arrival(third, desk.now)
    assert third.num_computed == (40 if reason is FinishReason.CANCELLED else 0)


def test_kv_is_given_up_when_the_session_pauses_too_long() -> None:
    desk = Desk(10, session_ttl_s=5.0)
    serve(desk, turn(0, range(40)))
    desk.now += 4.5
    desk.start_round()
    assert desk.tiers.held.device == 3
    desk.now += 1.0
    desk.start_round()
    assert desk.tiers.held.device == 0


@pytest.mark.parametrize("keys", [{"session_ttl_s": 0}, {"strategy": "defer"}])
def test_where_nothing_is_held(keys: dict[str, object]) -> None:
    desk = Desk(10, **keys)
    serve(desk, turn(0, range(40)))
    assert desk.tiers.device.num_used == 0


def test_turns_of_rounded_kv_share_it_with_nobody() -> None:
    desk = Desk(4, 10, prefix_caching=True, host_dtype="int8")
    first = turn(1, range(40))
    serve(desk, first)
    desk.offer()
    desk.end_copies()
    blocker = turn(0, range(500, 560), "")
    desk.run(blocker)
    end(desk, blocker)
    second = next_turn(2, first)
    desk.manager.on_arrival(second, desk.now)
    desk.offer(second)
    desk.end_copies()
    assert desk.offer(second) == [second]
    assert second.num_computed == 40
    third = turn(3, range(40), "")
    desk.manager.on_arrival(third, desk.now)
    assert third.num_shared == 0


# --- How long -----------------------------------------------------------------------------------


def pause(history: SessionHistory, name: str, begin_s: float, pause_s: float) -> None:
    job = turn(0, range(4), name)
    history.on_end(job, begin_s)
    history.on_arrival(job, begin_s + pause_s)


def test_the_time_to_live_follows_the_pauses() -> None:
    history = SessionHistory("auto", TIMES, inherits_age=False)
    assert history.ttl_s == 60
    for number in range(100):
        pause(history, "a", 100.0 * number, 8.0 + number % 10)
    assert history.ttl_s == 17
    for number in range(1000):
        pause(history, "b", 1e6 + 1e4 * number, 5000.0)
    assert history.ttl_s == 600
    for number in range(1000):
        pause(history, "c", 1e9 + 10.0 * number, 0.1)
    assert history.ttl_s == 5


def test_a_configured_time_to_live_stays() -> None:
    history = SessionHistory(33.0, TIMES, inherits_age=False)
    for number in range(100):
        pause(history, "a", 100.0 * number, 1.0)
    assert history.ttl_s == 33


def test_few_sessions_are_remembered_and_pauses_that_were_too_long_count() -> None:
    history = SessionHistory("auto", TIMES, inherits_age=False)
    for number in range(10_002):
        history.on_end(turn(0, range(4), f"{number}"), 0.0)
    for number in reversed(range(10_002)):
        history.on_arrival(turn(0, range(4), f"{number}"), 500.0)
    assert len(history._sessions) == 10_000
    assert history.ttl_s == 500


@pytest.mark.parametrize("inherits_age", [False, True])
def test_a_turn_inherits_what_its_session_was_served(inherits_age: bool) -> None:
    history = SessionHistory("auto", TIMES, inherits_age=inherits_age)
    for number in range(2):
        job = turn(number, range(10))
        history.on_arrival(job, 0.0)
        job.first_scheduled_s, job.num_cached_tokens = 0.0, 4
        job.output_ids.extend([7, 7, 7])
        history.on_end(job, 1.0)
    last = turn(2, range(10))
    history.on_arrival(last, 2.0)
    expected = (2 * (6 + 3), 6) if inherits_age else (0, 0)
    assert (last.session_s, last.session_tokens) == expected
