"""A thousand connections to the gateway and to Triton's HTTP, and slow, half-closed and odd ones.

`make endurance` has the whole numbers, `make test` a tenth or so. What a single connection to the
gateway may do is in tests/gateway/test_gateway_connections.py.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from raw_http import http_post
from running_gateway import RunningGateway
from running_server import rank_stopped
from serving_client import GENERATE, GENERATE_STREAM, post

pytestmark = pytest.mark.usefixtures("unharmed", "all_files_that_may_be_open")

DEADLINE_S = 120.0
GATEWAY, TRITON = "gateway", "Triton HTTP"
MANY_CONNECTIONS, SOME_CONNECTIONS = 1000, 100
READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAMED = {"stream": True, "max_tokens": 200, "ignore_eos": True}


@dataclass(frozen=True)
class Service:
    """A service, and a request to it that needs one token."""

    name: str
    host: str
    port: int

    def request(self, **fields: Any) -> bytes:
        if self.name == GATEWAY:
            path, fields = "/v1/completions", {"model": MODEL_NAME, "prompt": "a"} | fields
        else:
            path, fields = GENERATE_STREAM, {"text_input": "a"} | fields
        return http_post(path, json.dumps({"max_tokens": 1} | fields).encode())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def answers(self) -> float:
        """Seconds until a new client has its answer."""
        began_s = time.monotonic()
        reader, writer = await self.connect()
        writer.write(self.request())
        assert await status_of(reader) == 200
        writer.close()
        return time.monotonic() - began_s


async def status_of(reader: asyncio.StreamReader) -> int | None:
    """The answer's status; None if the connection ends without an answer."""
    with suppress(ConnectionError):
        line = await reader.readline()
        return int(line.split()[1]) if line else None
    return None


@pytest.fixture(params=[GATEWAY, TRITON])
def service(
    request: pytest.FixtureRequest, chatty_server: TritonServer, chatty_gateway: RunningGateway
) -> Service:
    urls = {GATEWAY: chatty_gateway.url, TRITON: chatty_server.endpoints.http_url}
    url = urlsplit(urls[request.param])
    assert url.hostname is not None
    assert url.port is not None
    return Service(request.param, url.hostname, url.port)


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_each_of_many_connections_is_served(
    service: Service, is_long: bool, note: Callable[..., None]
) -> None:
    if service.name == TRITON and not is_long:
        pytest.skip("tritonserver's own code, which leaves some without an answer once in a while")
    number = MANY_CONNECTIONS if is_long else SOME_CONNECTIONS
    ends = [await service.connect() for _ in range(number)]
    began_s = time.monotonic()
    for _, writer in ends:
        writer.write(service.request())
    answers = [asyncio.ensure_future(status_of(reader)) for reader, _ in ends]
    _, late = await asyncio.wait(answers, timeout=DEADLINE_S)
    assert not late, f"{[index for index, one in enumerate(answers) if one in late]} of {service}"
    statuses = [one.result() for one in answers]
    seconds = time.monotonic() - began_s
    for _, writer in ends:
        writer.close()
    assert Counter(statuses) == {200: number}
    note(f"connections, each with a request, {service.name}", number, "each answered", seconds)


