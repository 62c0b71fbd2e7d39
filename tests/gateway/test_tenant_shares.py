"""One tenant's use of the gateway leaves room for the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import httpx2
import pytest
from fastserve_client.errors import InvalidRequest
from fastserve_client.key_file import NamedKey
from fastserve_gateway.auth import ApiKeys
from fastserve_gateway.connections import Connections
from fastserve_gateway.errors import ApiError
from fastserve_gateway.shares import Shares
from fastserve_gateway.turns import NUM_AT_ONCE, Turns
from gateway_thread import GatewayThread, gateway_thread
from hypothesis import given
from hypothesis import strategies as st
from lone_gateway import MAX_BODY_BYTES, settings
from waiting import wait_for

DEADLINE_S = 60.0
KEYS = ApiKeys(
    [NamedKey(name, 1.0, f"sk-{name}", None) for name in ("ann", "mallory")],
    operator_keys=[NamedKey("", 1.0, "sk-op", None)],
)


def nothing() -> None:
    """Of what is refused nobody needs to hear."""


# --- shares ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_whoever_takes_leaves_as_much_free(taken: list[tuple[int, int]]) -> None:
    shares = Shares(100, are_divided=True)
    for holder, amount in taken:
        if shares.allows(holder, amount):
            shares.add(holder, amount)
            free = 100 - sum(map(shares.held, range(4)))
            assert shares.held(holder) <= free
    assert shares.allows("a new one", (100 - sum(map(shares.held, range(4)))) // 2)
    for holder in range(4):
        shares.remove(holder, shares.held(holder))
    assert shares.most("a new one") == 50


def test_who_wants_more_has_it_in_proportion_to_the_weights() -> None:
    weights = {"light": 0.5, "twice": 1.0, "heavy": 1000.0}
    shares = Shares(8000, are_divided=True, weights=weights)
    for _ in range(20):  # requests end, and others take as much as they may
        for holder in weights:
            shares.remove(holder, shares.held(holder))
            shares.add(holder, shares.most(holder))
    free = 8000 - sum(map(shares.held, weights))
    assert free == pytest.approx(1000, abs=10)
    assert [shares.held(holder) / free for holder in weights] == pytest.approx([1, 2, 4], rel=0.02)
    assert shares.allows("of no weight", free // 2)


def test_a_lone_holder_may_have_all() -> None:
    shares = Shares(100, are_divided=False)
    assert shares.allows(None, 100)
    assert not shares.allows(None, 101)


# --- bodies ---------------------------------------------------------------------------------------


@contextmanager
def slow_body(gateway: GatewayThread, key: str) -> Iterator[socket.socket]:
    """All of a large body but its last byte."""
    with socket.create_connection(gateway.address, DEADLINE_S) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {MAX_BODY_BYTES}\r\n\r\n"
        )
        with suppress(ConnectionError):  # a refused body need not come to its end
            client.sendall(head.encode() + b" " * (MAX_BODY_BYTES - 1))
        yield client


def post(gateway: GatewayThread, key: str) -> httpx2.Response:
    body = {"model": "fastserve", "prompt": "a" * 100_000}
    headers = {"x-api-key": key}
    return httpx2.post(
        f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=DEADLINE_S
    )


def test_a_tenants_unfinished_bodies_leave_room_for_others() -> None:
    with gateway_thread(replace(settings(), keys=KEYS)) as gateway, ExitStack() as bodies:

        def is_full() -> bool:
            # A body that comes beside a small one may be refused in its place. So there are more.
            bodies.enter_context(slow_body(gateway, "sk-mallory"))
            return post(gateway, "sk-mallory").status_code == 429

        wait_for(is_full, DEADLINE_S)
        refused = post(gateway, "sk-mallory")
        error = refused.json()["error"]
        assert (error["code"], refused.headers["Retry-After"]) == ("rate_limit_exceeded", "1")
        assert error["message"].startswith("tenant 'mallory' has used up its share of the 4194304")
        assert post(gateway, "sk-ann").status_code == 503  # there is no server
        metrics = httpx2.get(f"{gateway.url}/metrics", headers={"x-api-key": "sk-op"}).text
        assert 'fastserve_gateway_share_refusals_total{resource="held_bytes"}' in metrics
        bodies.close()
        wait_for(lambda: post(gateway, "sk-mallory").status_code == 503, DEADLINE_S)


def test_a_tenant_can_send_the_largest_body() -> None:
    with pytest.raises(InvalidRequest, match="max_held_bytes: got 1048576; must be at least 2097"):
        replace(settings(), keys=KEYS, max_held_bytes=MAX_BODY_BYTES)


# --- turns ----------------------------------------------------------------------------------------


async def test_the_next_turn_is_that_of_another_tenant() -> None:
    turns, begun, go_on = Turns(nothing), list[str | None](), asyncio.Event()

    async def work(tenant: str | None) -> None:
        async with turns.turn(tenant):
            begun.append(tenant)
            await go_on.wait()

    tenants = ["mallory"] * (NUM_AT_ONCE + 3) + ["ann", "bob"]
    working = [asyncio.create_task(work(tenant)) for tenant in tenants]
    async with asyncio.timeout(DEADLINE_S):
        while len(begun) < NUM_AT_ONCE:
            await asyncio.sleep(0)
        working[NUM_AT_ONCE].cancel()  # waits
        go_on.set()
        await asyncio.gather(*working, return_exceptions=True)
        await work("ann")
    assert begun == [*["mallory"] * NUM_AT_ONCE, "mallory", "ann", "bob", "mallory", "ann"]


async def test_a_turn_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refusals: list[str] = []
    turns = Turns(lambda: refusals.append("turns"))
    async with ExitStackOfTurns(turns):
        monkeypatch.setattr("fastserve_gateway.turns.TURN_TIMEOUT_S", 0.01)
        with pytest.raises(ApiError, match="tenant 'ann' has used up its share") as caught:
            async with turns.turn("ann"):
                raise AssertionError
    assert (caught.value.status, refusals) == (429, ["turns"])
    with pytest.raises(ApiError, match="does not answer"):
        async with turns.turn("ann"):
            await asyncio.get_running_loop().create_future()
    async with asyncio.timeout(DEADLINE_S), ExitStackOfTurns(turns):
        pass  # all turns have come back


class ExitStackOfTurns:
    """Has all turns that there are at a time."""

    def __init__(self, turns: Turns) -> None:
        self._turns = [turns.turn("mallory") for _ in range(NUM_AT_ONCE)]

    async def __aenter__(self) -> None:
        for turn in self._turns:
            await turn.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        for turn in self._turns:
            await turn.__aexit__(None, None, None)


# --- connections ----------------------------------------------------------------------------------


class Peer:
    dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_the_oldest_stranger_of_an_address_makes_room() -> None:
    refusals: list[str] = []
    table = Connections(16, are_shared=True, on_refusal=lambda: refusals.append("connections"))
    other, ann = Peer(), Peer()
    table.on_connect(other, "10.0.0.2")
    table.on_connect(ann, "10.0.0.1")
    table.on_request(ann, "ann")
    crowd = [Peer() for _ in range(20)]
    for one in crowd:
        table.on_connect(one, "10.0.0.1")
    still = [one for one in crowd if not one.dropped]
    assert still == crowd[-3:]  # of 8 places for strangers, half of what the other leaves
    assert len(refusals) == 17
    assert not other.dropped
    assert not ann.dropped


def test_a_tenants_connections_leave_places_for_others() -> None:
    table = Connections(8, are_shared=True, on_refusal=nothing)

    def connect(tenant: str) -> Peer:
        peer = Peer()
        table.on_connect(peer, "10.0.0.1")
        table.on_request(peer, tenant)
        return peer

    mallorys = [connect("mallory") for _ in range(4)]
    with pytest.raises(ApiError, match="tenant 'mallory' has used up its share") as refused:
        connect("mallory")
    assert (refused.value.status, refused.value.headers["Connection"]) == (429, "close")
    table.on_request(mallorys[0], "mallory")  # has its place
    anns = [connect("ann") for _ in range(2)]
    table.on_request(mallorys[0], "mallory")
    table.on_end(mallorys[0])
    table.on_end(mallorys[0])
    with pytest.raises(ApiError, match="mallory"):
        connect("mallory")  # 3 of the 6 that ann leaves
    for one in anns:
        table.on_end(one)
    connect("mallory")


def test_connections_that_send_no_key_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve_gateway.connections.MAX_STRANGERS", 8)
    with gateway_thread(replace(settings(), keys=KEYS)) as gateway, ExitStack() as silent:
        kept = socket.create_connection(gateway.address, DEADLINE_S)
        silent.enter_context(kept)
        request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nx-api-key: sk-ann\r\n\r\n"
        kept.sendall(request)
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(30):
            silent.enter_context(socket.create_connection(gateway.address, DEADLINE_S))
        headers = {"x-api-key": "sk-ann"}
        answer = httpx2.get(f"{gateway.url}/v1/models", headers=headers, timeout=DEADLINE_S)
        assert answer.status_code == 200
        kept.sendall(request)
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
