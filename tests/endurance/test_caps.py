"""Open requests and prompt sizes at their limits, and beyond.

`make endurance` has the whole numbers, `make test` a tenth or so.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import psutil
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MAX_TOKENS, MODEL_NAME, TEXT_INPUT
from running_gateway import RunningGateway
from running_server import rank_stopped
from serving_client import GENERATE, GrpcStream, generate, post
from tritonclient.grpc import service_pb2

DEADLINE_S = 120.0


pytestmark = pytest.mark.usefixtures("unharmed")


# --- open requests ------------------------------------------------------------------------------

REQUESTS_OF_STREAM = 100
# Most jobs get all of their tokens only when no new jobs arrive.
TOKENS = 8
FULL = "requests are queued already"
# Once a request has had a tenant, such as one of the fuzzed ones, others may not take all places.
SHARE, MOST_SHARE = "requests that the server takes", 0.8


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_each_open_request_ends_once(
    chatty_config: EngineConfig,
    chatty_server: TritonServer,
    note: Callable[..., None],
) -> None:
    limit = chatty_config.scheduler.max_queued_requests
    number = 2 * limit  # some end while the others come
    began_s = time.monotonic()
    finals: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    refused: list[str] = []

    async def read(call: Any) -> None:
        async for response in call:
            if response.error_message:
                assert FULL in response.error_message or SHARE in response.error_message
                refused.append(response.error_message)
                held.close()
                continue
            one = response.infer_response
            finals[one.id] += one.parameters["triton_final_response"].bool_param
            answers[one.id] += bool(one.outputs)

    async with grpc.aio.insecure_channel(chatty_server.endpoints.grpc_url) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=service_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        starts = range(0, number, REQUESTS_OF_STREAM)
        calls = [
            stream(requests(start, min(number, start + REQUESTS_OF_STREAM)), timeout=DEADLINE_S)
            for start in starts
        ]
        with ExitStack() as held:
            held.enter_context(rank_stopped(chatty_server.runtime))  # until the queue has been full
            await asyncio.gather(*map(read, calls))
    seconds = time.monotonic() - began_s

    ids = {str(index) for index in range(number)}
    assert finals == Counter(ids)
    answered = {name for name, count in answers.items() if count}
    assert max(answers.values()) == 1
    assert len(answered) + len(refused) == number
    had_tenants = any(SHARE in message for message in refused)
    assert len(answered) >= (MOST_SHARE * limit if had_tenants else limit)
    assert refused
    result = f"{len(answered)} answered, {len(refused)} refused"
    note("open requests over gRPC", number, result, seconds)


async def requests(start: int, end: int) -> AsyncIterator[Any]:
    for index in range(start, end):
        message = service_pb2.ModelInferRequest(model_name=MODEL_NAME, id=str(index))
        for name, datatype, raw in (
            (TEXT_INPUT, "BYTES", struct.pack("<I1s", 1, b"a")),
            (MAX_TOKENS, "INT32", struct.pack("<i", TOKENS)),
        ):
            message.inputs.add(name=name, datatype=datatype, shape=[1])
            message.raw_input_contents.append(raw)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        yield message


# --- large prompts ------------------------------------------------------------------------------

LARGE = 10_000_000
"""Bytes."""
MANY, SOME = 32, 2
# On an idle machine it is below 0.3 s, which a reader does not notice.
MOST_GAP_S = 3.0
# Growth of tritonserver and the stub together, when all prompts have been refused.
MOST_GROWTH_BYTES = 500_000_000
TOO_LONG = "maximum context length is 256 tokens"
TOO_LARGE = "the body is larger than 8388608 bytes"


class Reader(threading.Thread):
    """Reads one stream after the other, and records the longest time without a token."""

    def __init__(self, grpc_url: str) -> None:
        super().__init__()
        self._grpc_url = grpc_url
        self._has_begun, self._is_over = threading.Event(), threading.Event()
        self.longest_gap_s = 0.0

    def run(self) -> None:
        while not self._is_over.is_set():
            last_s = time.monotonic()
            stream = GrpcStream(
                self._grpc_url, text_input="a", stream=True, max_tokens=250, ignore_eos=True
            )
            while not stream.answer.num_finals:
                stream.step()
                now_s = time.monotonic()
                self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
                last_s = now_s
                self._has_begun.set()
            assert stream.finish().error is None

    @contextmanager
    def reading(self) -> Iterator[None]:
        self.start()
        try:
            assert self._has_begun.wait(DEADLINE_S)
            yield
        finally:
            self._is_over.set()
            self.join()


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def conversation(num_messages: int, content: str) -> str:
    return json.dumps([{"role": "user", "content": content}] * num_messages)


def gateway_prompts() -> dict[str, bytes]:
    message = {"role": "user", "content": "a" * LARGE}
    return {
        "text": body(model=MODEL_NAME, prompt="a" * LARGE),
        "token ids": body(model=MODEL_NAME, prompt=[5] * (LARGE // 3)),
        "a message": body(model=MODEL_NAME, messages=[message]),
    }


def triton_prompts() -> dict[str, dict[str, Any]]:
    return {
        "text": {"text_input": "a" * LARGE},
        "token ids": {"input_ids": [5] * (LARGE // 4)},
        "a message": {"messages": conversation(1, "a" * LARGE)},
        "messages": {"messages": conversation(LARGE // 40, "a")},
    }


@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("way", ["gateway", "Triton HTTP", "Triton gRPC"])
def test_large_prompts_are_refused_quickly_and_nobody_else_notices(
    way: str,
    chatty_server: TritonServer,
    chatty_gateway: RunningGateway,
    is_long: bool,
    note: Callable[..., None],
) -> None:
    endpoints = chatty_server.endpoints
    number = MANY if is_long else SOME
    before = memory(chatty_server)
    reader = Reader(endpoints.grpc_url)
    took_s: list[float] = []

    def send(prompt: Any) -> None:
        began_s = time.monotonic()
        if way == "gateway":
            path = "chat/completions" if b'"messages"' in prompt[:100] else "completions"
            answer = post(chatty_gateway.api_url, f"/{path}", prompt)
            assert (answer.status_code, TOO_LARGE in answer.text) == (413, True)
        elif way == "Triton HTTP":
            answer = post(endpoints.http_url, GENERATE, prompt)
            assert (answer.status_code, TOO_LONG in answer.text) == (400, True)
        else:
            error = generate(endpoints.grpc_url, **prompt).error
            assert error is not None
            assert TOO_LONG in error.message()
        took_s.append(time.monotonic() - began_s)

    prompts = list((gateway_prompts() if way == "gateway" else triton_prompts()).values())
    if way == "Triton HTTP":
        prompts = [json.dumps(prompt).encode() for prompt in prompts]
    with reader.reading(), ThreadPoolExecutor(number) as pool:
        for prompt in prompts:
            send(prompt)
            list(pool.map(send, [prompt] * number))
    assert memory(chatty_server) - before < MOST_GROWTH_BYTES
    if is_long:
        assert reader.longest_gap_s < MOST_GAP_S
    result = f"refused; longest gap of a stream beside them {reader.longest_gap_s:.2f} s"
    note(f"prompts of 10 MB, {way}", len(took_s), result, max(took_s))


def memory(server: TritonServer) -> int:
    """PSS of tritonserver and the stub, bytes."""
    pids = (server.pid, server.runtime.stub_pid())
    return sum(psutil.Process(pid).memory_full_info().pss for pid in pids)
