"""Requests that watch the engine get pictures instead of tokens, and delay nobody."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.watches import MAX_WATCHES
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import (
    AsyncFastServeClient,
    EngineState,
    InvalidRequest,
    ServerUnavailable,
    protocol,
)
from running_server import running_server
from serving_client import (
    GENERATE,
    GENERATE_STREAM,
    STATUS_HEADER,
    GrpcStream,
    generate,
    http_stream,
    post,
    tensors,
    unfinished_jobs,
)
from waiting import wait_for

DEADLINE_S = 30.0
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


def accepted(endpoints: Endpoints) -> Watch:
    """A watch, as soon as the server has dropped the watches of earlier tests."""
    found: list[Watch] = []

    def is_accepted() -> bool:
        one = Watch(endpoints.grpc_url)
        if one.next() is None:
            one.close()
        else:
            found.append(one)
        return bool(found)

    wait_for(is_accepted, DEADLINE_S)
    return found[0]


@pytest.fixture
def watch(endpoints: Endpoints) -> Iterator[Watch]:
    one = accepted(endpoints)
    yield one
    one.close()


def idle(state: EngineState) -> bool:
    return state.running + state.waiting == 0 and state.device.used_blocks == 0


def test_a_picture_of_jobs_and_memory(watch: Watch, endpoints: Endpoints) -> None:
    first = watch.until(idle)
    assert first.jobs == ()
    assert first.policy == "skip_join_mlfq"
    assert first.policy_description.startswith("skip_join_mlfq: ")
    quanta = [level.quantum_s for level in first.levels]
    assert len(quanta) > 2
    assert quanta == sorted(quanta)
    assert (first.device.num_blocks, first.block_size) == (240, 16)
    assert first.host.num_blocks > 0
    prompt = list(range(5, 105))
    stream = GrpcStream(
        endpoints.grpc_url,
        input_ids=prompt,
        request_id="nobody else may know this",
        stream=True,
        max_tokens=3500,
        ignore_eos=True,
    )
    stream.first_token()
    state = watch.until(lambda state: state.jobs and state.jobs[0].output_tokens > 20)
    (job,) = state.jobs
    assert job.prompt_tokens == 100
    assert job.state == "running"
    assert job.device_blocks == state.device.used_blocks >= 8
    assert job.waited_s >= 0
    assert (state.running, state.waiting, state.swapped) == (1, 0, 0)
    assert sum(level.num_jobs for level in state.levels) == 1
    assert state.levels[job.level].num_jobs == 1
    later = watch.until(lambda later: later.time_s > state.time_s)
    assert later.totals.iterations > state.totals.iterations
    assert state.totals.generation_tokens > first.totals.generation_tokens
    assert state.totals.prompt_tokens == first.totals.prompt_tokens + 100
    watch.until(lambda state: state.jobs[0].level > 0)  # the job has used up its quantum
    stream.cancel()
    watch.until(idle)


def test_neither_texts_nor_request_ids_are_in_it(endpoints: Endpoints) -> None:
    stream = GrpcStream(endpoints.grpc_url, request_id="user-4711", **LONG)
    stream.first_token()
    body = {"watch_interval_ms": 50, "stream": True}
    with http_stream(endpoints.http_url, body) as events:
        text = next(events)["engine_state"]
    stream.cancel()
    assert "user-4711" not in text
    assert "a long one" not in text
    assert len(json.loads(text)["jobs"]) == 1


def test_more_jobs_than_are_listed_are_counted(watch: Watch, endpoints: Endpoints) -> None:
    with ExitStack() as stack:
        for _ in range(270):
            stream = GrpcStream(endpoints.grpc_url, **LONG)
            stack.callback(stream.cancel)
        state = watch.until(lambda state: state.running + state.waiting == 270)
        assert len(state.jobs) == 256
        assert sum(job.state == "running" for job in state.jobs) == state.running
        assert len({job.number for job in state.jobs}) == 256
        assert sum(level.num_jobs for level in state.levels) == 270
    watch.until(idle)


def test_jobs_on_the_host_are_seen(watch: Watch, endpoints: Endpoints) -> None:
    before = watch.until(idle)
    # The cache holds five of them at their ends. They are so long that many run at once, however
    # slowly they arrive.
    streams = [
        GrpcStream(
            endpoints.grpc_url, input_ids=[7] * 500, stream=True, max_tokens=250, ignore_eos=True
        )
        for _ in range(16)
    ]
    state = watch.until(lambda state: any(job.state == "swapped" for job in state.jobs))
    swapped = [job for job in state.jobs if job.state == "swapped"]
    assert all(job.device_blocks == 0 < job.host_blocks for job in swapped)
    assert state.swapped >= len(swapped)
    assert state.host.used_blocks >= sum(job.host_blocks for job in swapped)
    for stream in streams:
        assert stream.finish().error is None
    after = watch.until(idle)
    assert after.totals.swap_out_bytes > before.totals.swap_out_bytes
    assert after.totals.swap_in_bytes > before.totals.swap_in_bytes
    assert after.totals.demotions > before.totals.demotions


def test_two_watchers_at_their_own_pace(endpoints: Endpoints) -> None:
    with ExitStack() as stack:
        quick, slow = Watch(endpoints.grpc_url, 50), Watch(endpoints.grpc_url, 10_000)
        stack.callback(quick.close)
        stack.callback(slow.close)
        assert slow.next() is not None  # the first picture comes at once
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
    with http_stream(endpoints.http_url, {"watch_interval_ms": 50, "stream": True}) as events:
        states = [EngineState.from_json(next(events)["engine_state"]) for _ in range(3)]
    assert states[0].time_s < states[1].time_s < states[2].time_s


def test_a_watch_holds_up_no_job(watch: Watch, endpoints: Endpoints) -> None:
    """The tokens are the same, and a watch never counts as a job."""
    request = {"text_input": "b", "max_tokens": 50, "seed": 3, "ignore_eos": True}
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
        async with client.watch(0.05) as watch:
            states = [await asyncio.wait_for(anext(watch), DEADLINE_S) for _ in range(3)]
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
        stopper.join(DEADLINE_S)
        assert not stopper.is_alive()
    log = log_path.read_text(encoding="utf-8")
    assert "unloading" in log  # nothing has kept the model
    assert "Traceback" not in log
