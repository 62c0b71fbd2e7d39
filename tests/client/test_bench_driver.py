"""The load test's driver: when it sends a request, what it measures, what it counts as a
failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
from fastserve_bench.connection import Request, TimedAnswer
from fastserve_bench.driver import Driver
from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerOverloaded,
    ServerUnavailable,
)

DEADLINE_S = 60.0
REQUEST = Request([40, 41, 42], max_tokens=4, exact=True)


def answer(output_tokens: int = 4, queued_s: float | None = None) -> TimedAnswer:
    now_s = time.monotonic()
    return TimedAnswer(now_s, now_s + 0.5, 3, output_tokens, queued_s)


class Server:
    """Gives the test's answers, and counts the requests under way."""

    def __init__(self, respond: Callable[[int], Awaitable[TimedAnswer]]) -> None:
        self.num_sent = self.num_open = self.most_open = 0
        self._respond = respond

    async def check(self) -> None:
        pass

    async def send(self, request: Request, timeout_s: float) -> TimedAnswer:
        number = self.num_sent
        self.num_sent += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self._respond(number)
        finally:
            self.num_open -= 1

    async def close(self) -> None:
        pass


def driver(server: Server, num_jobs: int) -> Driver:
    return Driver(server, [REQUEST] * num_jobs, 1.0, lambda _: None)


async def test_an_open_loop_sends_whatever_has_finished() -> None:
    all_sent = asyncio.Event()

    async def respond(number: int) -> TimedAnswer:
        if number == 9:
            all_sent.set()
        await all_sent.wait()  # a closed loop would wait here for ever
        return answer()

    one = driver(Server(respond), 10)
    arrivals_s = [number * 0.01 for number in range(10)]
    await asyncio.wait_for(one.open_loop(arrivals_s), DEADLINE_S)
    outcome = one.outcome
    assert sorted(record.arrival_s for record in outcome.records) == arrivals_s
    assert len(outcome.send_lateness_s) == one.num_sent == 10
    assert one.num_output_tokens == 40
    assert not outcome.interrupted


async def test_latency_counts_from_the_arrival_and_not_from_the_sending() -> None:
    async def respond(number: int) -> TimedAnswer:
        return answer(queued_s=0.0)

    one = driver(Server(respond), 1)
    await asyncio.wait_for(one.open_loop([-2.0]), DEADLINE_S)  # 2 s late already
    (record,) = one.outcome.records
    assert record.ttft_s >= one.outcome.send_lateness_s[0] >= 2.0
    assert record.first_scheduled_s is not None
    assert record.first_scheduled_s - record.arrival_s >= 2.0


async def test_a_closed_loop_keeps_so_many_under_way() -> None:
    async def respond(number: int) -> TimedAnswer:
        await asyncio.sleep(0)
        return answer()

    server = Server(respond)
    one = driver(server, 20)
    await asyncio.wait_for(one.closed_loop(3), DEADLINE_S)
    assert (server.most_open, len(one.outcome.records)) == (3, 20)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ServerOverloaded(""), "refused"),
        (ServerUnavailable(""), "unavailable"),
        (ConnectionFailed(""), "unavailable"),
        (RequestTimeout(""), "timed out"),
        (RequestCancelled(""), "cancelled"),
        (InvalidRequest(""), "invalid"),
        (ServerError(""), "failed"),
    ],
)
async def test_failures_are_counted_by_kind_and_end_nothing(error: ClientError, kind: str) -> None:
    async def respond(number: int) -> TimedAnswer:
        if number == 1:
            raise error
        return answer()

    one = driver(Server(respond), 3)
    await asyncio.wait_for(one.open_loop([0.0, 0.0, 0.0]), DEADLINE_S)
    assert len(one.outcome.records) == 2
    assert [failure.kind.value for failure in one.outcome.failures] == [kind]


async def test_another_length_than_the_wanted_one_is_a_failure() -> None:
    async def respond(number: int) -> TimedAnswer:
        return answer(output_tokens=3)

    one = driver(Server(respond), 1)
    await one.open_loop([0.0])
    (failure,) = one.outcome.failures
    assert failure.kind.value == "wrong length"
    assert failure.message == "3 tokens came instead of 4"


@pytest.mark.parametrize("closed", [False, True])
async def test_what_is_under_way_when_interrupted_is_cancelled(closed: bool) -> None:
    started = asyncio.Event()

    async def respond(number: int) -> TimedAnswer:
        if number == 0:
            return answer()
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = Server(respond)
    one = driver(server, 3)
    run = one.closed_loop(1) if closed else one.open_loop([0.0, 0.0, 1000.0])
    task = asyncio.ensure_future(run)
    await asyncio.wait_for(started.wait(), DEADLINE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, DEADLINE_S)
    assert (server.num_sent, server.num_open) == (2, 0)
    assert len(one.outcome.records) == 1
    assert [failure.kind.value for failure in one.outcome.failures] == ["cancelled"]
    assert one.outcome.interrupted


async def test_the_last_failure_ends_a_run() -> None:
    async def respond(number: int) -> TimedAnswer:
        if number == 1:
            await asyncio.sleep(0.05)
            raise ServerError("broken")
        now_s = time.monotonic()
        return TimedAnswer(now_s, now_s, 3, 4)

    one = driver(Server(respond), 2)
    await asyncio.wait_for(one.open_loop([0.0, 0.0]), DEADLINE_S)
    outcome = one.outcome
    assert outcome.duration_s == outcome.last_failure_s >= 0.05
    assert outcome.duration_s > outcome.records[0].last_token_s
