"""Priority, objectives and tenant reach the job in every way that a request may name them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, contextmanager
from typing import Any

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import AsyncFastServeClient, FastServeClient
from fastserve_client.engine_state import EngineState
from fastserve_client.terminal import ExitCode
from running_server import job_held
from serving_client import GrpcStream, http_stream, metric, wait_until_idle
from waiting import DEADLINE_S, wait_for

COMMAND_TIMEOUT_S = 90.0
ATTEMPTS = 10
LONG = {"text_input": "a long one", "stream": True, "max_tokens": 3500, "ignore_eos": True}
OBJECTIVES = {"ttft_slo_ms": 250.0, "tpot_slo_ms": 0.5}
SERVICE = {"priority": -4, "tenant": 'the "acme" é', **OBJECTIVES}

Start = Callable[[Endpoints], AbstractContextManager[Any]]
"""Starts a long job with ``SERVICE``, which ends with the context."""


@contextmanager
def grpc(endpoints: Endpoints, **request: Any) -> Any:
    stream = GrpcStream(endpoints.grpc_url, **LONG, **request)
    stream.first_token()
    yield
    stream.cancel()


def http(endpoints: Endpoints, **fields: Any) -> AbstractContextManager[Any]:
    return http_stream(endpoints.http_url, LONG | fields)


@contextmanager
def python_client(endpoints: Endpoints) -> Any:
    with FastServeClient(endpoints.grpc_url) as client:
        stream = client.stream("a long one", max_tokens=3500, ignore_eos=True, **SERVICE)
        with closing(stream):
            next(stream)
            yield


WAYS: dict[str, Start] = {
    "tensors": lambda endpoints: grpc(endpoints, **SERVICE),
    "object": lambda endpoints: grpc(endpoints, sampling_parameters=json.dumps(SERVICE)),
    "text in an object": lambda endpoints: grpc(
        endpoints,
        sampling_parameters=json.dumps({name: str(value) for name, value in SERVICE.items()}),
    ),
    # As a request parameter of gRPC, `priority` is Triton's own.
    "parameters": lambda endpoints: grpc(
        endpoints, priority=-4, parameters={**OBJECTIVES, "tenant": SERVICE["tenant"]}
    ),
    "HTTP fields": lambda endpoints: http(endpoints, **SERVICE),
    "HTTP parameters": lambda endpoints: http(endpoints, parameters=SERVICE),
    "client": python_client,
}


async def picture_of(endpoints: Endpoints) -> EngineState:
    async with (
        AsyncFastServeClient(endpoints.grpc_url) as client,
        client.watch(0.05) as watch,
        asyncio.timeout(DEADLINE_S),
    ):
        return await anext(watch)


def picture_with_a_job(endpoints: Endpoints, start: Start) -> EngineState:
    """Starts the job again if it ends before the picture is taken."""
    for _ in range(ATTEMPTS):
        wait_until_idle(endpoints)
        with start(endpoints):
            state = asyncio.run(picture_of(endpoints))
        if state.jobs:
            return state
    raise AssertionError(f"the job ended {ATTEMPTS} times before the picture")


@pytest.mark.parametrize("start", WAYS.values(), ids=WAYS.keys())
def test_the_job_has_it(start: Start, endpoints: Endpoints) -> None:
    state = picture_with_a_job(endpoints, start)
    (job,) = state.jobs
    assert (job.priority, job.tenant) == (SERVICE["priority"], SERVICE["tenant"])
    assert (job.ttft_slo_s, job.tpot_slo_s) == (0.25, 0.0005)
    assert job.late_s is not None
    assert [(one.priority, one.num_jobs) for one in state.priorities] == [(-4, 1)]


def test_the_asyncio_client_takes_it_too(endpoints: Endpoints) -> None:
    async def main() -> EngineState:
        async with AsyncFastServeClient(endpoints.http_url) as client:
            for _ in range(ATTEMPTS):
                stream = client.stream("a long one", max_tokens=3500, ignore_eos=True, **SERVICE)
                async with stream:
                    await anext(stream)
                    state = await picture_of(endpoints)
                if state.jobs:  # else it has ended
                    break
        return state

    wait_until_idle(endpoints)
    (job,) = asyncio.run(main()).jobs
    assert (job.priority, job.tenant) == (SERVICE["priority"], SERVICE["tenant"])


def test_the_ends_of_the_metric_count_all_priorities_beyond(server: TritonServer) -> None:
    endpoints = server.endpoints

    def numbers() -> list[float]:
        return [
            metric(endpoints.metrics_url, "fastserve_priority_jobs", priority=str(priority))
            for priority in range(-3, 4)
        ]

    def start() -> list[GrpcStream]:
        streams = [
            GrpcStream(endpoints.grpc_url, **LONG, priority=priority)
            for priority in (-100, -3, 1, 99)
        ]
        for stream in streams:  # the engine takes no job while a step stands still
            stream.first_token()
        return streams

    wait_until_idle(endpoints)
    with job_held(server, start, num_jobs=4) as streams:
        wait_for(lambda: numbers() == [2, 0, 0, 0, 1, 0, 1], DEADLINE_S)
        for stream in streams:
            stream.cancel()
    wait_for(lambda: numbers() == [0] * 7, DEADLINE_S)


@pytest.mark.parametrize("command", ["generate Hello", "chat"])
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--priority -101", "priority: got -101; must be an integer, -100 (runs first) to 100"),
        ("--ttft-slo-ms 0", "ttft_slo_ms: got 0.0; must be a number of milliseconds"),
        ("--tpot-slo-ms -1", "tpot_slo_ms: got -1.0; must be a number of milliseconds"),
        (f"--tenant {'x' * 129}", "tenant: got 'xxx"),
    ],
)
def test_the_commands_have_flags_for_it(
    command: str, flag: str, message: str, chat_endpoints: Endpoints
) -> None:
    line = f"{command} --url {chat_endpoints.grpc_url} {flag}"
    done = subprocess.run(
        [sys.executable, "-m", "fastserve_backend", *line.split()],
        input="Hello\n",
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
    )
    assert (done.returncode, done.stdout.strip()) == (ExitCode.USAGE, "")
    assert done.stderr.startswith(f"error: {message}")
