from __future__ import annotations

import asyncio
import base64
import gzip
import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
from fastserve_client import AsyncFastServeClient, FastServeClient
from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import (
    ClientClosed,
    ConnectionFailed,
    InvalidRequest,
    RequestTimeout,
    ServerError,
)
from fastserve_client.http_transport import HttpTransport
from fastserve_client.request import InferRequest
from waiting import wait_for

DEADLINE_S = 60.0


def test_closing_leaves_nobody_waiting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        silent.settimeout(DEADLINE_S)
        transport = HttpTransport(Endpoint.parse(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        asking = pool.submit(transport.is_ready, "fastserve", 60.0)
        connection, _ = silent.accept()
        with connection:
            transport.close()
            assert asking.result(DEADLINE_S) is False
    with pytest.raises(ClientClosed):
        transport.start(InferRequest("fastserve", {}), None)
    assert not transport.is_ready("fastserve", 1.0)


@pytest.mark.parametrize("proxy", ["foo:bar", "foo://proxy", "http://proxy:port"])
def test_a_proxy_that_cannot_be(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.delenv("http_proxy", raising=False)
    with pytest.raises(InvalidRequest, match="HTTP_PROXY"):
        FastServeClient("http://127.0.0.1:8000")


@pytest.mark.parametrize("host", ["xn--", "a..b", "a" * 64])
def test_a_host_that_cannot_be(host: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'http://{host}:8000'"):
        FastServeClient(f"http://{host}")


def answer_one(
    server: socket.socket, answer: bytes, before_closing: Callable[[], object] = lambda: None
) -> None:
    """Answers the first request of the next connection, and closes it."""
    connection, _ = server.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(answer)
        before_closing()


EVENT = b'data: {"text_output": "a", "output_ids": 5, "finish_reason": "length"}\n\n'
WHOLE_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(EVENT), EVENT)


async def test_a_request_goes_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(WHOLE_ANSWER)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as proxy:
        address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.setenv("NO_PROXY", "near.invalid:8000")
        for variable in ("http_proxy", "all_proxy"):
            for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
                monkeypatch.delenv(name, raising=False)
            monkeypatch.setenv(variable, f"http://user:secret@{address}")
            async with AsyncFastServeClient("http://far.invalid") as client:
                await client.generate("Hello", timeout_s=DEADLINE_S)
    line = b"POST http://far.invalid:8000/v2/models/fastserve/generate_stream HTTP/1.1\r\n"
    credentials = b"Proxy-Authorization: Basic " + base64.b64encode(b"user:secret")
    assert all(head.startswith(line) and credentials in head for head in heads)
    assert len(heads) == 2
    async with AsyncFastServeClient("http://near.invalid") as client:
        with pytest.raises(ConnectionFailed, match="http://near"):
            await client.generate("Hello", timeout_s=DEADLINE_S)
    assert len(heads) == 2


async def test_a_kept_connection_that_the_server_closed_costs_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(DEADLINE_S)
        may_close = threading.Semaphore(0)
        wait = partial(may_close.acquire, timeout=DEADLINE_S)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        async with AsyncFastServeClient(url) as client:
            for _ in range(3):
                answering = pool.submit(answer_one, server, WHOLE_ANSWER, wait)
                assert (await client.generate("Hello", timeout_s=DEADLINE_S)).text == "a"
                may_close.release()
                answering.result(DEADLINE_S)  # blocks the loop, which so hears of nothing


async def test_requests_that_end_while_they_connect_leave_no_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as silent:
        port = silent.getsockname()[1]

        def connections() -> int:
            found = psutil.Process().net_connections("tcp")
            return sum(1 for one in found if one.raddr and one.raddr.port == port)

        async def ask_in_vain(client: AsyncFastServeClient, seed: int) -> None:
            # Some calls end before they have a task, some while they connect, some later.
            waits_s = random.Random(seed)
            for longest_s in [0.001, 0.002, 0.005, 0.01, 0.02] * 10:
                with pytest.raises(RequestTimeout):
                    await client.generate("Hello", timeout_s=waits_s.uniform(0.0, longest_s))

        async with AsyncFastServeClient(f"http://127.0.0.1:{port}") as client:
            await asyncio.gather(*(ask_in_vain(client, seed) for seed in range(8)))
            await asyncio.to_thread(wait_for, lambda: connections() == 0, DEADLINE_S)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_that_is_not_what_it_says(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    body = gzip.compress(b"data: {}")[5:]
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        server.settimeout(DEADLINE_S)
        answering = pool.submit(answer_one, server, head.encode() + body)
        with FastServeClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
            with pytest.raises(ServerError, match="cannot read the answer"):
                client.generate("Hello", timeout_s=DEADLINE_S)
            assert not client.is_ready(0.1)
        answering.result(DEADLINE_S)
