"""Which jobs get blocks for the next step while a step runs."""

from __future__ import annotations

import pytest
from fastserve_backend.kv_cache.round import StepVerdict
from fastserve_backend.offers import EVERYWHERE
from fastserve_backend.rank_protocol.link import Link
from jobs import make_job
from kv_desk import Desk, jobs_of


@pytest.mark.parametrize("strategy", ["recompute", "reactive", "proactive"])
def test_a_running_job_is_not_made_to_leave_but_it_is_said_that_it_has_to(strategy: str) -> None:
    desk = Desk(4, strategy=strategy)
    urgent, middle, least = jobs_of(32, 31, 31)
    desk.run(middle, least)
    running = [middle, least]
    assert desk.offer(urgent, in_flight=running, going_on=running) == []
    assert (desk.verdict, desk.answer.closed) == (StepVerdict.TOO_EARLY, EVERYWHERE)
    assert (desk.held(middle, least), desk.begun) == ([2, 2], [])
    # Its step has ended.
    desk.offer(urgent, middle, least)
    assert desk.verdict is not StepVerdict.TOO_EARLY
    swaps = strategy != "recompute"
    assert desk.held(least) == [2 if swaps else 0]
    assert desk.kinds() == ([(2, "swap_out")] if swaps else [])


def test_an_idle_job_leaves_while_a_more_urgent_one_runs() -> None:
    desk = Desk(4, strategy="recompute")
    urgent, middle, least = jobs_of(32, 31, 31)
    desk.run(middle, least)
    assert desk.offer(urgent, middle, in_flight=[middle], going_on=[middle]) == [urgent, middle]
    assert desk.verdict is not StepVerdict.TOO_EARLY
    assert desk.held(middle, least) == [2, 0]


def test_a_running_job_that_was_offered_before_is_no_victim() -> None:
    desk = Desk(4, strategy="recompute")
    first, second, last = jobs_of(31, 31, 16)
    desk.run(first, second)
    running = [first, second]
    assert desk.offer(first, second, last, in_flight=running, going_on=running) == running
    assert desk.verdict is not StepVerdict.TOO_EARLY


def test_nobody_leaves_for_what_a_job_that_ends_with_its_step_will_free() -> None:
    desk = Desk(6, strategy="recompute")
    urgent, idle, ending = jobs_of(32, 31, 31)
    desk.run(idle, ending)
    running = make_job(3, 32)
    desk.run(running)
    assert desk.offer(urgent, in_flight=[ending, running], going_on=[running]) == []
    assert desk.verdict is not StepVerdict.TOO_EARLY
    assert desk.held(idle, ending, running) == [2, 2, 2]


def test_only_those_that_were_chosen_would_wait_for_copies() -> None:
    # As in test_steps_wait_for_copies_if_that_costs_less, where two jobs would.
    desk = Desk(6, link=Link(0.3, 0.3))
    urgent, first, second, least = jobs_of(32, 30, 30, 30)
    desk.run(first, second, least)
    running = [first, second]
    assert desk.offer(first, urgent, in_flight=running, going_on=running) == [first]
    assert desk.kinds() == [(3, "swap_out")]
    assert desk.manager.holds_steps
