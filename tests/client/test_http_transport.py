from __future__ import annotations

import gzip
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastserve_client import FastServeClient
from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import ClientClosed, InvalidRequest, ServerError
from fastserve_client.http_transport import HttpTransport
from fastserve_client.request import InferRequest

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
    with pytest.raises(InvalidRequest, match="'http://xn--a:8000'"):
        FastServeClient("http://xn--a")


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
