"""Clients that go away, many at once, a full queue, and servers that come and go."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import openai
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_gateway import command
from fastserve_gateway.http_connection import HttpConnection
from gateway_thread import gateway_thread
from lone_gateway import settings
from openai import OpenAI
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway, running_gateway
from running_server import job_held, rank_stopped, running_server
from serving_client import ended_jobs, unfinished_jobs, used_blocks, wait_until_idle
from tiny_model import START_TIMEOUT_S
from unread_process import PIPE_BYTES, unread_process
from waiting import wait_for

DEADLINE_S = 120.0
STILL_S = 4.0
LONG = {
    "model": "fastserve", "prompt": "Hello", "max_tokens": 3000, "ignore_eos": True,
}  # fmt: skip
SHUTTING_DOWN = {
    "error": {
        "message": "the gateway is shutting down and could not finish the request",
        "type": "server_error",
        "param": None,
        "code": None,
    }
}


class Fragile:
    """A server with a short queue, to be killed and stopped, and its gateway."""

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self._config = config.with_keys(max_queued_requests=2)
        self._directory = directory
        self._running = ExitStack()
        self._pair: tuple[TritonServer, RunningGateway] | None = None

    def pair(self) -> tuple[TritonServer, RunningGateway]:
        """Starts both, unless they run."""
        if self._pair is None:
            server = self._running.enter_context(
                running_server(self._config, self._directory / "server.log")
            )
            gateway = running_gateway(server.endpoints.grpc_url, self._directory / "gateway.log")
            self._pair = server, self._running.enter_context(gateway)
        return self._pair

    def end(self) -> None:
        self._pair = None
        self._running.close()


@pytest.fixture(scope="module")
def fragile_pair(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fragile]:
    pair = Fragile(tiny_config, tmp_path_factory.mktemp("fragile"))
    yield pair
    pair.end()


@pytest.fixture
def fragile(fragile_pair: Fragile) -> TritonServer:
    return fragile_pair.pair()[0]


@pytest.fixture
def fragile_gateway(fragile_pair: Fragile) -> RunningGateway:
    return fragile_pair.pair()[1]


def next_data(lines: Iterator[str]) -> str:
    """The next line with an event. A stream may say before that it waits."""
    return next(line for line in lines if line.startswith("data: "))


class Begun:
    """A stream whose first event has come."""

    def __init__(self, url: str, **fields: object) -> None:
        self._http = httpx2.Client(timeout=DEADLINE_S)
        body = {**LONG, "stream": True, **fields}
        request = self._http.build_request("POST", url, json=body)
        self.response = self._http.send(request, stream=True)
        assert self.response.status_code == 200
        self._lines = self.response.iter_lines()
        next_data(self._lines)

    def rest(self) -> list[str]:
        """Reads the other lines that are not empty, to the end."""
        return [line for line in self._lines if line]

    def close(self) -> None:
        self.response.close()
        self._http.close()


def wait_until_busy(endpoints: Endpoints, jobs: int = 1) -> None:
    url = endpoints.metrics_url
    wait_for(lambda: unfinished_jobs(url) >= jobs and used_blocks(url) > 0, DEADLINE_S)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_frees_its_blocks(
    gateway: RunningGateway, server: TritonServer, stream: bool, n: int
) -> None:
    endpoints = server.endpoints
    await asyncio.to_thread(wait_until_idle, endpoints)
    before = ended_jobs(endpoints.metrics_url, "cancelled")
    closed = gateway.num_requests("/v1/completions", 499)
    body = {**LONG, "stream": stream, "n": n}

    async def read() -> None:
        async with (
            httpx2.AsyncClient(timeout=REQUEST_TIMEOUT_S) as client,
            client.stream("POST", f"{gateway.api_url}/completions", json=body) as response,
        ):
            response.raise_for_status()
            async for _ in response.aiter_bytes():
                pass

    with rank_stopped(server.runtime):  # else jobs might end before they are cancelled
        reader = asyncio.create_task(read())
        try:
            await asyncio.to_thread(wait_until_busy, endpoints, n)
        except AssertionError:
            if reader.done():
                await reader  # gives the reason
            raise
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await asyncio.to_thread(wait_until_closed, gateway, closed + 1)
    await asyncio.to_thread(wait_until_idle, endpoints)
    assert ended_jobs(endpoints.metrics_url, "cancelled") == before + n


def wait_until_closed(gateway: RunningGateway, number: float) -> None:
    """Waits until the gateway has noticed that so many clients went away."""
    wait_for(lambda: gateway.num_requests("/v1/completions", 499) >= number, DEADLINE_S)


def test_closing_the_official_clients_stream_is_enough(
    client: OpenAI, gateway: RunningGateway, server: TritonServer
) -> None:
    endpoints = server.endpoints
    wait_until_idle(endpoints)
    cancelled = ended_jobs(endpoints.metrics_url, "cancelled")
    closed = gateway.num_requests("/v1/completions", 499)
    fields = {key: value for key, value in LONG.items() if key != "ignore_eos"}

    def start() -> Iterator[object]:
        stream = client.completions.create(  # type: ignore[call-overload]
            **fields, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        return stream  # type: ignore[no-any-return]

    with job_held(server, start) as stream:
        stream.close()  # type: ignore[attr-defined]
        wait_until_closed(gateway, closed + 1)
    wait_until_idle(endpoints)
    assert ended_jobs(endpoints.metrics_url, "cancelled") == cancelled + 1


async def test_many_streams_at_once(gateway: RunningGateway) -> None:
    async with gateway.async_client() as client:

        async def consume(number: int) -> str:
            text = ""
            stream = await client.completions.create(
                model="fastserve",
                prompt=[5 + number % 7],
                max_tokens=8,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for event in stream:
                text += event.choices[0].text
            assert event.choices[0].finish_reason == "length"
            return text

        expected = [await consume(number) for number in range(7)]
        texts = await asyncio.wait_for(
            asyncio.gather(*(consume(number) for number in range(256))), DEADLINE_S
        )
    assert texts == [expected[number % 7] for number in range(256)]


def test_a_full_queue_is_429(fragile: TritonServer, fragile_gateway: RunningGateway) -> None:
    endpoints = fragile.endpoints
    url = f"{fragile_gateway.api_url}/completions"
    wait_until_idle(endpoints)
    with httpx2.Client(timeout=REQUEST_TIMEOUT_S) as http:
        with job_held(fragile, lambda: Begun(url, n=2), num_jobs=2) as begun:
            for stream in (False, True):
                refused = http.post(url, json={**LONG, "stream": stream})
                assert refused.status_code == 429
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "queue_full"
            with fragile_gateway.client() as client, pytest.raises(openai.RateLimitError):
                client.completions.create(model="fastserve", prompt="Hello")
            begun.close()
        wait_until_idle(endpoints)
        # One of three prompts is too many, and the two others must not stay behind.
        with rank_stopped(fragile.runtime):
            assert http.post(url, json={**LONG, "n": 3}).status_code == 429
        wait_until_idle(endpoints)
        assert http.post(url, json={**LONG, "max_tokens": 1}).status_code == 200


def test_an_error_in_mid_stream_and_the_way_back(
    fragile: TritonServer, fragile_gateway: RunningGateway, tmp_path: Path
) -> None:
    """If answers do not wait for the server."""
    wait_until_idle(fragile.endpoints)
    log_path = tmp_path / "gateway.log"
    with running_gateway(fragile.endpoints.grpc_url, log_path, "--max-moves", "0") as gateway:
        url = f"{gateway.api_url}/completions"
        with job_held(fragile, lambda: Begun(url)) as begun:
            os.kill(fragile.pid, signal.SIGKILL)
            lines = begun.rest()
    assert lines[-1].startswith('data: {"error":{"message":"the model server takes no requests')
    assert "[DONE]" not in "".join(lines)
    # The launcher restarts the server, and the gateway finds it.
    wait_for(lambda: is_healthy(fragile_gateway), START_TIMEOUT_S)
    with fragile_gateway.client() as client:
        assert client.completions.create(model="fastserve", prompt="Hello", max_tokens=1).choices


async def test_refusals_of_several_answers(
    fragile: TritonServer, fragile_gateway: RunningGateway
) -> None:
    """They leave nothing behind."""
    url = f"{fragile_gateway.api_url}/completions"
    async with httpx2.AsyncClient(timeout=REQUEST_TIMEOUT_S) as http:
        for stream in (False, True):
            body = {**LONG, "n": 8, "temperature": -1, "stream": stream}
            answers = await asyncio.gather(*(http.post(url, json=body) for _ in range(40)))
            for answer in answers:  # a stream that has waited for long says it in its last event
                assert answer.status_code == 400 or (stream and "[DONE]" not in answer.text)
                assert "temperature" in answer.text
    await asyncio.to_thread(wait_until_idle, fragile.endpoints)


def is_healthy(gateway: RunningGateway) -> bool:
    return gateway.get("/health").status_code == 200


def test_a_gateway_that_stands_still_for_a_while_loses_nothing(gateway: RunningGateway) -> None:
    """This happens on an overloaded machine. The server must not take the gateway for dead."""
    url = f"{gateway.api_url}/completions"
    with httpx2.stream("POST", url, json={**LONG, "stream": True}, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        next_data(lines)
        gateway.process.send_signal(signal.SIGSTOP)
        time.sleep(STILL_S)
        gateway.process.send_signal(signal.SIGCONT)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_server_that_drains_and_then_is_gone(
    fragile_pair: Fragile, caplog: pytest.LogCaptureFixture
) -> None:
    server, gateway = fragile_pair.pair()
    url = f"{gateway.api_url}/completions"
    wait_until_idle(server.endpoints)

    def status(**fields: object) -> int:
        response = httpx2.post(url, json={**LONG, **fields}, timeout=REQUEST_TIMEOUT_S)
        if response.status_code == 503:
            assert response.json()["error"]["type"] == "server_error"
            assert "retry-after" in response.headers
        return response.status_code

    stopper = threading.Thread(target=server.stop)
    # They fill the queue: a server that does not drain yet refuses, too, but with another status.
    with job_held(server, lambda: Begun(url, n=2, max_tokens=1000), num_jobs=2) as begun:
        stopper.start()
        wait_for(lambda: status(max_tokens=1) == 503, DEADLINE_S)
        assert status(max_tokens=1, stream=True) == 503
        assert stopper.is_alive()  # accepted requests go on
    assert begun.rest()[-1] == "data: [DONE]"
    stopper.join(DEADLINE_S)
    assert "did not end" not in caplog.text
    assert not is_healthy(gateway)
    assert status(max_tokens=1) == 503
    fragile_pair.end()


def test_an_answer_outlives_the_signal_to_the_gateway(
    endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log_path = tmp_path_factory.mktemp("ending") / "gateway.log"
    ended: Callable[[], bool]
    with running_gateway(endpoints.grpc_url, log_path) as gateway:
        body = {**LONG, "max_tokens": 400, "stream": True}
        with httpx2.stream(
            "POST", f"{gateway.api_url}/completions", json=body, timeout=DEADLINE_S
        ) as response:
            lines = response.iter_lines()
            next_data(lines)
            gateway.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        ended = lambda: gateway.process.poll() == 0  # noqa: E731
        wait_for(ended, DEADLINE_S)


def test_what_is_unfinished_at_the_deadline_ends_with_an_error(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "_ERRORS_TIMEOUT_S", DEADLINE_S)
    endpoints = server.endpoints
    wait_until_idle(endpoints)
    with (
        gateway_thread(settings(url=f"grpc://{endpoints.grpc_url}"), 0.2) as gateway,
        ThreadPoolExecutor(1) as pool,
    ):
        url = f"{gateway.url}/v1/completions"
        with job_held(server, lambda: Begun(url)) as begun:
            whole = pool.submit(httpx2.post, url, json=LONG, timeout=DEADLINE_S)
            wait_until_busy(endpoints, jobs=2)
            gateway.server.should_exit = True
            rest = begun.rest()
            answer = whole.result()
    assert json.loads(rest[-1].removeprefix("data: ")) == SHUTTING_DOWN
    assert (answer.status_code, answer.json()) == (503, SHUTTING_DOWN)
    assert not caplog.records
    wait_until_idle(endpoints)


def test_who_does_not_read_is_cut_off_after_the_deadline(
    endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "_ERRORS_TIMEOUT_S", 0.2)

    def is_stuck() -> bool:
        connections = tuple(gateway.server.server_state.connections)
        return any(one.flow.write_paused for one in connections if isinstance(one, HttpConnection))

    body = {**LONG, "stream": True, "n": 6, "logprobs": 20}
    small_buffer = httpx2.HTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)]
    )
    with (
        gateway_thread(settings(url=f"grpc://{endpoints.grpc_url}"), 0.2) as gateway,
        httpx2.Client(transport=small_buffer, timeout=DEADLINE_S) as http,
        http.stream("POST", f"{gateway.url}/v1/completions", json=body),
    ):
        wait_for(is_stuck, DEADLINE_S)
        gateway.stop()
    assert not caplog.records
    wait_until_idle(endpoints)


def test_a_second_ctrl_c_ends_answers_at_once(
    server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    endpoints = server.endpoints
    wait_until_idle(endpoints)
    log_path = tmp_path_factory.mktemp("hurried") / "gateway.log"
    with running_gateway(endpoints.grpc_url, log_path) as gateway, ThreadPoolExecutor(1) as pool:
        log = gateway.log()
        url = httpx2.URL(f"{gateway.api_url}/completions")

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((url.host, url.port)) == 0

        with job_held(server, lambda: Begun(str(url))) as begun:
            whole = pool.submit(httpx2.post, url, json=LONG, timeout=DEADLINE_S)
            wait_until_busy(endpoints, jobs=2)
            gateway.process.send_signal(signal.SIGINT)
            wait_for(lambda: not listens(), DEADLINE_S)
            gateway.process.send_signal(signal.SIGINT)
            rest = begun.rest()
            answer = whole.result()
        assert json.loads(rest[-1].removeprefix("data: ")) == SHUTTING_DOWN
        assert (answer.status_code, answer.json()) == (503, SHUTTING_DOWN)
        assert gateway.process.wait(DEADLINE_S) == 0
        assert gateway.log() == log
    wait_until_idle(endpoints)


def test_it_answers_though_nobody_reads_its_log() -> None:
    nowhere = "http://127.0.0.1:9"
    arguments = ["-m", "fastserve_backend", "gateway", "--port", "0", "--url", nowhere]
    with unread_process(*arguments) as (process, log), httpx2.Client(timeout=DEADLINE_S) as http:
        first_line = os.read(log, PIPE_BYTES).decode()
        (url,) = re.findall(r"listening on (\S+)", first_line)
        for _ in range(100):  # each of which is logged
            assert http.post(f"{url}/completions", json=LONG).status_code == 503
        process.terminate()
        assert process.wait(DEADLINE_S) == 0