BODY_S = 60.0
"""When the gateway gives up on a body; it gives up on headers much earlier."""
TRICKLE_S = 5.0
# On an idle machine it is below 0.1 s.
MOST_WAIT_S = 2.0
# Time that a busy machine may need.
LATE_S = 15.0


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_slow_clients_keep_nobody_from_being_served(
    service: Service, is_long: bool, note: Callable[..., None]
) -> None:
    number = MANY_CONNECTIONS if is_long else SOME_CONNECTIONS
    whole = service.request()
    head = whole.index(b"\r\n\r\n")
    ends = [await service.connect() for _ in range(number)]
    for index, (_, writer) in enumerate(ends):
        writer.write(whole[: head if index % 2 else head + 5])
        await writer.drain()
    # Few, or the gateway gives up on the headers meanwhile.
    waited_s = [await service.answers() for _ in range(20 if is_long else 5)]
    result = "others answered"
    if is_long and service.name == GATEWAY:
        began_s = time.monotonic()
        outcomes = await asyncio.gather(*(trickle(reader, writer) for reader, writer in ends))
        assert outcomes[::2] == [408] * (number // 2)
        assert outcomes[1::2] == [None] * (number // 2)
        assert BODY_S - LATE_S < time.monotonic() - began_s < BODY_S + LATE_S
        result += ", these dropped after 30 s (headers) and 60 s (bodies)"
    else:
        for index, (_, writer) in enumerate(ends):
            writer.write(whole[head if index % 2 else head + 5 :])
        async with asyncio.timeout(DEADLINE_S):
            statuses = await asyncio.gather(*(status_of(reader) for reader, _ in ends))
        assert Counter(statuses) == {200: number}
        result += ", these too at last"
    for _, writer in ends:
        writer.close()
    if is_long:
        assert max(waited_s) < MOST_WAIT_S
    note(f"slow clients, {service.name}", number, result, max(waited_s))


async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
    """Sends a byte now and then, and returns the status of the final answer."""
    status = asyncio.ensure_future(status_of(reader))
    while not status.done():
        await asyncio.wait((status,), timeout=TRICKLE_S)
        with suppress(ConnectionError):
            writer.write(b" ")
            await writer.drain()
    return status.result()


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_half_closed_connections_leave_nothing(
    service: Service, chatty_server: TritonServer, is_long: bool, note: Callable[..., None]
) -> None:
    """The server answers a half-closed client or drops it. Either way its job ends."""
    number = (MANY_CONNECTIONS if is_long else SOME_CONNECTIONS) // 5
    began_s = time.monotonic()

    async def ask(index: int) -> bool:
        reader, writer = await service.connect()
        writer.write(service.request(**STREAMED if index % 2 else {}))
        writer.write_eof()
        with suppress(ConnectionError):
            answer = await reader.read()
        writer.close()
        return answer.endswith((b"0\r\n\r\n", b"}"))

    async with asyncio.timeout(DEADLINE_S):
        # The gateway shall see the end of each before there is an answer.
        is_gateway = service.name == GATEWAY
        with rank_stopped(chatty_server.runtime) if is_gateway else nullcontext():
            whole = sum(await asyncio.gather(*map(ask, range(number))))
    seconds = time.monotonic() - began_s
    assert await service.answers() < DEADLINE_S
    if service.name == GATEWAY:
        assert whole == 0
    result = f"{whole} answered, {number - whole} dropped"
    note(f"half-closed connections, {service.name}", number, result, seconds)


# --- compressed bodies, and what Triton's HTTP does not take ------------------------------------

MANY_BODIES, SOME_BODIES = 32, 4
MOST_GROWTH_BYTES = 150_000_000
ZEROS = b"\0" * (1 << 20)
# Joined gzip parts decompress to the joined whole: a megabyte makes 1 GiB.
COMPRESSED = {"gzip": gzip.compress(ZEROS) * (1 << 10), "deflate": zlib.compress(ZEROS)}


async def test_compressed_bodies_are_not_unpacked(
    service: Service,
    chatty_server: TritonServer,
    chatty_gateway: RunningGateway,
    is_long: bool,
    note: Callable[..., None],
) -> None:
    pid = chatty_gateway.process.pid if service.name == GATEWAY else chatty_server.pid
    process = psutil.Process(pid)
    number = MANY_BODIES if is_long else SOME_BODIES
    before = process.memory_full_info().pss
    began_s = time.monotonic()

    async def send(encoding: str) -> int | None:
        path = "/v1/completions" if service.name == GATEWAY else GENERATE
        reader, writer = await service.connect()
        with suppress(ConnectionError):
            writer.write(http_post(path, COMPRESSED[encoding], f"Content-Encoding: {encoding}\r\n"))
            await writer.drain()
        status = await status_of(reader)
        writer.close()
        return status

    statuses = await asyncio.gather(*(send(name) for name in COMPRESSED for _ in range(number)))
    seconds = time.monotonic() - began_s
    assert set(statuses) == {415 if service.name == GATEWAY else 400}
    assert process.memory_full_info().pss - before < MOST_GROWTH_BYTES
    result = f"refused with {statuses[0]}"
    note(f"compressed bodies, half of 1 GiB, {service.name}", len(statuses), result, seconds)


@pytest.mark.parametrize(
    ("what", "sent"),
    [
        ("headers of a megabyte", READY[:-2] + b"X: ".ljust(1 << 20, b"a") + b"\r\n\r\n"),
        ("100,000 headers", READY[:-2] + b"X: y\r\n" * 100_000 + b"\r\n"),
        ("requests sent ahead", READY * 1000),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_triton_does_not_take_harms_nobody(
    what: str, sent: bytes, chatty_server: TritonServer, note: Callable[..., None]
) -> None:
    """The gateway answers each body, or refuses it with a reason."""
    url = urlsplit(chatty_server.endpoints.http_url)
    began_s = time.monotonic()
    with socket.create_connection((url.hostname, url.port), timeout=1.0) as connection:
        answers = b""
        with suppress(OSError):  # it is closed, or gets no further answer
            connection.sendall(sent)
            while part := connection.recv(1 << 16):
                answers += part
        num_answers = answers.count(b"HTTP/1.1 200 ")
    assert post(chatty_server.endpoints.http_url, GENERATE, {"text_input": "a"}).status_code == 200
    number = sent.count(READY) or 1
    note(f"{what}, Triton HTTP", number, f"{num_answers} answered", time.monotonic() - began_s)
