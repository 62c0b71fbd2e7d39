"""``AsyncFastServeClient`` against the running server, by gRPC and HTTP."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import (
    AsyncFastServeClient,
    Completion,
    FastServeClient,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerUnavailable,
)
from serving_client import used_blocks
from waiting import wait_for

DEADLINE_S = 30.0
LONG = 3000  # tokens; takes far longer than any of these tests


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[AsyncFastServeClient]:
    async with AsyncFastServeClient(url) as client:
        yield client


async def wait_until_idle(endpoints: Endpoints) -> None:
    await asyncio.to_thread(wait_for, lambda: used_blocks(endpoints.metrics_url) == 0, DEADLINE_S)


async def wait_until_busy(client: AsyncFastServeClient) -> None:
    """Watches the engine, as metrics come too late for a short job on a busy machine."""
    async with asyncio.timeout(DEADLINE_S), client.watch(0.05) as states:
        async for state in states:
            if state.running:
                return


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
    client: AsyncFastServeClient, url: str, endpoints: Endpoints
) -> None:
    with pytest.raises(InvalidRequest, match=r"^temperature: got -1"):
        async for _ in client.stream("Hello", temperature=-1):
            pass
    with pytest.raises(InvalidRequest, match=r"^max_tokens: got 1000000"):
        await client.generate("Hello", max_tokens=1_000_000)
    with pytest.raises(TypeError, match="unknown option"):
        client.stream("Hello", tempreature=1)  # type: ignore[call-arg]
    with pytest.raises(RequestTimeout, match="did not finish in time"):
        await client.generate("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=0.2)
    await wait_until_idle(endpoints)
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
    assert await client.is_ready()
    async with AsyncFastServeClient(f"{url.partition(':')[0]}://127.0.0.1:9") as nobody:
        assert not await nobody.is_ready()
    with FastServeClient(url) as synchronous:
        assert synchronous.is_ready()


async def test_leaving_the_block_cancels_that_request_only(
    client: AsyncFastServeClient, wait_until_cancelled: Callable[[], None]
) -> None:
    other = client.stream("Hello", max_tokens=40, ignore_eos=True)
    async with client.stream("Hello", max_tokens=LONG, ignore_eos=True) as chunks:
        async for _ in chunks:
            break
    assert [chunk async for chunk in chunks] == []
    assert Completion.from_chunks([chunk async for chunk in other]).num_output_tokens == 40
    await asyncio.to_thread(wait_until_cancelled)


async def test_close_ends_a_blocked_iteration(
    client: AsyncFastServeClient, wait_until_cancelled: Callable[[], None]
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)

    async def consume() -> int:
        return len([chunk async for chunk in chunks])

    consumer = asyncio.create_task(consume())
    await asyncio.wait_for(anext(chunks_of(client)), DEADLINE_S)
    chunks.close()
    await asyncio.wait_for(consumer, DEADLINE_S)
    await asyncio.to_thread(wait_until_cancelled)


def chunks_of(client: AsyncFastServeClient) -> AsyncIterator[object]:
    return client.stream("Hello", max_tokens=1)


async def test_a_timeout_around_a_chunk_ends_the_stream_and_its_request(
    client: AsyncFastServeClient, endpoints: Endpoints
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)

    async def read_all() -> None:
        async for _ in chunks:
            pass

    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(read_all(), 0.5)
    assert [chunk async for chunk in chunks] == []
    states = client.watch(10.0)
    await anext(states)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(states), 0.2)
    assert [state async for state in states] == []
    await wait_until_idle(endpoints)


async def test_a_timeout_without_end_is_none(client: AsyncFastServeClient, url: str) -> None:
    options = {"max_tokens": 3, "ignore_eos": True, "timeout_s": float("inf")}
    assert (await client.generate("Hello", **options)).num_output_tokens == 3
    assert await client.is_ready(float("inf"))
    with FastServeClient(url) as synchronous:
        assert synchronous.is_ready(float("inf"))
        assert synchronous.generate("Hello", **options).num_output_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_the_task_cancels_the_request(
    client: AsyncFastServeClient, wait_until_cancelled: Callable[[], None], stream: bool
) -> None:
    async def work() -> None:
        if stream:
            async for _ in client.stream("Hello", max_tokens=LONG, ignore_eos=True):
                pass
        else:
            await client.generate("Hello", max_tokens=LONG, ignore_eos=True)

    task = asyncio.create_task(work())
    await wait_until_busy(client)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(wait_until_cancelled)


async def test_dropping_the_iterator_cancels_the_request(
    client: AsyncFastServeClient, wait_until_cancelled: Callable[[], None]
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)
    del chunks
    gc.collect()
    await asyncio.to_thread(wait_until_cancelled)


async def test_closing_the_client_ends_its_streams(
    client: AsyncFastServeClient, wait_until_cancelled: Callable[[], None]
) -> None:
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
    await anext(chunks)
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
