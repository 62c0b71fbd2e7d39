"""Gateway clients that stop reading are dropped, use little memory, and harm no other client.

`make endurance` has 70 of them, `make test` seven.
"""

from __future__ import annotations

import fcntl
import json
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx2
import psutil
from fastserve_backend.serving.launch import TritonServer
from raw_http import http_post
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway
from serving_client import wait_until_idle
from waiting import wait_for

AT_ONCE = 7  # the eighth place is for a client that reads
ROUNDS, FIRST_ROUNDS = 10, 3
DROPPED_S, HELD_MB, GAP_S = 5.0, 1.0, 1.0
DEADLINE_S = 120.0
# The model process keeps the tensors of tokens. That is not what a client holds.
ONE_TOKEN = {"100": 100}
# Kilobytes a token, so that all buffers on the way are soon full.
WORDY = {
    "model": "fastserve", "prompt": "Hello", "max_tokens": 3000, "ignore_eos": True,
    "stream": True, "logprobs": 20, "logit_bias": ONE_TOKEN,
}  # fmt: skip
NUM_TOKENS = 200
PLAIN = {
    "model": "fastserve", "prompt": "Hello", "max_tokens": NUM_TOKENS, "ignore_eos": True,
    "stream": True, "stream_options": {"include_usage": True}, "logit_bias": ONE_TOKEN,
}  # fmt: skip


def test_clients_that_stop_reading_are_dropped(
    gateway: RunningGateway,
    server: TritonServer,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
) -> None:
    num_rounds = ROUNDS if is_long else 1
    slowest_s = held = 0.0
    ends = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read, gateway, ends)
        try:
            # Later rounds reuse the memory that the first rounds made the processes take.
            for _ in range(FIRST_ROUNDS if is_long else 0):
                drop_some(gateway)
            before = memory(gateway, server)
            for _ in range(num_rounds):
                slowest_s = max(slowest_s, drop_some(gateway))
                held = max(held, memory(gateway, server) - before)
        finally:
            ends.set()
        num_tokens, longest_gap_s = reader.result(DEADLINE_S)
    held_mb = held / AT_ONCE / 1e6
    wait_until_idle(server.endpoints)
    if is_long:
        assert slowest_s <= DROPPED_S
        assert held_mb <= HELD_MB
        assert longest_gap_s <= GAP_S
    row(
        {
            "clients that stop": AT_ONCE * num_rounds,
            "the slowest is dropped after, s": round(slowest_s, 1),
            "one holds, MB": round(held_mb, 2),
            "tokens of one that reads": num_tokens,
            "its longest gap, s": round(longest_gap_s, 2),
        }
    )


def memory(gateway: RunningGateway, server: TritonServer) -> int:
    """Memory of gateway, server and stub in bytes."""
    pids = (gateway.process.pid, server.pid, server.runtime.stub_pid())
    return sum(psutil.Process(pid).memory_info().rss for pid in pids)


def drop_some(gateway: RunningGateway) -> float:
    """Seconds from the last byte that any client has room for until all clients are dropped."""
    process = psutil.Process(gateway.process.pid)
    with ExitStack() as stack:
        clients = [stack.enter_context(stopped_client(gateway)) for _ in range(AT_ONCE)]
        ports = {client.getsockname()[1] for client in clients}
        received: list[int] = []
        last_s = 0.0

        def are_gone() -> bool:
            nonlocal received, last_s
            if (now_received := [unread_bytes(client) for client in clients]) != received:
                received, last_s = now_received, time.monotonic()
            return not ports & {one.raddr.port for one in process.net_connections() if one.raddr}

        wait_for(are_gone, DEADLINE_S)
        return time.monotonic() - last_s


def unread_bytes(connection: socket.socket) -> int:
    """Bytes that the system holds for the client to read."""
    answer = fcntl.ioctl(connection, termios.FIONREAD, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def stopped_client(gateway: RunningGateway) -> socket.socket:
    """A client that has read the beginning of its answer and then stops."""
    url = httpx2.URL(gateway.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    connection.settimeout(REQUEST_TIMEOUT_S)
    connection.connect((url.host, url.port))
    connection.sendall(http_post("/v1/completions", json.dumps(WORDY).encode()))
    assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200 ")
    return connection


def read(gateway: RunningGateway, ends: threading.Event) -> tuple[int, float]:
    """Reads whole answers one by one; returns the number of tokens and the longest gap in
    seconds."""
    num_tokens, longest_gap_s = 0, 0.0
    url = f"{gateway.api_url}/completions"
    with httpx2.Client(timeout=DEADLINE_S) as http:
        while not ends.is_set():
            usage, last_s = {}, 0.0
            with http.stream("POST", url, json=PLAIN) as response:
                for one in response.iter_lines():
                    now_s = time.monotonic()
                    if last_s:
                        longest_gap_s = max(longest_gap_s, now_s - last_s)
                    last_s = now_s
                    if one.startswith("data: {"):
                        usage = json.loads(one.removeprefix("data: "))["usage"] or usage
            assert usage["completion_tokens"] == NUM_TOKENS
            num_tokens += NUM_TOKENS
    return num_tokens, longest_gap_s
