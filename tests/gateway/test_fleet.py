"""Which errors send a job to another server, with servers that only refuse or answer."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
from fastserve_client.cancelling import cancel_all
from fastserve_client.errors import (
    ClientError,
    ConnectionFailed,
    InvalidRequest,
    ServerError,
    ServerFailed,
    ServerOverloaded,
    ServerUnavailable,
)
from fastserve_client.results import Chunk, Completion
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.fleet.fleet_metrics import FleetMetrics
from fastserve_gateway.fleet.silence import LOST_LOOKS
from fastserve_gateway.fleet.watched_server import ServerHealth, WatchedServer
from prometheus_client import CollectorRegistry
from waiting import DEADLINE_S

CHUNKS = [Chunk("a", (1,), None, 1), Chunk("b", (2,), "length", 1)]
MAX_MOVES = 3
FULL = ServerOverloaded("4 requests are queued already; try again later")
AT_LIMIT = ServerOverloaded("the tenant 'b' has used its tokens; try again in 60 s")
GONE = ConnectionFailed("gone")
NO_TRACE: dict[str, Any] = {"request_id": "", "trace_context": None}


@dataclass
class Server:
    """A client whose server answers, or fails so many chunks later. It fails with ``rest_error``
    where it is to go on with an answer."""

    error: ClientError | None = None
    num_chunks: int = 0
    rest_error: ClientError | None = None
    num_jobs: int = 0
    num_read: int = 0
    options: list[dict[str, Any]] = field(default_factory=list)
    read: list[Chunk] = field(default_factory=list)
    closed: bool = False
    hangs: bool = False
    num_answers: int = 0
    only_streams: bool = False
    drops: asyncio.Event = field(default_factory=asyncio.Event)
    model: str = "m"
    endpoint: str = "its URL"

    def watch(self, interval_s: float) -> Server:
        return Server(hangs=True, drops=self.drops) if self.hangs else Server(FULL)

    async def is_ready(self) -> bool:
        return True  # as Triton says of a model that hangs

    def drop_calls(self) -> None:
        self.drops.set()
        self.drops = asyncio.Event()

    async def close(self) -> None:
        pass

    def stream(self, prompt: str, **options: Any) -> Self:
        self.num_jobs += 1
        self.num_read = 0
        so_far = list(options.get("output_ids_so_far", ()))
        self.options.append({**options, "output_ids_so_far": so_far})
        self.read = CHUNKS[len(so_far) :]
        return self

    async def generate(self, prompt: str, **options: Any) -> Completion:
        async with self.stream(prompt) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])

    async def detokenize(self, token_ids: list[int]) -> str:
        if self.hangs:
            await self.drops.wait()
            raise GONE
        return (await anext(self.stream(""))).text

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.closed = True

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self.hangs and self.num_read == self.num_chunks:
            await self.drops.wait()
            raise GONE
        self.num_answers += 1
        if self.rest_error is not None and self.options[-1]["output_ids_so_far"]:
            raise self.rest_error
        if self.error is not None and self.num_read == self.num_chunks:
            raise self.error
        if not self.read:
            raise StopAsyncIteration
        self.num_read += 1
        return self.read.pop(0)


def fleet_of(*servers: Server, max_moves: int = MAX_MOVES) -> Fleet:
    clients: dict[str, Any] = {f"server {n}": server for n, server in enumerate(servers)}
    return Fleet("m", clients, FleetMetrics(CollectorRegistry()), max_moves)


def total(fleet: Fleet, name: str) -> float:
    """A metric of all servers together."""
    counter = getattr(fleet._metrics, name)
    return sum(
        sample.value
        for family in counter.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    )


async def text_of(fleet: Fleet, prompt: str = "Hello") -> str:
    async with aclosing(fleet.stream(prompt, **NO_TRACE)) as chunks:
        return "".join([chunk.text async for chunk in chunks])


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


async def test_an_answer_waits_for_a_server_that_can_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve_gateway.fleet.fleet._MOVE_RETRY_S", 0.01)
    servers = [Server(GONE, num_chunks=1, rest_error=FULL) for _ in range(2)]
    fleet = fleet_of(*servers)
    text = asyncio.create_task(text_of(fleet))
    while min(server.num_jobs for server in servers) < 3:
        await asyncio.sleep(0.01)
    servers[0].rest_error = servers[0].error = None
    assert await text == "ab"
    assert (total(fleet, "moved"), total(fleet, "not_moved")) == (1, 0)


async def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_gateway.fleet.fleet._MOVE_RETRY_S", 0.01)
    monkeypatch.setattr("fastserve_gateway.fleet.kept_answer.MOVE_DEADLINE_S", 0.1)
    fleet = fleet_of(*(Server(GONE, num_chunks=1, rest_error=FULL) for _ in range(2)))
    with pytest.raises(ConnectionFailed):
        await text_of(fleet)
    assert (total(fleet, "moved"), total(fleet, "not_moved")) == (0, 1)


async def test_log_probabilities_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [replace(chunk, cumulative_logprob=-1.5) for chunk in CHUNKS]
    monkeypatch.setattr(f"{__name__}.CHUNKS", chunks)  # each server counts from its first token
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


@pytest.mark.parametrize("num_chunks", [0, 1])
async def test_a_job_that_kills_its_servers_does_not_kill_all(num_chunks: int) -> None:
    servers = [Server(GONE, num_chunks=num_chunks, rest_error=GONE) for _ in range(8)]
    with pytest.raises(ConnectionFailed):
        await text_of(fleet_of(*servers))
    assert sum(server.num_jobs for server in servers) == 4


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


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is lost after 0.2 s without an answer."""
    monkeypatch.setattr("fastserve_gateway.fleet.silence.LOOK_S", 0.01)


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


@pytest.mark.usefixtures("quick")
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
