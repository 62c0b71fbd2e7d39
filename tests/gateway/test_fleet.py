"""Which errors send a job to another server, with servers that only refuse or answer."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from fastserve_client.cancelling import cancel_all
from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    ModelLost,
    ServerError,
    ServerFailed,
    ServerOverloaded,
    ServerUnavailable,
)
from fastserve_client.results import Completion
from fastserve_gateway.fleet.silence import LOST_LOOKS
from fastserve_gateway.fleet.watched_server import ServerHealth, WatchedServer
from fleet_servers import (
    CHUNKS,
    FULL,
    GONE,
    MAX_MOVES,
    NO_TRACE,
    Lone,
    Server,
    fleet_of,
    text_of,
    total,
)
from waiting import DEADLINE_S

AT_LIMIT = ServerOverloaded("the tenant 'b' has used its tokens; try again in 60 s")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is lost is looked for every 10 ms."""
    monkeypatch.setattr("fastserve_gateway.fleet.fleet._MOVE_RETRY_S", 0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is lost after 0.2 s without an answer."""
    monkeypatch.setattr("fastserve_gateway.fleet.silence.LOOK_S", 0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer waits 0.1 s for a server."""
    monkeypatch.setattr("fastserve_gateway.fleet.kept_answer.MOVE_DEADLINE_S", 0.1)


@pytest.mark.parametrize("error", [FULL, GONE, ServerFailed("rank 0 died")])
async def test_what_is_refused_goes_to_the_next(error: ClientError) -> None:
    servers = [Server(error), Server(error), Server()]
    fleet = fleet_of(*servers)
    for _ in range(5):
        assert await text_of(fleet) == "ab"
        assert (await fleet.generate("Hello", **NO_TRACE)).text == "ab"
    assert servers[2].num_jobs == 10


@pytest.mark.parametrize("error", [InvalidRequest("n: got 0"), ServerError("rank 0 died")])
async def test_other_errors_are_final(error: ClientError) -> None:
    servers = [Server(error), Server(error)]
    with pytest.raises(type(error)):
        await text_of(fleet_of(*servers))
    assert sum(server.num_jobs for server in servers) == 1


@pytest.mark.parametrize(
    "error", [GONE, ServerUnavailable("the server is shutting down"), ServerFailed("rank 0 died")]
)
@pytest.mark.parametrize("options", [{}, {"seed": 7, "prompt_logprobs": 1, "logprobs": 0}])
async def test_what_has_begun_goes_on_at_another_server(
    error: ClientError, options: dict[str, Any]
) -> None:
    servers = [Server(error, num_chunks=1), Server(error, num_chunks=1)]
    fleet, texts = fleet_of(*servers), []
    async with aclosing(fleet.stream("Hello", **NO_TRACE, **options)) as chunks:
        async for chunk in chunks:
            texts.append(chunk.text)
    assert texts == ["a", "b"]
    begun, rest = sorted(
        (server.options for server in servers), key=lambda one: len(one[0]["output_ids_so_far"])
    )
    assert len(begun) == len(rest) == 1
    assert rest[0].pop("output_ids_so_far") == [1]
    assert begun[0]["seed"] == rest[0]["seed"] == options.get("seed", rest[0]["seed"])
    expected = {**begun[0]}
    del expected["output_ids_so_far"]
    expected.pop("prompt_logprobs", None)  # they came with the first chunk
    assert rest[0] == expected
    assert (await fleet.generate("Hello", **NO_TRACE)).token_ids == (1, 2)
    assert (total(fleet, "moved"), total(fleet, "not_moved"), total(fleet, "retried")) == (2, 0, 0)


async def test_with_no_moves_the_error_is_final() -> None:
    servers = [Server(GONE, num_chunks=1), Server(GONE, num_chunks=1)]
    fleet = fleet_of(*servers, max_moves=0)
    with pytest.raises(ConnectionFailed):
        await text_of(fleet)
    assert sum(server.num_jobs for server in servers) == 1
    assert total(fleet, "not_moved") == 1


async def test_an_answer_that_is_too_long_to_keep_does_not_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve_gateway.fleet.kept_answer._MAX_KEPT_TOKENS", 0)
    with pytest.raises(ConnectionFailed):
        await text_of(fleet_of(Server(GONE, num_chunks=1), Server(GONE, num_chunks=1)))


async def test_an_error_after_the_end_does_not_matter() -> None:
    assert await text_of(fleet_of(Server(GONE, num_chunks=2), Server(GONE, num_chunks=2))) == "ab"


@pytest.mark.parametrize("refusal", [InvalidRequest("n: got 0"), ServerError("a bug")])
async def test_a_server_that_refuses_the_rest_ends_the_answer_with_the_loss(
    refusal: ClientError,
) -> None:
    """The request was fine, so the client must not hear that it is wrong."""
    servers = [Server(GONE, num_chunks=1, rest_error=refusal) for _ in range(2)]
    fleet = fleet_of(*servers)
    with pytest.raises(ConnectionFailed):
        await text_of(fleet)
    assert total(fleet, "not_moved") == 1


@pytest.mark.usefixtures("hasty")
async def test_an_answer_waits_for_a_server_that_can_go_on() -> None:
    servers = [Server(GONE, num_chunks=1, rest_error=FULL) for _ in range(2)]
    fleet = fleet_of(*servers)
    text = asyncio.create_task(text_of(fleet))
    while min(server.num_jobs for server in servers) < 3:
        await asyncio.sleep(0.01)
    servers[0].rest_error = servers[0].error = None
    assert await text == "ab"
    assert (total(fleet, "moved"), total(fleet, "not_moved")) == (1, 0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("error", [GONE, ServerFailed("rank 0 died"), ModelLost("not healthy")])
@pytest.mark.parametrize("is_whole", [False, True])
async def test_an_answer_waits_for_the_only_server(error: ClientError, is_whole: bool) -> None:
    """It gets nothing while it is away, which would cost moves."""
    server = Lone(error)
    fleet, moves = fleet_of(server), []
    ask = {**NO_TRACE, "on_moved": lambda: moves.append(1)}

    async def whole() -> str:
        return (await fleet.generate("Hello", **ask)).text

    async def streamed() -> str:
        async with aclosing(fleet.stream("Hello", **ask)) as chunks:
            return "".join([chunk.text async for chunk in chunks])

    text = asyncio.create_task(whole() if is_whole else streamed())
    async with asyncio.timeout(DEADLINE_S):
        while server.num_questions < MAX_MOVES + 2:
            await asyncio.sleep(0.01)
        assert server.num_jobs == 1
        server.back = True
        assert await text == "ab"
    assert (server.num_jobs, len(moves)) == (2, 1)
    assert (total(fleet, "moved"), total(fleet, "not_moved")) == (1, 0)
    so_far = [options["output_ids_so_far"] for options in server.options]
    assert so_far == ([[], []] if is_whole else [[], [1]])


@pytest.mark.parametrize("error", [GONE, FULL, ServerUnavailable("it is shutting down")])
async def test_what_the_only_server_has_not_begun_does_not_wait(error: ClientError) -> None:
    class Refusing(Server):
        async def generate(self, prompt: str, **options: Any) -> Completion:
            self.num_answers += not isinstance(error, ConnectionFailed)  # to others, or this one
            raise error

    fleet = fleet_of(Refusing(error))
    for lost in (text_of(fleet), fleet.generate("Hello", **NO_TRACE)):
        with pytest.raises(type(error)):
            await lost
    assert total(fleet, "not_moved") == 0


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("num_servers", [1, 2])
async def test_a_fleet_that_is_closed_ends_what_waits(num_servers: int) -> None:
    fleet = fleet_of(*(Lone(rest_error=FULL, back=True) for _ in range(num_servers)))
    async with aclosing(fleet.stream("Hello", **NO_TRACE)) as chunks:
        assert (await anext(chunks)).text == "a"
        rest = asyncio.create_task(anext(chunks))
        await asyncio.sleep(0)
        await fleet.close()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(ConnectionFailed):
                await rest


@pytest.mark.usefixtures("hasty", "impatient")
@pytest.mark.parametrize(
    "servers",
    [
        [Server(GONE, num_chunks=1, rest_error=FULL) for _ in range(2)],
        [Lone(back=True, rest_error=FULL)],
        [Lone()],
    ],
    ids=["two are full", "the only one is full", "the only one stays away"],
)
async def test_it_does_not_wait_for_ever(servers: list[Server]) -> None:
    fleet = fleet_of(*servers)
    with pytest.raises(ConnectionFailed):
        await text_of(fleet)
    assert (total(fleet, "moved"), total(fleet, "not_moved")) == (0, 1)


async def test_log_probabilities_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [replace(chunk, cumulative_logprob=-1.5) for chunk in CHUNKS]
    monkeypatch.setattr("fleet_servers.CHUNKS", chunks)  # each server counts from its first token
    fleet = fleet_of(Server(GONE, num_chunks=1), Server(GONE, num_chunks=1))
    assert (await fleet.generate("Hello", **NO_TRACE)).cumulative_logprob == -3.0


async def test_what_a_hanging_server_has_begun_goes_on_at_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve_gateway.fleet.watched_server.SILENT_S", 0.05)
    hung = Server(hangs=True, num_chunks=1)
    fleet = fleet_of(hung, Server())
    for number in itertools.count():
        text = asyncio.create_task(text_of(fleet, str(number)))
        while not (text.done() or hung.num_read):
            await asyncio.sleep(0)
        if hung.num_read:
            break
    async with fleet:
        assert await text == "ab"
    assert total(fleet, "moved") == 1


@pytest.mark.parametrize("errors", [[GONE, FULL], [FULL, GONE], [FULL]])
async def test_one_that_is_full_decides_the_error(errors: list[ClientError]) -> None:
    with pytest.raises(ServerOverloaded):
        await text_of(fleet_of(*map(Server, errors)))


@pytest.mark.parametrize("errors", [[AT_LIMIT, FULL], [FULL, AT_LIMIT]])
async def test_the_client_hears_of_the_server_that_may_take_it_first(
    errors: list[ClientError],
) -> None:
    with pytest.raises(ServerOverloaded) as refused:
        await text_of(fleet_of(*map(Server, errors)))
    assert refused.value is FULL


@pytest.mark.parametrize("error", [GONE, ServerFailed("rank 0 died"), ModelLost("not healthy")])
@pytest.mark.parametrize("num_chunks", [0, 1])
async def test_a_job_that_kills_its_servers_does_not_kill_all(
    num_chunks: int, error: ClientError
) -> None:
    servers = [Server(error, num_chunks=num_chunks, rest_error=error) for _ in range(8)]
    with pytest.raises(type(error)):
        await text_of(fleet_of(*servers))
    assert sum(server.num_jobs for server in servers) == 4


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("error", [GONE, ServerFailed("rank 0 died"), ModelLost("not healthy")])
async def test_a_job_that_kills_the_only_server_is_not_tried_for_ever(error: ClientError) -> None:
    server = Lone(error, rest_error=error, back=True)
    fleet = fleet_of(server)
    for number, lost in enumerate((text_of(fleet), fleet.generate("Hello", **NO_TRACE)), 1):
        with pytest.raises(type(error)):
            await lost
        assert server.num_jobs == number * (1 + MAX_MOVES)


async def test_closing_a_stream_closes_that_of_its_server() -> None:
    servers = [Server(FULL), Server()]
    async with aclosing(fleet_of(*servers).stream("Hello", **NO_TRACE)) as chunks:
        await anext(chunks)
        servers[0].closed = servers[1].closed = False
    assert [server.closed for server in servers] == [False, True]


async def test_a_cancelled_task_closes_the_stream() -> None:
    server = Server()
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        async with aclosing(fleet_of(server, Server(FULL)).stream("Hello", **NO_TRACE)) as chunks:
            async for _ in chunks:
                await waiting

    task = asyncio.create_task(read())
    while not server.num_jobs:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert server.closed


@pytest.mark.usefixtures("quick")
async def test_what_a_hanging_server_has_not_begun_goes_to_the_next() -> None:
    """Its connection holds, so nothing else ends these jobs."""
    hung = Server(hangs=True)
    fleet = fleet_of(hung, Server())
    texts = asyncio.gather(*(text_of(fleet, str(n)) for n in range(9)))
    wholes = asyncio.gather(*(fleet.generate(str(n), **NO_TRACE) for n in range(9)))
    asked = asyncio.gather(*(fleet.detokenize([n]) for n in range(9)))
    while not texts.done() and not hung.num_jobs:
        await asyncio.sleep(0)
    async with fleet:
        assert await asked == ["a"] * 9
        assert await texts == [whole.text for whole in await wholes] == ["ab"] * 9
    assert hung.num_jobs > 0


@pytest.mark.usefixtures("quick", "impatient")
@pytest.mark.parametrize("num_servers", [1, 2])
async def test_a_model_that_hangs_ends_its_streams_and_gets_nothing_more(num_servers: int) -> None:
    """Until it answers again."""
    servers = [Server(hangs=True, num_chunks=1) for _ in range(num_servers)]
    async with fleet_of(*servers) as fleet:
        with pytest.raises(ConnectionFailed):
            await text_of(fleet)
        num_jobs = sum(server.num_jobs for server in servers)
        assert num_jobs == 1
        async with asyncio.timeout(DEADLINE_S):
            while await fleet.is_ready():
                await asyncio.sleep(0.01)
        for lost in (text_of(fleet), fleet.generate("Hello", **NO_TRACE), fleet.detokenize([5])):
            with pytest.raises(ServerUnavailable, match="no server of model m"):
                await lost
        assert sum(server.num_jobs for server in servers) == num_jobs
        for server in servers:
            server.hangs = False
        async with asyncio.timeout(DEADLINE_S):
            while not await fleet.is_ready():
                await asyncio.sleep(0.01)
        assert await text_of(fleet) == "ab"


@pytest.mark.usefixtures("quick")
async def test_a_model_that_answers_anything_is_not_lost() -> None:
    """It may not get round to questions while it computes, or take in requests meanwhile."""

    class Busy(Server):
        async def detokenize(self, token_ids: list[int]) -> str:
            await self.drops.wait()
            raise GONE

    server = Busy()
    async with fleet_of(server) as fleet:
        for _ in range(3 * LOST_LOOKS):
            server.num_answers += 1
            await asyncio.sleep(0.01)
            assert await fleet.is_ready()


async def test_a_server_that_has_not_answered_yet_gets_nothing_while_others_have() -> None:
    hung, server = Server(hangs=True), Server()
    async with fleet_of(hung, server) as fleet:
        while not await fleet.is_ready():
            await asyncio.sleep(0)
        await asyncio.gather(*(text_of(fleet, str(n)) for n in range(9)))
    assert (hung.num_jobs, server.num_jobs) == (0, 9)


async def test_a_server_that_cannot_be_watched_is_down_and_tried_again() -> None:
    class Unwatchable:
        model = "m"
        num_tries = 0

        def watch(self, interval_s: float) -> None:
            self.num_tries += 1
            raise RuntimeError("a bug")

    client: Any = Unwatchable()
    server = WatchedServer("a", client, lambda load: None, lambda: None)
    task = asyncio.create_task(server.follow())
    async with asyncio.timeout(30.0):
        while client.num_tries < 2:
            await asyncio.sleep(0.01)
    assert server.health is ServerHealth.DOWN
    await cancel_all((task,))
