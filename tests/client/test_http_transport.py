from __future__ import annotations

import asyncio
import gzip
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from fastserve_client import AsyncFastServeClient, FastServeClient
from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import ClientClosed, InvalidRequest, RequestTimeout, ServerError
from fastserve_client.http_transport import HttpTransport
from fastserve_client.request import InferRequest
from waiting import wait_for

DEADLINE_S = 10.0


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


def test_a_host_that_cannot_be() -> None:
    with pytest.raises(InvalidRequest, match="'http://axn--:8000'"):
        FastServeClient("http://axn--")


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

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(head.encode() + body)

        answering = pool.submit(answer)
        with FastServeClient(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
            with pytest.raises(ServerError, match="cannot read the answer"):
                client.generate("Hello", timeout_s=DEADLINE_S)
            assert not client.is_ready(0.1)
        answering.result(DEADLINE_S)
