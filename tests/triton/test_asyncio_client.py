"""``AsyncFastServeClient`` against the running server, and retries of both clients."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
import pytest_asyncio
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import (
    AsyncFastServeClient,
    Completion,
    ConnectionFailed,
    FastServeClient,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerError,
)
from serving_client import used_blocks, wait_for

DEADLINE_S = 30.0
LONG = 3000  # tokens; takes far longer than any of these tests waits


@pytest_asyncio.fixture
async def client(endpoints: Endpoints) -> AsyncIterator[AsyncFastServeClient]:
    async with AsyncFastServeClient(endpoints.grpc_url) as client:
        yield client


async def wait_until_idle(endpoints: Endpoints) -> None:
    await asyncio.to_thread(wait_for, lambda: used_blocks(endpoints.metrics_url) == 0, DEADLINE_S)


async def wait_until_busy(endpoints: Endpoints) -> None:
    await asyncio.to_thread(wait_for, lambda: used_blocks(endpoints.metrics_url) > 0, DEADLINE_S)


async def test_the_results_are_the_synchronous_clients(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    chunks = [chunk async for chunk in client.stream("Hello", **options)]
    whole = await client.generate("Hello", **options)
    assert Completion.from_chunks(chunks) == whole
    with FastServeClient(endpoints.grpc_url) as other:
        assert other.generate("Hello", **options) == whole
    assert whole.num_output_tokens == 12
    timed = await client.generate([5, 6, 7], max_tokens=2, perf_metrics=True)
    assert timed.perf is not None
    assert timed.num_input_tokens == 3


async def test_errors_are_the_synchronous_clients(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: got -1"):
        async for _ in client.stream("Hello", temperature=-1):
            pass
    with pytest.raises(InvalidRequest, match=r"^max_tokens: got 1000000"):
        await client.generate("Hello", max_tokens=1_000_000)
    with pytest.raises(TypeError, match="unknown sampling option"):
        client.stream("Hello", tempreature=1)  # type: ignore[call-arg]
    with pytest.raises(RequestTimeout, match="did not finish in time"):
        await client.generate("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=0.2)
    async with AsyncFastServeClient(endpoints.grpc_url, model="nosuch") as other:
        assert not await other.is_ready()
        with pytest.raises(ServerError, match="nosuch"):
            await other.generate("Hello")


async def test_max_tokens_can_be_clipped_to_what_fits(client: AsyncFastServeClient) -> None:
    prompt = [5] * 3830  # of the 3840 tokens that the KV cache holds
    with pytest.raises(InvalidRequest, match="max_tokens"):
        await client.generate(prompt, max_tokens=50, ignore_eos=True)
    completion = await client.generate(prompt, max_tokens=50, clip_max_tokens=True, ignore_eos=True)
    assert completion.num_output_tokens == 10
    assert completion.finish_reason == "length"
    with pytest.raises(InvalidRequest, match="text_input"):
        await client.generate([5] * 5000, max_tokens=50, clip_max_tokens=True)


async def test_is_ready(client: AsyncFastServeClient, endpoints: Endpoints) -> None:
    assert await client.is_ready()
    async with AsyncFastServeClient("grpc://127.0.0.1:9") as nobody:
        assert not await nobody.is_ready()
    with FastServeClient(endpoints.grpc_url) as synchronous:
        assert synchronous.is_ready()


async def test_leaving_the_block_cancels_that_request_only(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    other = client.stream("Hello", max_tokens=40, ignore_eos=True)
    async with client.stream("Hello", max_tokens=LONG, ignore_eos=True) as chunks:
        async for _ in chunks:
            break
    assert [chunk async for chunk in chunks] == []
    assert Completion.from_chunks([chunk async for chunk in other]).num_output_tokens == 40
    await wait_until_idle(endpoints)


async def test_close_ends_a_blocked_iteration(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)

    async def consume() -> int:
        return len([chunk async for chunk in chunks])

    consumer = asyncio.create_task(consume())
    await asyncio.wait_for(anext(chunks_of(client)), DEADLINE_S)
    chunks.close()
    await asyncio.wait_for(consumer, DEADLINE_S)
    await wait_until_idle(endpoints)


def chunks_of(client: AsyncFastServeClient) -> AsyncIterator[object]:
    return client.stream("Hello", max_tokens=1)


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_the_task_cancels_the_request(
    client: AsyncFastServeClient, endpoints: Endpoints, stream: bool
) -> None:
    async def work() -> None:
        if stream:
            async for _ in client.stream("Hello", max_tokens=LONG, ignore_eos=True):
                pass
        else:
            await client.generate("Hello", max_tokens=LONG, ignore_eos=True)

    task = asyncio.create_task(work())
    await wait_until_busy(endpoints)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until_idle(endpoints)


async def test_dropping_the_iterator_cancels_the_request(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)
    del chunks
    gc.collect()
    await wait_until_idle(endpoints)


async def test_closing_the_client_ends_its_streams(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)
    consumer = asyncio.create_task(anext_to_the_end(chunks))
    await client.close()
    with pytest.raises(RequestCancelled):
        await asyncio.wait_for(consumer, DEADLINE_S)
    await wait_until_idle(endpoints)


async def anext_to_the_end(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass


async def test_many_streams_at_once(client: AsyncFastServeClient) -> None:
    expected = await client.generate("Hello", max_tokens=20, temperature=0, ignore_eos=True)

    async def consume() -> Completion:
        chunks = client.stream("Hello", max_tokens=20, temperature=0, ignore_eos=True)
        return Completion.from_chunks([chunk async for chunk in chunks])

    results = await asyncio.wait_for(asyncio.gather(*(consume() for _ in range(64))), DEADLINE_S)
    assert results == [expected] * 64


def test_it_needs_an_event_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncFastServeClient()


# --- retries, of both clients -------------------------------------------------------------------


class LateServer:
    """A port that drops its first ``num_refused`` connections and then leads to the server."""

    def __init__(self, target: str, num_refused: int) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._num_refused = num_refused
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self.num_connections = 0
        self.url = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                connection, _ = self._listener.accept()
                self.num_connections += 1
                if self.num_connections <= self._num_refused:
                    connection.close()
                    continue
                server = socket.create_connection(self._target)
                self._sockets += [connection, server]
                for source, sink in ((connection, server), (server, connection)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # closed by the other direction, or at the end
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@pytest.fixture
def late_server(endpoints: Endpoints) -> Iterator[LateServer]:
    server = LateServer(endpoints.grpc_url, num_refused=2)
    yield server
    server.close()


def test_the_synchronous_client_tries_again_if_asked_to(late_server: LateServer) -> None:
    with FastServeClient(late_server.url) as once, pytest.raises(ConnectionFailed):
        once.generate("Hello", max_tokens=3)
    with FastServeClient(late_server.url, max_retries=8) as client:
        completion = client.generate("Hello", max_tokens=3, ignore_eos=True, timeout_s=DEADLINE_S)
    assert completion.num_output_tokens == 3
    assert late_server.num_connections >= 3


async def test_the_asyncio_client_tries_again_if_asked_to(late_server: LateServer) -> None:
    async with AsyncFastServeClient(late_server.url) as once:
        with pytest.raises(ConnectionFailed):
            await once.generate("Hello", max_tokens=3)
    async with AsyncFastServeClient(late_server.url, max_retries=8) as client:
        completion = await client.generate(
            "Hello", max_tokens=3, ignore_eos=True, timeout_s=DEADLINE_S
        )
    assert completion.num_output_tokens == 3


async def test_retries_end() -> None:
    with FastServeClient("grpc://127.0.0.1:9", max_retries=2) as client:
        with pytest.raises(ConnectionFailed):
            client.generate("Hello")
        with pytest.raises(ConnectionFailed):
            list(client.stream("Hello", timeout_s=0.05))
    async with AsyncFastServeClient("grpc://127.0.0.1:9", max_retries=2) as client:
        with pytest.raises(ConnectionFailed):
            await client.generate("Hello")
    with pytest.raises(InvalidRequest, match="max_retries: got -1"):
        FastServeClient(max_retries=-1)


async def test_close_ends_the_wait_for_a_retry() -> None:
    async with AsyncFastServeClient("grpc://127.0.0.1:9", max_retries=100) as client:
        chunks = client.stream("Hello")
        consumer = asyncio.create_task(anext_to_the_end(chunks))
        done, _ = await asyncio.wait((consumer,), timeout=0.3)
        assert not done  # it tries and tries
        chunks.close()
        await asyncio.wait_for(consumer, DEADLINE_S)


async def test_what_was_refused_is_not_sent_again(endpoints: Endpoints) -> None:
    async with AsyncFastServeClient(endpoints.grpc_url, max_retries=1_000_000) as client:
        with pytest.raises(InvalidRequest):
            await client.generate("Hello", max_tokens=-1, timeout_s=DEADLINE_S)
