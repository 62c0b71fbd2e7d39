"""Limits of a connection to the gateway, so that none harms the others."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastserve_gateway import http_connection
from fastserve_gateway.command import GatewayServer
from fastserve_gateway.http_connection import MAX_HEADER_BYTES, MAX_UNANSWERED, HttpConnection
from gateway_thread import gateway_thread
from lone_gateway import MAX_BODY_BYTES, Pictures, settings
from running_gateway import running_gateway
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from waiting import wait_for

DEADLINE_S = 60.0
SHORT_S = 0.2
STALLED_S = 15 * SHORT_S
ATTEMPTS = 5
MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
EVENTS = b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
# Without a Content-Type the gateway answers before the body.
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
JOB = POST + b'Content-Length: 36\r\n\r\n{"model":"fastserve", "prompt": "a"}'
# The upgrade that Java's own client offers with each request.
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
WEBSOCKET = b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"


class Jobs(Pictures):
    """A client whose jobs run until they are cancelled."""

    is_running = False

    async def generate(self, prompt: object, **options: Any) -> None:
        self.is_running = True
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.is_running = False


@dataclass(frozen=True)
class Gateway:
    address: tuple[str, int]
    pictures: Jobs
    server: GatewayServer

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=DEADLINE_S)

    def is_answering(self, path: str) -> bool:
        connections = tuple(self.server.server_state.connections)
        return any(one.is_answering(path) for one in connections if isinstance(one, HttpConnection))

    def answers(self) -> bool:
        with self.connect() as other:
            return status(other, MODELS) == 200


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    pictures = Jobs()
    monkeypatch.setattr("fastserve_gateway.app.AsyncFastServeClient", lambda *_, **__: pictures)
    with gateway_thread(settings()) as running:
        yield Gateway(running.address, pictures, running.server)


def status(connection: socket.socket, request: bytes) -> int:
    """Sends the request, reads the whole answer, and returns its status."""
    connection.sendall(request)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    answer.read()
    return answer.status


def send(connection: socket.socket, data: bytes) -> None:
    """Sends what the gateway takes; it may close the connection before it has all."""
    with suppress(ConnectionError):
        connection.sendall(data)


def rest(connection: socket.socket) -> bytes:
    """Reads until the gateway closes the connection."""
    parts: list[bytes] = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


# --- headers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", MODELS])
@pytest.mark.parametrize(
    "beginning",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + H2C + b"X: ",
        b"GET /health",
    ],
)
def test_headers_have_a_limit(gateway: Gateway, before: bytes, beginning: bytes) -> None:
    with gateway.connect() as connection:
        if before:
            assert status(connection, before) == 200
        send(connection, beginning.ljust(MAX_HEADER_BYTES + 1, b"a"))
        refusal = rest(connection)
    assert refusal.startswith(b"HTTP/1.1 431 ")
    assert b'"error"' in refusal
    assert gateway.answers()


@pytest.mark.parametrize("offer", [b"", H2C], ids=["plain", "h2c"])
def test_headers_have_a_limit_that_come_at_once(gateway: Gateway, offer: bytes) -> None:
    with gateway.connect() as connection:
        request = b"GET /live HTTP/1.1\r\nHost: localhost\r\n" + offer
        request += b"X: a\r\n" * (MAX_HEADER_BYTES // len(b"X: a\r\n")) + b"\r\n"
        send(connection, request)
        assert rest(connection).startswith(b"HTTP/1.1 431 ")


def test_trailers_have_the_same_limit(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        assert status(connection, CHUNKED) == 415
        send(connection, b"0\r\nX: ".ljust(MAX_HEADER_BYTES + 1, b"a"))
        assert rest(connection).startswith(b"HTTP/1.1 431 ")


def test_the_limit_is_that_of_one_request_and_not_of_its_body(gateway: Gateway) -> None:
    connection = http.client.HTTPConnection(*gateway.address, timeout=DEADLINE_S)
    headers = {"Content-Type": "application/json", "X": "a" * (MAX_HEADER_BYTES // 2)}
    kept = None
    for body in (b"", b" " * (3 * MAX_HEADER_BYTES), [b" "] * 1000, b""):
        connection.request("POST", "/v1/completions", body, headers, encode_chunked=True)
        assert kept in (None, connection.sock)
        kept = connection.sock
        answer = connection.getresponse()
        assert (answer.status, answer.reason) == (400, "Bad Request")
        assert b"JSON" in answer.read()
    connection.close()


# --- requests that do not wait for an answer ----------------------------------------------------


def test_some_requests_may_be_sent_ahead(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        connection.sendall(MODELS * MAX_UNANSWERED)
        text = b""
        while text.count(b'"owned_by"') < MAX_UNANSWERED:
            part = connection.recv(1 << 16)
            assert part
            text += part
        assert text.count(b"HTTP/1.1 200 ") == MAX_UNANSWERED


def test_more_are_not_kept(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        send(connection, MODELS * 1000)
        assert rest(connection).count(b"HTTP/1.1 200 ") < 1000
    assert gateway.answers()


def test_a_request_sent_ahead_does_not_hide_that_the_client_is_gone(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway.connect() as connection:
        connection.sendall(EVENTS + MODELS)
        assert connection.recv(1 << 16)
        wait_for(lambda: gateway.pictures.is_watched)
    wait_for(lambda: not gateway.pictures.is_watched)
    assert not caplog.records


def test_nor_one_that_is_sent_later(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        connection.sendall(JOB)
        wait_for(lambda: gateway.pictures.is_running)
        connection.sendall(MODELS)
        wait_for(lambda: gateway.is_answering("/v1/models"))
    wait_for(lambda: not gateway.pictures.is_running)


def test_large_ones_may_not_be_sent_ahead(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        connection.sendall(JOB)
        wait_for(lambda: gateway.pictures.is_running)
        size = HIGH_WATER_LIMIT + 1
        send(connection, POST + b"Content-Length: %d\r\n\r\n" % size + b" " * size)
        assert rest(connection) == b""
        wait_for(lambda: not gateway.pictures.is_running)


# --- offers to go on with another protocol ------------------------------------------------------

LAST = MODELS.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
OTHER = json.dumps({"model": "other", "prompt": "a"}).encode()  # which is a 404
WITH_LENGTH = b"Content-Length: %d\r\n\r\n" % len(OTHER), OTHER
IN_CHUNKS = (
    b"Transfer-Encoding: chunked\r\n\r\n",
    b"8\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (OTHER[:8], len(OTHER) - 8, OTHER[8:]),
)


def statuses(answers: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
@pytest.mark.parametrize(("framing", "body"), [WITH_LENGTH, IN_CHUNKS], ids=["length", "chunks"])
def test_they_are_not_taken_up(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, offer: bytes, framing: bytes, body: bytes
) -> None:
    head = POST + offer + framing
    with gateway.connect() as connection:
        connection.sendall((head + body) * 2 + MODELS[:-2] + offer + b"\r\n" + LAST)
        assert statuses(rest(connection)) == [404, 404, 200, 200]
    with gateway.connect() as connection:
        assert status(connection, MODELS + head) == 200
        connection.sendall(body + LAST)
        assert statuses(rest(connection)) == [404, 200]
    assert not caplog.records


def test_with_more_of_them_than_may_be_sent_ahead(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        send(connection, (MODELS[:-2] + H2C + b"\r\n") * 1000)
        assert len(statuses(rest(connection))) < 1000
    assert gateway.answers()


def test_the_gateway_is_no_proxy(gateway: Gateway) -> None:
    with gateway.connect() as connection:
        connection.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
        assert statuses(rest(connection)) == [400]


# --- bodies that are answered before their end --------------------------------------------------


@pytest.mark.parametrize("in_chunks", [False, True])
def test_who_sends_too_much_is_told(gateway: Gateway, in_chunks: bool) -> None:
    connection = http.client.HTTPConnection(*gateway.address, timeout=DEADLINE_S)
    part = b" " * (1 << 16)
    parts = [part] * (16 * MAX_BODY_BYTES // len(part))  # more than the system holds
    headers = {"Content-Type": "application/json"}
    body = parts if in_chunks else b"".join(parts)
    connection.request("POST", "/v1/completions", body, headers, encode_chunked=in_chunks)
    used = connection.sock
    answer = connection.getresponse()
    assert answer.status == 413
    answer.read()
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 200
    assert connection.sock is used
    connection.close()


def test_who_asks_before_sending_too_much_is_told_and_the_connection_closed(
    gateway: Gateway,
) -> None:
    with gateway.connect() as connection:
        length = b"Content-Length: %d\r\n\r\n" % (2 * MAX_BODY_BYTES)
        connection.sendall(POST + b"Expect: 100-continue\r\n" + length)
        assert statuses(rest(connection)) == [413]


def test_who_sends_too_slowly_may_go_on(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_gateway.body.READ_TIMEOUT_S", SHORT_S)
    with gateway.connect() as connection:
        assert status(connection, POST + b"Content-Length: 3\r\n\r\na") == 408
        assert status(connection, b"bc" + MODELS) == 200


# --- idle and slow connections -------------------------------------------------------------------


@pytest.mark.parametrize("before", [b"", MODELS])
def test_headers_that_do_not_come_are_not_waited_for(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    monkeypatch.setattr(http_connection, "HEADERS_TIMEOUT_S", SHORT_S)
    with gateway.connect() as connection:
        if before:
            assert status(connection, before) == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nX: a")
        assert rest(connection) == b""


@pytest.mark.parametrize("sent", [b"", b"2\r\na"])
def test_nor_is_the_rest_of_a_body_that_was_answered(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_connection, "HEADERS_TIMEOUT_S", SHORT_S)
    with gateway.connect() as connection:
        assert status(connection, CHUNKED) == 415
        connection.sendall(sent)
        assert rest(connection) == b""


@pytest.mark.parametrize("before", [b"", MODELS, CHUNKED + b"0\r\n\r\n"])
def test_idle_ones_end(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, before: bytes) -> None:
    monkeypatch.setattr(gateway.server.config, "timeout_keep_alive", SHORT_S)
    with gateway.connect() as connection:
        if before:
            status(connection, before)
        connection.sendall(b"\r\n")  # some clients end a request like this; it starts no new one
        assert rest(connection) == b""


def test_but_are_kept_longer_than_headers_may_take(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "HEADERS_TIMEOUT_S", SHORT_S)
    with gateway.connect() as connection:
        for request in (MODELS, CHUNKED + b"0\r\n\r\n", MODELS):
            time.sleep(2 * SHORT_S)  # a proxy that has nothing to send
            assert status(connection, request) in (200, 415)


def test_an_answer_may_take_longer(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "HEADERS_TIMEOUT_S", SHORT_S)
    with gateway.connect() as connection:
        connection.sendall(EVENTS)
        until_s = time.monotonic() + 3 * SHORT_S
        while time.monotonic() < until_s:
            assert connection.recv(1 << 20)


@pytest.mark.parametrize("timeout", ["UNREAD_TIMEOUT_S", "STALLED_TIMEOUT_S"])
def test_who_reads_nothing_is_gone(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, timeout: str
) -> None:
    monkeypatch.setattr(http_connection, "UNREAD_TIMEOUT_S", 2 * DEADLINE_S)
    monkeypatch.setattr(http_connection, "STALLED_TIMEOUT_S", 2 * DEADLINE_S)
    monkeypatch.setattr(http_connection, timeout, SHORT_S)
    with gateway.connect() as connection:
        connection.sendall(EVENTS)
        wait_for(lambda: gateway.pictures.num_shown > 0)
        wait_for(lambda: not gateway.pictures.is_watched, DEADLINE_S)


def test_who_reads_slowly_is_not(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "STALLED_TIMEOUT_S", STALLED_S)
    # On a busy machine the reader itself may stand still for longer than it may.
    assert any(stays_for(gateway, 4 / 3 * STALLED_S) for _ in range(ATTEMPTS))


def stays_for(gateway: Gateway, seconds: float) -> bool:
    """Whether a client that reads slowly is still served after this time. Fails if it is not,
    though it never stood still."""
    longest_pause_s = 0.0
    with socket.socket() as connection:
        # Small segments as in a network: the loopback device reports room only after 64 KiB.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        connection.connect(gateway.address)
        connection.sendall(EVENTS)
        began_s = last_s = time.monotonic()
        while last_s < began_s + seconds:
            if not connection.recv(1 << 12):
                assert longest_pause_s > STALLED_S / 2
                return False
            time.sleep(SHORT_S / 4)
            now_s = time.monotonic()
            longest_pause_s = max(longest_pause_s, now_s - last_s)
            last_s = now_s
        return True


def test_as_many_connections_as_the_system_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
    try:
        with running_gateway("127.0.0.1:9", tmp_path / "gateway.log") as running:
            assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
