"""A client that goes away frees its job's KV blocks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from fastserve_backend.job import FinishReason
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from running_server import job_held, rank_stopped
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
    ended = all_ended_jobs(endpoints)
    stream = GrpcStream(endpoints.grpc_url, stream=False, **LONG_REQUEST)
    url = endpoints.metrics_url
    wait_for(lambda: unfinished_jobs(url) > 0 or all_ended_jobs(endpoints) > ended)
    return stream.cancel


def all_ended_jobs(endpoints: Endpoints) -> float:
    return sum(ended_jobs(endpoints.metrics_url, reason.value) for reason in FinishReason)


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
    return stack.close


@pytest.mark.parametrize(
    "begin", [cancel_grpc_stream, cancel_waiting_answer, kill_client, close_http_stream]
)
def test_blocks_are_free_soon(
    begin: Callable[[Endpoints], Callable[[], None]], server: TritonServer
) -> None:
    endpoints, url = server.endpoints, server.endpoints.metrics_url
    wait_until_idle(endpoints)
    cancelled = ended_jobs(url, "cancelled")
    with job_held(server, lambda: begin(endpoints)) as leave:
        wait_for(lambda: used_blocks(url) > 0)
        leave()
    wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + 1)
    wait_for(lambda: used_blocks(url) == 0)


def test_others_go_on(endpoints: Endpoints) -> None:
    alone = generate(endpoints.grpc_url, text_input="b", max_tokens=200, seed=3, ignore_eos=True)
    leave = cancel_grpc_stream(endpoints)
    stays = GrpcStream(endpoints.grpc_url, text_input="b", max_tokens=200, seed=3, ignore_eos=True)
    leave()
    answer = stays.finish()
    assert answer.error is None
    assert answer.token_ids == alone.token_ids
    assert answer.num_finals == 1


def test_many_cancelled_at_once(server: TritonServer) -> None:
    endpoints, url = server.endpoints, server.endpoints.metrics_url
    wait_until_idle(endpoints)
    cancelled = ended_jobs(url, "cancelled")
    with rank_stopped(server.runtime):
        streams = [
            GrpcStream(endpoints.grpc_url, stream=bool(n % 2), **LONG_REQUEST) for n in range(30)
        ]
        wait_for(lambda: unfinished_jobs(url) == len(streams))
        for stream in streams:
            stream.cancel()
    wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + len(streams))
    wait_for(lambda: used_blocks(url) == 0)
    assert generate(endpoints.grpc_url, text_input="b", max_tokens=3).num_finals == 1
