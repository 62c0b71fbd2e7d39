"""``AsyncFastServeClient`` against the running server, by gRPC and HTTP."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from asyncio_jobs import job_held_meanwhile
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import (
    AsyncFastServeClient,
    AsyncTokenStream,
    Completion,
    FastServeClient,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerUnavailable,
)
from running_server import rank_stopped
from serving_client import unfinished_jobs, used_blocks
from waiting import DEADLINE_S, wait_for

LONG = 3000  # tokens


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[AsyncFastServeClient]:
    async with AsyncFastServeClient(url) as client:
        yield client


async def wait_until_idle(endpoints: Endpoints) -> None:
    await asyncio.to_thread(wait_for, lambda: used_blocks(endpoints.metrics_url) == 0, DEADLINE_S)


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
    client: AsyncFastServeClient, url: str, server: TritonServer
) -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: got -1"):
        async for _ in client.stream("Hello", temperature=-1):
            pass
    with pytest.raises(InvalidRequest, match=r"^max_tokens: got 1000000"):
        await client.generate("Hello", max_tokens=1_000_000)
    with pytest.raises(TypeError, match="unknown option"):
        client.stream("Hello", tempreature=1)  # type: ignore[call-arg]
    with (
        rank_stopped(server.runtime),
        pytest.raises(RequestTimeout, match="did not finish in time"),
    ):
        await client.generate("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=0.2)
    await wait_until_idle(server.endpoints)
    async with AsyncFastServeClient(url, model="nosuch") as other:
        assert not await other.is_ready()
        with pytest.raises(ServerUnavailable, match="nosuch"):
            await other.generate("Hello")


async def test_whenever_time_is_up_it_is_a_timeout(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    async def ask_in_vain(seed: int) -> None:
        # Time is up while the call starts, connects or sends, or later.
        waits_s = random.Random(seed)
        for longest_s in [0.001, 0.002, 0.005, 0.01, 0.02] * 15:
            wait_s = waits_s.uniform(0.0, longest_s)
            with pytest.raises(RequestTimeout):
                await client.generate("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=wait_s)

    await asyncio.gather(*(ask_in_vain(seed) for seed in range(8)))
    await wait_until_idle(endpoints)


async def test_max_tokens_can_be_clipped_to_what_fits(client: AsyncFastServeClient) -> None:
    prompt = [5] * 3830  # of the 3840 tokens that the KV cache holds
    with pytest.raises(InvalidRequest, match="max_tokens"):
        await client.generate(prompt, max_tokens=50, ignore_eos=True)
    completion = await client.generate(prompt, max_tokens=50, clip_max_tokens=True, ignore_eos=True)
    assert completion.num_output_tokens == 10
    assert completion.finish_reason == "length"
    with pytest.raises(InvalidRequest, match="input_ids"):
        await client.generate([5] * 5000, max_tokens=50, clip_max_tokens=True)


async def test_is_ready(client: AsyncFastServeClient, url: str) -> None:
    assert await client.is_ready(DEADLINE_S)
    async with AsyncFastServeClient(f"{url.partition(':')[0]}://127.0.0.1:9") as nobody:
        assert not await nobody.is_ready()
    with FastServeClient(url) as synchronous:
        assert synchronous.is_ready(DEADLINE_S)


async def begun(client: AsyncFastServeClient) -> AsyncTokenStream:
    """A long stream whose first chunk is read."""
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)
    return chunks


async def test_leaving_the_block_cancels_that_request_only(
    client: AsyncFastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    async with job_held_meanwhile(server, lambda: begun(client)) as chunks:
        other = client.stream("Hello", max_tokens=40, ignore_eos=True)
        async with chunks:
            pass
        assert [chunk async for chunk in chunks] == []
    assert Completion.from_chunks([chunk async for chunk in other]).num_output_tokens == 40
    await asyncio.to_thread(wait_until_cancelled)


async def test_close_ends_a_blocked_iteration(
    client: AsyncFastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    async with job_held_meanwhile(server, lambda: begun(client)) as chunks:
        consumer = asyncio.create_task(anext_to_the_end(chunks))
        await client.describe(timeout_s=DEADLINE_S)  # meanwhile the consumer waits for a chunk
        assert not consumer.done()
        chunks.close()
        await asyncio.wait_for(consumer, DEADLINE_S)
    await asyncio.to_thread(wait_until_cancelled)


async def test_a_timeout_around_a_chunk_ends_the_stream_and_its_request(
    client: AsyncFastServeClient, server: TritonServer
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    with rank_stopped(server.runtime), pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext_to_the_end(chunks), 0.5)
    assert [chunk async for chunk in chunks] == []
    states = client.watch(10.0)
    await anext(states)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(states), 0.2)
    assert [state async for state in states] == []
    await wait_until_idle(server.endpoints)


async def test_a_timeout_without_end_is_none(client: AsyncFastServeClient, url: str) -> None:
    options = {"max_tokens": 3, "ignore_eos": True, "timeout_s": float("inf")}
    assert (await client.generate("Hello", **options)).num_output_tokens == 3
    assert await client.is_ready(float("inf"))
    with FastServeClient(url) as synchronous:
        assert synchronous.is_ready(float("inf"))
        assert synchronous.generate("Hello", **options).num_output_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_the_task_cancels_the_request(
    client: AsyncFastServeClient,
    server: TritonServer,
    wait_until_cancelled: Callable[[], None],
    stream: bool,
) -> None:
    async def work() -> None:
        if stream:
            await anext_to_the_end(client.stream("Hello", max_tokens=LONG, ignore_eos=True))
        else:
            await client.generate("Hello", max_tokens=LONG, ignore_eos=True)

    with rank_stopped(server.runtime):
        task = asyncio.create_task(work())
        is_there = lambda: unfinished_jobs(server.endpoints.metrics_url) == 1  # noqa: E731
        await asyncio.to_thread(wait_for, is_there)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.to_thread(wait_until_cancelled)


async def test_dropping_the_iterator_cancels_the_request(
    client: AsyncFastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    kept: list[object] = []

    async def start() -> None:
        kept[:] = [await begun(client)]

    async with job_held_meanwhile(server, start):
        kept.clear()
        gc.collect()
    await asyncio.to_thread(wait_until_cancelled)


async def test_closing_the_client_ends_its_streams(
    client: AsyncFastServeClient, server: TritonServer, wait_until_cancelled: Callable[[], None]
) -> None:
    async with job_held_meanwhile(server, lambda: begun(client)) as chunks:
        consumer = asyncio.create_task(anext_to_the_end(chunks))
        await client.close()
        with pytest.raises(RequestCancelled):
            await asyncio.wait_for(consumer, DEADLINE_S)
    with pytest.raises(RequestCancelled, match="the client is closed"):
        client.stream("Hello")
    assert not await client.is_ready()
    await asyncio.to_thread(wait_until_cancelled)


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
