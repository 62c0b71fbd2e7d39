"""A client that goes away frees its job's KV blocks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from serving_client import (
    GrpcStream,
    ended_jobs,
    generate,
    http_stream,
    unfinished_jobs,
    used_blocks,
    wait_until_idle,
)
from waiting import wait_for

LIMIT_S = 0.25
# A single measurement on a busy machine says little, so the best of several counts.
TRIES = 8

LONG_REQUEST = {"text_input": "a long one", "max_tokens": 3500, "ignore_eos": True}

# A client in a process that is killed: only the kernel tells the server of its end.
KILLED_CLIENT = """
import sys, threading
sys.path[:0] = sys.argv[2:]
from serving_client import GrpcStream
stream = GrpcStream(
    sys.argv[1], text_input="a long one", stream=True, max_tokens=3500, ignore_eos=True
)
stream.first_token()
print("streaming", flush=True)
threading.Event().wait()
"""


def cancel_grpc_stream(endpoints: Endpoints) -> Callable[[], None]:
    stream = GrpcStream(endpoints.grpc_url, stream=True, **LONG_REQUEST)
    stream.first_token()
    return stream.cancel


def cancel_waiting_answer(endpoints: Endpoints) -> Callable[[], None]:
    stream = GrpcStream(endpoints.grpc_url, stream=False, **LONG_REQUEST)
    wait_for(lambda: used_blocks(endpoints.metrics_url) > 0)
    return stream.cancel


def kill_client(endpoints: Endpoints) -> Callable[[], None]:
    client = subprocess.Popen(
        [sys.executable, "-c", KILLED_CLIENT, endpoints.grpc_url, *sys.path],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "streaming\n"

    def kill() -> None:
        client.kill()
        client.communicate()

    return kill


def close_http_stream(endpoints: Endpoints) -> Callable[[], None]:
    stack = ExitStack()
    events = stack.enter_context(http_stream(endpoints.http_url, LONG_REQUEST | {"stream": True}))
    next(events)

    def close() -> None:
        next(events)  # it streams still
        stack.close()

    return close


@pytest.mark.parametrize(
    "begin", [cancel_grpc_stream, cancel_waiting_answer, kill_client, close_http_stream]
)
def test_blocks_are_free_soon(
    begin: Callable[[Endpoints], Callable[[], None]], endpoints: Endpoints
) -> None:
    url = endpoints.metrics_url
    times = []
    while len(times) < TRIES and not (times and times[-1] < LIMIT_S):
        wait_until_idle(endpoints)
        cancelled = ended_jobs(url, "cancelled")
        leave = begin(endpoints)
        wait_for(lambda: used_blocks(url) > 0)
        started = time.monotonic()
        leave()
        wait_for(lambda: used_blocks(url) == 0)
        times.append(time.monotonic() - started)
        # The job was cancelled, not merely fast.
        wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + 1)  # noqa: B023
    assert min(times) < LIMIT_S, times


def test_others_go_on(endpoints: Endpoints) -> None:
    alone = generate(endpoints.grpc_url, text_input="b", max_tokens=200, seed=3, ignore_eos=True)
    leave = cancel_grpc_stream(endpoints)
    stays = GrpcStream(endpoints.grpc_url, text_input="b", max_tokens=200, seed=3, ignore_eos=True)
    leave()
    answer = stays.finish()
    assert answer.error is None
    assert answer.token_ids == alone.token_ids
    assert answer.num_finals == 1


def test_many_cancelled_at_once(endpoints: Endpoints) -> None:
    wait_until_idle(endpoints)
    url = endpoints.metrics_url
    cancelled = ended_jobs(url, "cancelled")
    streams = [
        GrpcStream(endpoints.grpc_url, stream=bool(n % 2), **LONG_REQUEST) for n in range(30)
    ]
    wait_for(lambda: unfinished_jobs(url) == len(streams))
    for stream in streams:
        stream.cancel()
    wait_until_idle(endpoints)
    assert ended_jobs(url, "cancelled") == cancelled + len(streams)
    assert generate(endpoints.grpc_url, text_input="b", max_tokens=3).num_finals == 1
