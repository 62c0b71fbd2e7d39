"""Which held turns give way first."""

from __future__ import annotations

from fastserve_backend.kv_cache.held_turns import HeldTurn, HeldTurns
from fastserve_backend.kv_cache.session_history import SessionKey
from jobs import make_job
from kv_desk import Desk
from test_sessions import end, turn


def turns_of(*sizes: tuple[str, int]) -> HeldTurns:
    turns = HeldTurns()
    for number, (tenant, num_tokens) in enumerate(sizes):
        key = SessionKey(tenant, f"{number}", "")
        turns.add(HeldTurn(key, make_job(number, 1), num_tokens, since_s=0.0))
    return turns


def order(turns: HeldTurns) -> list[int]:
    return [turn.job.number for turn in turns.leaving_order()]


def test_of_one_tenant_those_that_came_first_leave_first() -> None:
    assert order(turns_of(("a", 5), ("a", 50), ("a", 1))) == [0, 1, 2]


def test_the_tenant_that_has_most_gives_way() -> None:
    turns = turns_of(("a", 30), ("b", 20), ("b", 25), ("b", 10))
    # b has 55 tokens, then a's 30 are as many as b's 35 were, and so on.
    assert order(turns) == [1, 2, 0, 3]


def test_turns_that_the_caller_removes_count_no_more() -> None:
    turns = turns_of(("a", 30), ("b", 20), ("b", 25))
    for one in turns.leaving_order():
        assert turns.pop(one.job.number) is one
        if one.job.number == 1:
            break
    assert (1 in turns, turns.pop(1), order(turns)) == (False, None, [0, 2])


def test_a_flood_of_one_tenants_sessions_leaves_anothers_kv() -> None:
    desk = Desk(10, 0)
    kept = turn(0, range(40), "kept", "quiet")
    desk.run(kept)
    end(desk, kept)
    for number in range(1, 6):
        job = turn(number, range(100 * number, 100 * number + 60), f"{number}", "loud")
        desk.run(job)
        end(desk, job)
    assert desk.held(kept) == [3]
    assert desk.manager.num_sessions_held == 2
