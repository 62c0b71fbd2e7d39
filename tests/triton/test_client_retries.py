"""Retries and remaining errors if a server is late, overloaded, draining or dead."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest
from asyncio_jobs import job_held_meanwhile
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import (
    AsyncFastServeClient,
    AsyncTokenStream,
    ConnectionFailed,
    Endpoint,
    FastServeClient,
    InvalidRequest,
    RequestTimeout,
    ServerOverloaded,
    ServerUnavailable,
    TokenStream,
)
from relay import Relay
from running_server import job_held, running_server
from serving_client import wait_until_idle
from waiting import wait_for

DEADLINE_S = 120.0  # for a restart, too
LONG = 3000  # tokens
SCHEMES = ("grpc", "http")


@pytest.fixture
def late_server(url: str) -> Iterator[Relay]:
    """A relay that drops its first two connections and then leads to the server."""
    relay = Relay(Endpoint.parse(url).target, num_refused=2)
    yield relay
    relay.close()


@pytest.fixture
def late_url(url: str, late_server: Relay) -> str:
    return f"{Endpoint.parse(url).scheme}://127.0.0.1:{late_server.port}"


def test_the_synchronous_client_tries_again_if_asked_to(late_url: str, late_server: Relay) -> None:
    with FastServeClient(late_url) as once, pytest.raises(ConnectionFailed):
        once.generate("Hello", max_tokens=3)
    with FastServeClient(late_url, max_retries=8) as client:
        completion = client.generate("Hello", max_tokens=3, ignore_eos=True, timeout_s=DEADLINE_S)
    assert completion.num_output_tokens == 3
    assert late_server.num_connections >= 3


async def test_a_long_way_to_the_server_is_no_failure(url: str) -> None:
    endpoint = Endpoint.parse(url)
    relay = Relay(endpoint.target, delay_s=0.5)
    far_url = f"{endpoint.scheme}://127.0.0.1:{relay.port}"
    with FastServeClient(far_url) as client:
        assert client.generate("Hello", max_tokens=3, ignore_eos=True).num_output_tokens == 3
    async with AsyncFastServeClient(far_url) as client:
        assert (await client.generate("Hello", max_tokens=3, ignore_eos=True)).token_ids
    relay.close()


async def test_the_asyncio_client_tries_again_if_asked_to(late_url: str) -> None:
    async with AsyncFastServeClient(late_url) as once:
        with pytest.raises(ConnectionFailed):
            await once.generate("Hello", max_tokens=3)
    async with AsyncFastServeClient(late_url, max_retries=8) as client:
        completion = await client.generate(
            "Hello", max_tokens=3, ignore_eos=True, timeout_s=DEADLINE_S
        )
    assert completion.num_output_tokens == 3


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_retries_end(scheme: str) -> None:
    nobody = f"{scheme}://127.0.0.1:9"
    refused = f"no server at {nobody} \\(Connection refused\\)"
    with FastServeClient(nobody, max_retries=2) as client:
        with pytest.raises(ConnectionFailed, match=refused):
            client.generate("Hello")
        # On a busy machine time may be up before the connection is refused.
        with pytest.raises((ConnectionFailed, RequestTimeout)):
            list(client.stream("Hello", timeout_s=0.05))
    async with AsyncFastServeClient(nobody, max_retries=2) as client:
        with pytest.raises(ConnectionFailed, match=refused):
            await client.generate("Hello")


def test_a_negative_number_of_retries_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_retries: got -1"):
        FastServeClient(max_retries=-1)


async def anext_to_the_end(chunks: AsyncIterator[object]) -> None:
    async for _ in chunks:
        pass


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_close_ends_the_wait_for_a_retry(scheme: str) -> None:
    async with AsyncFastServeClient(f"{scheme}://127.0.0.1:9", max_retries=100) as client:
        chunks = client.stream("Hello")
        consumer = asyncio.create_task(anext_to_the_end(chunks))
        done, _ = await asyncio.wait((consumer,), timeout=0.3)
        assert not done  # it keeps trying
        chunks.close()
        await asyncio.wait_for(consumer, DEADLINE_S)


async def test_what_was_refused_is_not_sent_again(url: str) -> None:
    async with AsyncFastServeClient(url, max_retries=1_000_000) as client:
        with pytest.raises(InvalidRequest):
            await client.generate("Hello", max_tokens=-1, timeout_s=DEADLINE_S)


# --- a server with a short queue, to be killed and stopped --------------------------------------


@pytest.fixture(scope="module")
def start_fragile(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], TritonServer]]:
    """Returns the running server, or a new one if a test has stopped it."""
    config = tiny_config.with_keys(max_queued_requests=1)
    started: list[TritonServer] = []

    with ExitStack() as stack:

        def start() -> TritonServer:
            if not started or started[-1].stop_requested:
                log_path = tmp_path_factory.mktemp("fragile") / "server.log"
                started.append(stack.enter_context(running_server(config, log_path)))
            return started[-1]

        yield start


@pytest.fixture
def fragile(start_fragile: Callable[[], TritonServer]) -> TritonServer:
    return start_fragile()


@pytest.fixture(params=SCHEMES)
def fragile_url(request: pytest.FixtureRequest, fragile: TritonServer) -> str:
    return url_of(fragile.endpoints, request.param)


def url_of(endpoints: Endpoints, scheme: str) -> str:
    return endpoints.http_url if scheme == "http" else f"grpc://{endpoints.grpc_url}"


async def test_a_full_queue_and_a_place_in_it(fragile: TritonServer, fragile_url: str) -> None:
    full = "requests are queued already"
    async with AsyncFastServeClient(fragile_url) as client:

        async def start() -> AsyncTokenStream:
            chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True)
            await anext(chunks)
            return chunks

        await asyncio.to_thread(wait_until_idle, fragile.endpoints)
        async with AsyncFastServeClient(fragile_url, max_retries=1000) as patient:
            async with job_held_meanwhile(fragile, start) as chunks:
                with pytest.raises(ServerOverloaded, match=full):
                    await client.generate("Hello", max_tokens=1)
                with (
                    FastServeClient(fragile_url) as synchronous,
                    pytest.raises(ServerOverloaded, match=full),
                ):
                    await asyncio.to_thread(synchronous.generate, "Hello", max_tokens=1)
                work = patient.generate("Hello", max_tokens=1, timeout_s=DEADLINE_S)
                waiting = asyncio.create_task(work)
                done, _ = await asyncio.wait((waiting,), timeout=0.3)
                assert not done
                chunks.close()
            assert (await waiting).num_output_tokens == 1


def begun(client: FastServeClient) -> TokenStream:
    """A long stream whose first chunk is read."""
    chunks = client.stream("Hello", max_tokens=LONG, ignore_eos=True, timeout_s=DEADLINE_S)
    next(chunks)
    return chunks


def test_what_has_begun_is_not_sent_again(fragile: TritonServer, fragile_url: str) -> None:
    restarts = fragile.restarts
    wait_until_idle(fragile.endpoints)
    with FastServeClient(fragile_url, max_retries=1000) as client:
        with job_held(fragile, lambda: begun(client)) as chunks:
            assert fragile.pid is not None
            os.kill(fragile.pid, signal.SIGKILL)
            with pytest.raises(ConnectionFailed):
                list(chunks)
        # The launcher restarts the server, and the same client finds it.
        assert client.generate("Hello", max_tokens=1, timeout_s=DEADLINE_S).num_output_tokens == 1
    # The restart counts after the launcher's own first token, which may come after the client's.
    wait_for(lambda: fragile.restarts == restarts + 1, DEADLINE_S)


def test_a_server_that_drains_and_then_is_gone(fragile: TritonServer) -> None:
    wait_until_idle(fragile.endpoints)
    urls = [url_of(fragile.endpoints, scheme) for scheme in SCHEMES]
    stopper = threading.Thread(target=fragile.stop)
    with FastServeClient(urls[0]) as grpc, FastServeClient(urls[1]) as http:
        with job_held(fragile, lambda: begun(http)) as chunks:
            stopper.start()
            for client in (grpc, http):
                wait_for(lambda client=client: is_draining(client))
        with chunks:
            assert next(chunks).token_ids  # accepted requests go on
        stopper.join(DEADLINE_S)
        assert not stopper.is_alive()
        for client in (grpc, http):
            with pytest.raises(ConnectionFailed):
                client.generate("Hello", max_tokens=1)
            assert not client.is_ready()


def is_draining(client: FastServeClient) -> bool:
    """Whether the server refuses a request because it shuts down, and not because its queue is
    full."""
    with pytest.raises(ServerUnavailable) as caught:
        client.generate("Hello", max_tokens=1)
    return type(caught.value) is ServerUnavailable
