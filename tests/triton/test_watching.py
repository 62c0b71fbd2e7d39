"""Requests that watch the engine get pictures instead of tokens, and delay nobody."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tritonclient.grpc as grpcclient
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.watches import MAX_WATCHES
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import (
    AsyncFastServeClient,
    EngineState,
    InvalidRequest,
    ServerUnavailable,
    protocol,
)
from running_server import rank_stopped, running_server
from serving_client import (
    ANSWER_TIMEOUT_S,
    GENERATE,
    GENERATE_STREAM,
    STATUS_HEADER,
    GrpcStream,
    generate,
    post,
    server_sent_events,
    tensors,
    unfinished_jobs,
    wait_until_idle,
)
from waiting import DEADLINE_S, wait_for

END_TIMEOUT_S = 60.0
ATTEMPTS = 10
PICTURE_DEADLINE_S = 60.0
LONG = {"text_input": "a long one", "stream": True, "max_tokens": 3500, "ignore_eos": True}


class Watch:
    """A watch on a gRPC stream of its own."""

    def __init__(self, url: str, interval_ms: int = 50, headers: Any = None) -> None:
        self._interval_ms = interval_ms
        self._client = grpcclient.InferenceServerClient(url)
        self._events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._client.start_stream(
            lambda result, error: self._events.put((result, error)), headers=headers
        )
        self._ends_with_error = headers is not None
        self.error: Any = None
        self.picture: EngineState | None = None
        self._ask()

    def _ask(self) -> None:
        self.num_finals = 0
        self._client.async_stream_infer(
            protocol.MODEL_NAME,
            tensors(watch_interval_ms=self._interval_ms, stream=True),
            enable_empty_final_response=True,
        )

    def next(self) -> EngineState | None:
        """The next picture; None: a response without one."""
        result, self.error = self._events.get(timeout=DEADLINE_S)
        if self.error is not None:
            return None
        self._count_final(result)
        message = result.get_response()
        if not message.outputs:
            return None
        assert [output.name for output in message.outputs] == [protocol.ENGINE_STATE]
        return EngineState.from_json(result.as_numpy(protocol.ENGINE_STATE)[0].decode())

    def _count_final(self, result: Any) -> None:
        final = result.get_response().parameters["triton_final_response"]
        self.num_finals += final.bool_param

    def until(self, condition: Any) -> EngineState:
        """The first picture for which ``condition`` holds. If the server ends the watch before, as
        it does after some time, this asks again."""
        ends_s = time.monotonic() + PICTURE_DEADLINE_S
        while time.monotonic() < ends_s:
            if self.num_finals:
                self._ask()
            state = self.next()
            assert self.error is None, self.error
            if state is not None and condition(state):
                return state
        pytest.fail(f"no such picture came within {PICTURE_DEADLINE_S} s")

    def until_final(self) -> None:
        """Reads until the server ends the watch by itself."""
        while not self.num_finals:
            self.next()
            assert self.error is None, self.error
        self._client.stop_stream()
        self._client.close()

    def close(self) -> None:
        """Cancels the watch, unless it was refused."""
        if self.error is not None:
            # Cancelling a request that the server is ending with an error can keep the model
            # loaded.
            while not self.num_finals and not self._ends_with_error:
                result, _ = self._events.get(timeout=DEADLINE_S)
                self._count_final(result)
        self._client.stop_stream(cancel_requests=self.error is None)
        self._client.close()


def accepted(endpoints: Endpoints, interval_ms: int = 50) -> Watch:
    """A watch, as soon as the server has dropped the watches of earlier tests. Its first picture is
    read."""
    found: list[Watch] = []

    def is_accepted() -> bool:
        one = Watch(endpoints.grpc_url, interval_ms)
        one.picture = one.next()
        if one.picture is None:
            one.close()
        else:
            found.append(one)
        return bool(found)

    wait_for(is_accepted, DEADLINE_S)
    return found[0]


def picture(endpoints: Endpoints) -> EngineState:
    """The engine now: a new watch gets a picture as soon as a step has ended."""
    one = accepted(endpoints)
    one.close()
    assert one.picture is not None
    return one.picture


@pytest.fixture
def watch(endpoints: Endpoints) -> Iterator[Watch]:
    one = accepted(endpoints)
    yield one
    one.close()


def idle(state: EngineState) -> bool:
    return state.running + state.waiting == 0 and state.device.used_blocks == 0


def begun_job(endpoints: Endpoints) -> tuple[GrpcStream, EngineState, EngineState]:
    """A job with more than 20 tokens, a picture before it and one with it."""
    for _ in range(ATTEMPTS):
        wait_until_idle(endpoints)
        first = picture(endpoints)
        stream = GrpcStream(
            endpoints.grpc_url,
            input_ids=list(range(5, 105)),
            request_id="nobody else may know this",
            stream=True,
            max_tokens=3500,
            ignore_eos=True,
        )
        while len(stream.answer.token_ids) <= 20:
            stream.step()
        state = picture(endpoints)
        if state.jobs:
            return stream, first, state
    raise AssertionError(f"the job ended {ATTEMPTS} times before the picture")


def test_a_picture_of_jobs_and_memory(watch: Watch, endpoints: Endpoints) -> None:
    wait_until_idle(endpoints)
    watch.until(idle)
    stream, first, state = begun_job(endpoints)
    assert first.jobs == ()
    assert first.policy == "skip_join_mlfq"
    assert first.policy_description.startswith("skip_join_mlfq: ")
    quanta = [level.quantum_s for level in first.levels]
    assert len(quanta) > 2
    assert quanta == sorted(quanta)
    assert (first.device.num_blocks, first.block_size) == (240, 16)
    assert first.host.num_blocks > 0
    (job,) = state.jobs
    assert job.prompt_tokens == 100
    assert job.output_tokens > 20
    assert job.state == "running"
    assert job.device_blocks == state.device.used_blocks >= 8
    assert job.waited_s >= 0
    assert (state.running, state.waiting, state.swapped) == (1, 0, 0)
    assert sum(level.num_jobs for level in state.levels) == 1
    assert state.levels[job.level].num_jobs == 1
    watch.until(lambda later: later.totals.iterations > state.totals.iterations)
    assert state.totals.generation_tokens > first.totals.generation_tokens
    assert state.totals.prompt_tokens == first.totals.prompt_tokens + 100
    # The job uses up its quantum.
    watch.until(lambda later: later.totals.demotions > first.totals.demotions)
    stream.cancel()
    watch.until(idle)


def first_pictures(endpoints: Endpoints, number: int) -> list[str]:
    """Over HTTP, as soon as the server has dropped the watches of earlier tests."""
    accepted(endpoints).close()
    found: list[str] = []

    def has_found() -> bool:
        body = {"watch_interval_ms": 50, "stream": True}
        url = endpoints.http_url + GENERATE_STREAM
        with httpx2.stream("POST", url, json=body, timeout=ANSWER_TIMEOUT_S) as response:
            if response.status_code == 200:
                events = server_sent_events(response.iter_lines())
                found[:] = [event["engine_state"] for event in islice(events, number)]
        return len(found) == number

    wait_for(has_found)
    return found


def test_neither_texts_nor_request_ids_are_in_it(endpoints: Endpoints) -> None:
    for _ in range(ATTEMPTS):
        wait_until_idle(endpoints)
        stream = GrpcStream(endpoints.grpc_url, request_id="user-4711", **LONG)
        stream.first_token()
        (text,) = first_pictures(endpoints, 1)
        stream.cancel()
        if json.loads(text)["jobs"]:  # else the job has ended
            break
    assert "user-4711" not in text
    assert "a long one" not in text
    assert len(json.loads(text)["jobs"]) == 1


def test_more_jobs_than_are_listed_are_counted(watch: Watch, server: TritonServer) -> None:
    endpoints = server.endpoints
    wait_until_idle(endpoints)
    with (
        grpcclient.InferenceServerClient(endpoints.grpc_url) as client,
        ExitStack() as arrived,
    ):
        arrived.enter_context(rank_stopped(server.runtime))  # else the first ones might end
        client.start_stream(lambda result, error: None)
        for _ in range(270):
            client.async_stream_infer(protocol.MODEL_NAME, tensors(**LONG))
        wait_for(lambda: unfinished_jobs(endpoints.metrics_url) == 270)
        arrived.close()
        state = watch.until(lambda state: state.running + state.waiting == 270)
        client.stop_stream(cancel_requests=True)
        assert len(state.jobs) == 256
        assert sum(job.state == "running" for job in state.jobs) == state.running
        assert len({job.number for job in state.jobs}) == 256
        assert sum(level.num_jobs for level in state.levels) == 270
    watch.until(idle)


def is_swapped(state: EngineState) -> bool:
    return any(job.state == "swapped" for job in state.jobs)


def test_jobs_on_the_host_are_seen(watch: Watch, server: TritonServer) -> None:
    endpoints = server.endpoints
    wait_until_idle(endpoints)
    before = watch.until(idle)
    num_tokens = before.totals.prompt_tokens
    for _ in range(ATTEMPTS):
        # The cache holds five of them at their ends.
        with rank_stopped(server.runtime):  # until all have arrived
            streams = [
                GrpcStream(
                    endpoints.grpc_url,
                    input_ids=[7] * 500,
                    stream=True,
                    max_tokens=250,
                    ignore_eos=True,
                )
                for _ in range(16)
            ]
            wait_for(lambda: unfinished_jobs(endpoints.metrics_url) == 16)
        # Between two pictures all may come back.
        num_tokens += 16 * 500
        state = watch.until(
            lambda state: (
                is_swapped(state) or (idle(state) and state.totals.prompt_tokens >= num_tokens)  # noqa: B023
            )
        )
        for stream in streams:
            assert stream.finish().error is None
        if is_swapped(state):
            break
    swapped = [job for job in state.jobs if job.state == "swapped"]
    assert swapped
    assert all(job.device_blocks == 0 < job.host_blocks for job in swapped)
    assert state.swapped >= len(swapped)
    assert state.host.used_blocks >= sum(job.host_blocks for job in swapped)
    after = watch.until(idle)
    assert after.totals.swap_out_bytes > before.totals.swap_out_bytes
    assert after.totals.swap_in_bytes > before.totals.swap_in_bytes
    assert after.totals.demotions > before.totals.demotions


def test_two_watchers_at_their_own_pace(endpoints: Endpoints) -> None:
    with ExitStack() as stack:
        quick, slow = accepted(endpoints, 50), accepted(endpoints, 10_000)
        stack.callback(quick.close)
        stack.callback(slow.close)
        times = [quick.until(lambda state: True).time_s for _ in range(5)]
        assert all(later - earlier >= 0.05 for earlier, later in pairwise(times))


def test_too_many_watchers_are_told_to_come_later(endpoints: Endpoints) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_WATCHES):
            watch = accepted(endpoints)
            stack.callback(watch.close)
        late = Watch(endpoints.grpc_url, headers=STATUS_HEADER)
        assert late.next() is None
        assert late.error.status() == "StatusCode.UNAVAILABLE"
        assert "others watch already" in late.error.message()
        late.close()
    accepted(endpoints).close()  # there is room again


def test_watchers_that_go_away_leave_nothing(endpoints: Endpoints) -> None:
    for _ in range(MAX_WATCHES * 2):
        accepted(endpoints).close()
    assert generate(endpoints.grpc_url, text_input="b", max_tokens=3).num_finals == 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"watch_interval_ms": 49, "stream": True}, "watch_interval_ms: got 49; must be from 50"),
        ({"watch_interval_ms": 10_001, "stream": True}, "watch_interval_ms: got 10001"),
        ({"watch_interval_ms": -1, "stream": True}, "watch_interval_ms: got -1"),
        ({"watch_interval_ms": 100}, "stream: got False; must be true"),
        (
            {"watch_interval_ms": 100, "stream": True, "text_input": "a"},
            "text_input, watch_interval_ms: got",
        ),
        (
            {"watch_interval_ms": 100, "stream": True, "sampling_parameters": '{"top_k": 1}'},
            "sampling_parameters, watch_interval_ms: got",
        ),
        (
            {"watch_interval_ms": 100, "stream": True, "parameters": {"top_k": 1}},
            "top_k, watch_interval_ms: got",
        ),
        (
            {"text_input": "a", "parameters": {"watch_interval_ms": 100}},
            "watch_interval_ms: got 100; unknown parameter",
        ),
    ],
)
def test_bad_watches_are_refused(
    inputs: dict[str, Any], message: str, endpoints: Endpoints
) -> None:
    answer = generate(endpoints.grpc_url, **inputs)
    assert answer.error is not None
    assert answer.error.message().startswith(message)
    assert answer.num_finals == 1


def test_over_http(endpoints: Endpoints) -> None:
    refused = post(endpoints.http_url, GENERATE, {"watch_interval_ms": 100})
    assert refused.status_code == 400
    assert "stream: got False" in refused.text
    refused = post(endpoints.http_url, GENERATE_STREAM, {"watch_interval_ms": 1, "stream": True})
    assert refused.status_code == 400
    states = [EngineState.from_json(text) for text in first_pictures(endpoints, 3)]
    assert states[0].time_s < states[1].time_s < states[2].time_s


def test_a_watch_holds_up_no_job(watch: Watch, endpoints: Endpoints) -> None:
    """The tokens are the same, and a watch never counts as a job."""
    request = {"text_input": "b", "max_tokens": 50, "seed": 3, "ignore_eos": True}
    wait_until_idle(endpoints)
    before = watch.until(idle).totals.generation_tokens
    watched = generate(endpoints.grpc_url, **request)
    watch.until(lambda state: state.totals.generation_tokens == before + 50 and idle(state))
    wait_for(lambda: unfinished_jobs(endpoints.metrics_url) == 0)
    watch.close()
    alone = generate(endpoints.grpc_url, **request)
    assert len(watched.token_ids) == 50
    assert watched.token_ids == alone.token_ids


# --- the asyncio client -------------------------------------------------------------------------


async def test_the_client_has_typed_pictures(endpoints: Endpoints) -> None:
    async with AsyncFastServeClient(endpoints.grpc_url) as client:
        states: list[EngineState] = []
        while not states:
            async with asyncio.timeout(DEADLINE_S), client.watch(0.05) as watch:
                with suppress(ServerUnavailable):  # until watches of earlier tests are dropped
                    states = [await anext(watch) for _ in range(3)]
        assert states[0].time_s < states[-1].time_s
        assert [state async for state in watch] == []
        with pytest.raises(InvalidRequest, match="watch_interval_ms: got 1; must be from 50"):
            await anext(client.watch(0.001))
        with pytest.raises(InvalidRequest, match="interval_s: got nan"):
            client.watch(float("nan"))


async def test_the_client_says_when_there_are_too_many(endpoints: Endpoints) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_WATCHES):
            watch = await asyncio.to_thread(accepted, endpoints)
            stack.callback(watch.close)
        async with AsyncFastServeClient(endpoints.grpc_url) as client:
            with pytest.raises(ServerUnavailable, match="others watch already"):
                await anext(client.watch(0.1))


# --- the end of the server ----------------------------------------------------------------------


def test_watchers_do_not_hold_up_the_end(tiny_config: EngineConfig, tmp_path: Path) -> None:
    log_path = tmp_path / "server.log"
    with running_server(tiny_config, log_path) as server:
        watches = [Watch(server.endpoints.grpc_url) for _ in range(3)]
        stream = GrpcStream(server.endpoints.grpc_url, **LONG | {"max_tokens": 300})
        stream.first_token()
        for one in watches:
            assert one.next() is not None
        stopper = threading.Thread(target=server.stop)
        stopper.start()
        for one in watches:
            one.until_final()
            assert one.num_finals == 1
        answer = stream.finish()
        assert answer.error is None
        assert len(answer.token_ids) == 300
        stopper.join(END_TIMEOUT_S)
        assert not stopper.is_alive()
    log = log_path.read_text(encoding="utf-8")
    assert "unloading" in log  # nothing has kept the model
    assert "Traceback" not in log
