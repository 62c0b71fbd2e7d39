"""Which server a gateway chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from fastserve_gateway.routing.prefix_memory import PrefixMemory
from fastserve_gateway.routing.prefixes import CHUNK_BYTES, prompt_prefixes
from fastserve_gateway.routing.rendezvous import Rendezvous, stable_hash
from fastserve_gateway.routing.request import RoutedRequest, ServerChoice
from fastserve_gateway.routing.router import Router
from fastserve_gateway.routing.server_load import ServerLoad
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = ("http://a:8001", "http://b:8001", "http://c:8001")
SYSTEM, QUESTION, ANSWER, NEXT = b"s" * 2000, b"q" * 300, b"a" * 700, b"n" * 100


def load(waiting: int = 0, *, jobs: int = 0, computed: int = 0, speed: float = 1000) -> ServerLoad:
    return ServerLoad(jobs, waiting, speed, kv_tokens=10_000, computed_tokens=computed)


def router(*loads: ServerLoad) -> Router:
    made = Router(NAMES[: len(loads)])
    for server, one in enumerate(loads):
        made.on_load(server, one, 0.0)
    return made


def request(*parts: bytes, **fields: Any) -> RoutedRequest:
    return RoutedRequest(sum(map(len, parts)) // 4, prompt_prefixes(parts), **fields)


def chosen(router: Router, request: RoutedRequest, now_s: float = 0.0, **keys: Any) -> ServerChoice:
    choice = router.choose(request, now_s, **keys)
    assert choice is not None
    return choice


def finish(router: Router, choice: ServerChoice) -> None:
    router.on_first_token(choice)
    router.on_end(choice)


# --- prefixes -----------------------------------------------------------------------------------


def test_the_next_turn_has_the_prefixes_of_the_one_before() -> None:
    first = prompt_prefixes([SYSTEM, QUESTION])
    assert [prefix.end for prefix in first] == [512, 1024, 1536, 2000, 2300]
    turn = prompt_prefixes([SYSTEM, QUESTION, ANSWER, NEXT])
    assert turn[: len(first)] == first
    assert turn[-1].end == 3100
    other = prompt_prefixes([SYSTEM, b"x" + QUESTION[1:]])
    assert other[:4] == first[:4]
    assert other[4] != first[4]


def test_prefixes_are_equal_in_all_processes() -> None:
    assert prompt_prefixes([b"abc"]) == ((0xD8BB14D833D59559, 3),)
    assert stable_hash("abc") == 0xD8BB14D833D59559
    assert prompt_prefixes([]) == prompt_prefixes([b""]) == ()


# --- delays -------------------------------------------------------------------------------------


def test_the_least_delay_wins() -> None:
    choice = chosen(router(load(900), load(300), load(600)), RoutedRequest(100))
    assert choice.server == 1
    assert choice.delay_s == pytest.approx((300 / 2 + 100) / 1000)  # half of what is new


def test_a_slow_server_gets_less() -> None:
    both = router(load(speed=3000), load(speed=1000))
    counts = Counter(chosen(both, RoutedRequest(100)).server for _ in range(40))
    assert counts[0] > 2 * counts[1] > 0


def test_what_was_sent_counts_until_its_first_token() -> None:
    pair = router(load(), load())
    first = chosen(pair, RoutedRequest(500))
    second = chosen(pair, RoutedRequest(400))
    assert first.server != second.server
    assert chosen(pair, RoutedRequest(10)).server == second.server
    pair.on_first_token(first)
    assert chosen(pair, RoutedRequest(10)).server == first.server


def test_jobs_of_other_gateways_count() -> None:
    pair = router(load(), load())
    mine = chosen(pair, RoutedRequest(500))
    for now_s in range(2, 9):  # its own request is a part of what the picture shows
        pair.on_load(mine.server, load(500, jobs=1), now_s)
        pair.on_load(1 - mine.server, load(2000, jobs=4), now_s)
    assert chosen(pair, RoutedRequest(10), 8.0).server == mine.server


def test_a_picture_shows_that_prompts_are_computed_although_their_answers_are_not_there() -> None:
    pair = router(load(), load())
    mine = chosen(pair, RoutedRequest(500))
    pair.on_load(mine.server, load(0, jobs=1), 2.0)
    assert chosen(pair, RoutedRequest(0), 2.0, excluded=[1 - mine.server]).delay_s == 0


def test_without_pictures_the_fewest_unfinished_requests_win() -> None:
    three = Router(NAMES)
    choices = [chosen(three, RoutedRequest(100)) for _ in range(9)]
    assert set(Counter(choice.server for choice in choices).values()) == {3}
    finish(three, choices[4])
    assert chosen(three, RoutedRequest(100)).server == choices[4].server


def test_a_stale_picture_is_forgotten() -> None:
    pair = router(load(5000), load())
    assert chosen(pair, RoutedRequest(100), 0.0).server == 1
    pair.on_load(1, load(50), 5.0)
    assert chosen(pair, RoutedRequest(100), 5.0).server == 0  # nothing of this gateway waits there


def test_equal_servers_get_equal_shares() -> None:
    counts = Counter(chosen(Router(NAMES), request(bytes([i]) * 9)).server for i in range(240))
    assert min(counts.values()) > 50


# --- prefixes and sessions ------------------------------------------------------------------------


def test_a_conversation_stays_where_its_prefix_is() -> None:
    three = router(*[load()] * 3)
    first = chosen(three, request(SYSTEM, QUESTION))
    finish(three, first)
    turn = chosen(three, request(SYSTEM, QUESTION, ANSWER, NEXT))
    assert (turn.server, turn.cached_tokens) == (first.server, 575)
    assert turn.delay_s == pytest.approx(200 / 1000)


def test_a_conversation_leaves_a_server_where_it_would_wait_long() -> None:
    pair = router(load(), load())
    first = chosen(pair, request(SYSTEM, QUESTION))
    finish(pair, first)
    for _ in range(20):
        pair.on_load(first.server, load(4000, jobs=5), 1.0)
    assert chosen(pair, request(SYSTEM, QUESTION, NEXT), 1.0).server != first.server


def test_a_prefix_is_lost_when_newer_kv_has_taken_its_place() -> None:
    pair = router(load(), load())
    first = chosen(pair, request(SYSTEM, QUESTION))
    finish(pair, first)
    pair.on_load(first.server, load(computed=9_000), 1.0)
    assert chosen(pair, request(SYSTEM, QUESTION), 1.0).cached_tokens == 575
    pair.on_load(first.server, load(computed=20_000), 2.0)
    assert chosen(pair, request(SYSTEM, QUESTION), 2.0).cached_tokens == 0


def test_a_server_that_was_gone_has_lost_its_kv() -> None:
    one = router(load(computed=500))
    finish(one, chosen(one, request(SYSTEM, session="mine")))
    one.on_down(0)
    assert one.choose(request(SYSTEM), 1.0) is None
    one.on_up(0)
    one.on_load(0, load(computed=3), 2.0)
    first = chosen(one, request(SYSTEM, session="mine"), 2.0)
    assert first.cached_tokens == 0
    finish(one, first)
    one.on_load(0, load(computed=503), 3.0)
    assert chosen(one, request(SYSTEM, session="mine"), 3.0).cached_tokens == 500


def test_the_reused_part_of_a_prompt_is_counted_late() -> None:
    one = router(load(computed=9_000))
    finish(one, chosen(one, request(SYSTEM)))
    for _ in range(9):
        one.on_load(0, load(computed=8_000), 1.0)
        one.on_load(0, load(computed=9_000), 2.0)
    assert chosen(one, request(SYSTEM), 2.0).cached_tokens == 500


def test_a_session_stays_though_its_prompt_has_changed() -> None:
    three = router(*[load()] * 3)
    first = chosen(three, request(SYSTEM, session="mine"))
    finish(three, first)
    three.on_load(first.server, load(200), 1.0)
    changed = request(b"x" * 2000, session="mine")
    assert chosen(three, changed, 1.0).server == first.server
    assert chosen(three, changed, 1.0, excluded=[first.server]).server != first.server


def test_gateways_agree_on_the_home_of_a_conversation() -> None:
    ours, theirs = router(*[load()] * 3), router(*[load()] * 3)
    for server in range(3):  # most jobs are those of others
        ours.on_load(server, load(jobs=10), 0.0)
        theirs.on_load(server, load(jobs=10), 0.0)
    for number in range(50):
        question = b"%d" % number * 300
        first = prompt_prefixes([SYSTEM, question])[-1].key
        mine = chosen(ours, request(SYSTEM, question, conversation=first))
        finish(ours, mine)
        turn = request(SYSTEM, question, ANSWER, NEXT, conversation=first)
        its = chosen(theirs, turn)
        finish(theirs, its)
        assert its.server == mine.server


# --- invariants -----------------------------------------------------------------------------------


@given(
    up=st.lists(st.booleans(), min_size=1, max_size=6),
    excluded=st.sets(st.integers(0, 5)),
    waiting=st.lists(st.integers(0, 10**6), min_size=6, max_size=6),
    session=st.none() | st.just("mine"),
)
def test_none_only_if_no_server_may_be_chosen(
    up: list[bool], excluded: set[int], waiting: list[int], session: str | None
) -> None:
    made = Router([f"s{number}" for number in range(len(up))])
    excluded &= set(range(len(up)))
    allowed = {server for server, is_up in enumerate(up) if is_up} - excluded
    for server, is_up in enumerate(up):
        made.on_load(server, load(waiting[server]), 0.0)
        chosen(made, request(SYSTEM, session=session))  # somewhere, so that there is a memory
        if not is_up:
            made.on_down(server)
    choice = made.choose(request(SYSTEM, QUESTION, session=session), 0.0, excluded)
    assert (choice is None) == (not allowed)
    assert choice is None or choice.server in allowed


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("fetfe")), max_size=40))
def test_nothing_waits_when_all_have_ended(steps: Sequence[tuple[int, str]]) -> None:
    pair = router(load(), load())
    choices = []
    for number, (tokens, what) in enumerate(steps):
        choice = chosen(pair, RoutedRequest(tokens), number)
        choices.append(choice)
        if what == "f":
            pair.on_first_token(choice)
        elif what == "e":
            pair.on_end(choice)
        else:
            pair.on_load(choice.server, load(tokens // 2, jobs=1), number)
    for choice in choices:
        pair.on_end(choice)
        pair.on_end(choice)
    for _ in range(40):
        pair.on_load(0, load(), 100.0)
        pair.on_load(1, load(), 100.0)
    for other in (0, 1):
        delay_s = chosen(pair, RoutedRequest(0), 100.0, excluded=[other]).delay_s
        assert delay_s == pytest.approx(0, abs=1e-6)


@settings(max_examples=40)
@given(
    st.lists(
        # The latest prompt fits, also with all servers: 5 prefixes of 4.
        st.tuples(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 3)),
        max_size=30,
    )
)
def test_the_memory_of_prefixes_is_bounded(notes: Sequence[tuple[list[int], int]]) -> None:
    memory = PrefixMemory(4, max_pairs=20)
    for numbers, server in notes:
        parts = [bytes([number]) * CHUNK_BYTES for number in numbers]
        prefixes = prompt_prefixes(parts)
        memory.note(prefixes, server)
        assert memory.num_pairs <= 20
        assert memory.find(prefixes).get(server, 0) == len(numbers) * CHUNK_BYTES
    for server in range(4):
        memory.forget(server)
    assert memory.num_pairs == 0


@pytest.mark.parametrize("num_servers", [2, 5, 16])
def test_only_a_fair_share_of_keys_moves_when_a_server_leaves(num_servers: int) -> None:
    order = Rendezvous([f"http://10.0.0.{number}:8001" for number in range(num_servers)])
    keys = [stable_hash(str(number)) for number in range(2000)]
    everyone = range(num_servers)
    homes = {key: order.first(key, everyone) for key in keys}
    for gone in everyone:
        others = [server for server in everyone if server != gone]
        moved = [key for key in keys if order.first(key, others) != homes[key]]
        assert all(homes[key] == gone for key in moved)
        assert len(moved) == pytest.approx(2000 / num_servers, rel=0.3)
        heirs = Counter(order.first(key, others) for key in moved)
        assert max(heirs.values()) < 3 * len(moved) / len(others)
