"""An answer takes no more of the gateway's memory than it may."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import httpx2
import pytest
from fastserve_client import protocol
from fastserve_client.model_description import ModelDescription
from fastserve_client.response import read_chunk
from fastserve_client.results import Chunk, Completion, Tokenization, TokenLogprob
from fastserve_gateway.answer_size import (
    JOB_BYTES,
    STREAM_BYTES,
    VALUE_BYTES,
    AnswerLimit,
    chunk_bytes,
)
from fastserve_gateway.chat import token_logprobs
from fastserve_gateway.completions import CompletionAnswer
from fastserve_gateway.jobs import CompletionJob
from fastserve_gateway.schemas import CompletionRequest
from fastserve_gateway.whole_response import WholeResponse
from gateway_thread import GatewayThread, gateway_thread
from lone_gateway import Pictures, settings
from waiting import wait_for

if TYPE_CHECKING:
    from fastserve_gateway.fleet.fleet import Fleet

DEADLINE_S = 60.0
BYTES_PER_BYTE = 45
"""docs/deploy.md, *Sizing*: the memory for each byte that the gateway may hold."""
NO_FLEET = cast("Fleet", None)
"""Of jobs about whose prompts the server is not asked."""
TOP = tuple(TokenLogprob(number, "a", -1.0) for number in range(20))


class Model(Pictures):
    """A client that notes what its jobs ask for. Their answers are ``max_tokens`` long."""

    def __init__(self) -> None:
        super().__init__()
        self.options: list[dict[str, Any]] = []
        self.holds_ends = False
        """The last tokens of answers do not come."""
        self.num_held = 0

    async def tokenize(self, prompt: Any, **options: Any) -> Tokenization:
        text = prompt if isinstance(prompt, str) else prompt[0]["content"]
        return Tokenization(tuple(range(len(text))), 100_000)

    async def describe(self, **options: Any) -> ModelDescription:
        return ModelDescription(100_000, "{{ messages }}", None)

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        async with self.stream(prompt, **options) as chunks:
            return Completion.from_chunks([chunk async for chunk in chunks])

    def stream(self, prompt: Any, **options: Any) -> Chunks:
        self.options.append(options)
        return Chunks(self, options)


class Chunks:
    """The answer to one job."""

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        self._model = model
        num_top = options.get("logprobs")
        entries = () if num_top is None else (TokenLogprob(1, "a", -1.0, TOP[:num_top]),)
        length = options.get("max_tokens") or 16
        self._left = [Chunk("a", (1,), "length", 1, entries)]
        self._left += [Chunk("a", (1,), logprobs=entries)] * (length - 1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if not self._left:
            raise StopAsyncIteration
        if len(self._left) == 1 and self._model.holds_ends:
            self._model.num_held += 1
            while self._model.holds_ends:
                await asyncio.sleep(0.01)
        return self._left.pop()


@dataclass(frozen=True)
class Front:
    """A gateway in front of ``model``. It holds 4 MiB, so an answer may have 43,690 values or
    131,072 tokens."""

    gateway: GatewayThread
    model: Model

    def post(self, route: str, **body: Any) -> httpx2.Response:
        return httpx2.post(
            f"{self.gateway.url}/{route}", json={"model": "fastserve", **body}, timeout=DEADLINE_S
        )

    def refusal(self, route: str, **body: Any) -> tuple[str, str]:
        """The field and the message of a 400."""
        answer = self.post(route, **body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        return error["param"], error["message"]


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    model = Model()
    monkeypatch.setattr("fastserve_gateway.app.AsyncFastServeClient", lambda *_, **__: model)
    with gateway_thread(settings()) as gateway:
        yield Front(gateway, model)


COMPLETIONS, CHAT = "v1/completions", "v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("route", "body", "param", "numbers"),
    [
        (
            COMPLETIONS,
            {"prompt": [5] * 1100, "n": 2, "prompt_logprobs": 20},
            "prompt_logprobs",
            "1 prompts of 1100 tokens together x 2 answers to each (n) x 21 values of each token = "
            "46200 values; one answer may have 43690; lower prompt_logprobs or n",
        ),
        (
            COMPLETIONS,
            {"prompt": ["a" * 1100, "b" * 1100], "prompt_logprobs": 20},
            "prompt_logprobs",
            "2 prompts of 2200 tokens together x 1 answers",
        ),
        (
            COMPLETIONS,
            {"prompt": [5] * 2000, "echo": True, "logprobs": 20, "stream": True},
            "logprobs",
            "x 22 values",
        ),
        (COMPLETIONS, {"prompt": [5] * 5500, "echo": True, "n": 8}, "echo", "x 1 values"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "a" * 2200}], "prompt_logprobs": 20},
            "prompt_logprobs",
            "1 prompts of 2200 tokens",
        ),
        (
            CHAT,
            {"messages": HI, "logprobs": True, "top_logprobs": 20, "max_tokens": 100_000, "n": 2},
            "max_tokens",
            "2 answers (prompts x n) x 100000 tokens (max_tokens) x 21 values of each token "
            "(1 + top_logprobs) = 4200000; one answer may have 43680 now; lower max_tokens, "
            "top_logprobs or n",
        ),
        (
            COMPLETIONS,
            {"prompt": "a", "n": 8, "max_tokens": 20_000},
            "max_tokens",
            "8 answers (prompts x n) x 20000 tokens (max_tokens) = 160000; one answer may have",
        ),
        (
            "v1/responses",
            {"input": "Hi", "top_logprobs": 20, "max_output_tokens": 2100, "stream": True},
            "max_output_tokens",
            "2100 tokens (max_output_tokens) x 21 values of each token (1 + top_logprobs)",
        ),
        ("v1/responses", {"input": "Hi", "user": "u" * 600}, "user", "512 characters"),
        ("detokenize", {"tokens": [5] * 44_000}, "tokens", "got 44000; must be at most 43690"),
    ],
)
def test_what_could_be_too_large_is_refused(
    front: Front, route: str, body: dict[str, Any], param: str, numbers: str
) -> None:
    found, message = front.refusal(route, **body)
    assert found == param
    assert message.startswith(f"{param}: got ")
    assert numbers in message
    assert not front.model.options  # no job has begun


def test_what_is_just_small_enough_is_answered(front: Front) -> None:
    body: dict[str, Any] = {"prompt": [5] * 2070, "prompt_logprobs": 20, "max_tokens": 1}
    assert front.post(COMPLETIONS, **body).status_code == 200
    body = {"prompt": "a", "n": 8, "max_tokens": 16_384}
    assert front.post(COMPLETIONS, **body).status_code == 200
    # The server refuses it.
    assert front.post(COMPLETIONS, prompt="a", logprobs=-5).status_code == 200
    # A stream's tokens are not held.
    streamed = {"prompt": "a", "logprobs": 20, "max_tokens": 2100, "stream": True}
    assert front.post(COMPLETIONS, **streamed).text.count('"finish_reason":"length"') == 1
    assert front.post(COMPLETIONS, **streamed | {"stream": False}).status_code == 400


@pytest.mark.parametrize(
    ("route", "body", "most"),
    [
        (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 20, "n": 2}, 1040),
        (CHAT, {"messages": HI, "n": 2}, 65_536),
        ("v1/responses", {"input": "Hi", "top_logprobs": 20}, 2080),
        ("v1/messages", {"messages": HI, "stop_sequences": ["x"], "max_tokens": 90_000}, 43_690),
    ],
)
def test_an_answer_of_any_length_is_cut_off(
    front: Front, route: str, body: dict[str, Any], most: int
) -> None:
    answer = front.post(route, **body)
    assert answer.status_code == 200, answer.text
    assert {options["max_tokens"] for options in front.model.options} == {most}
    assert all(options["clip_max_tokens"] for options in front.model.options)


def test_answers_count_while_they_come(front: Front) -> None:
    tokens = 2050  # so that what they count beside does not matter
    body = {"input": "Hi", "top_logprobs": 20, "max_output_tokens": tokens, "stream": True}
    held = (tokens - 1) * 21 * VALUE_BYTES
    assert 4 * held < 4 << 20 < 5 * held
    front.model.holds_ends = True
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(front.post, "v1/responses", **body) for _ in range(4)]
        try:
            wait_for(lambda: front.model.num_held == 4, DEADLINE_S)
            refused = front.post("v1/responses", **body)
            # What it took is free somewhat after its client has read its end.
            wait_for(lambda: front.post("tokenize", prompt="a" * 1000).is_success, DEADLINE_S)
        finally:
            front.model.holds_ends = False
        ends = [last_event(answer.result()) for answer in others]
    assert last_event(refused)["response"]["error"] == {
        "code": "rate_limit_exceeded",
        "message": "the gateway holds as many bytes of unanswered requests and of their answers "
        "as it may; send it again later",
    }
    assert [end["type"] for end in ends] == ["response.incomplete"] * 4
    wait_for(lambda: front.post("v1/responses", **body).status_code == 200, DEADLINE_S)


@pytest.mark.parametrize(("is_held", "of_each"), [(True, JOB_BYTES), (False, STREAM_BYTES)])
async def test_every_answer_to_every_prompt_counts(is_held: bool, of_each: int) -> None:
    taken: list[int] = []
    limit = AnswerLimit(1 << 20, 8, {}, is_held)
    jobs = [CompletionJob("a", "", {})] * 16  # two prompts
    assert len(await limit.bounded(NO_FLEET, jobs, taken.append)) == 16
    assert sum(taken) == 16 * of_each


def test_all_messages_of_a_prompt_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer needs one, and the first one counts with the body."""
    model = Model()
    model.holds_ends = True
    monkeypatch.setattr("fastserve_gateway.app.AsyncFastServeClient", lambda *_, **__: model)
    body = {"prompt": "a" * 120_000, "n": 8}
    with gateway_thread(settings(max_held_bytes=1 << 20)) as gateway, ThreadPoolExecutor(6) as pool:
        front = Front(gateway, model)
        others = [pool.submit(front.post, COMPLETIONS, **body) for _ in range(6)]
        try:
            wait_for(lambda: model.num_held == 6 * 8, DEADLINE_S)
            refused = front.post(COMPLETIONS, **body)
        finally:
            model.holds_ends = False
        assert [other.result().status_code for other in others] == [200] * 6
        assert refused.status_code == 429
        assert front.post(COMPLETIONS, **body).status_code == 200


def test_whole_answers_count_while_they_come_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they do over HTTP."""
    model = Model()
    model.only_streams = model.holds_ends = True
    monkeypatch.setattr("fastserve_gateway.app.AsyncFastServeClient", lambda *_, **__: model)
    body = {"prompt": "Hi", "max_tokens": 131_000}  # four of them nearly fill the gateway
    with gateway_thread(settings()) as gateway, ThreadPoolExecutor(4) as pool:
        front = Front(gateway, model)
        others = [pool.submit(front.post, COMPLETIONS, **body) for _ in range(4)]
        try:
            wait_for(lambda: model.num_held == 4, DEADLINE_S)
            refused = front.post(COMPLETIONS, **body)
        finally:
            model.holds_ends = False
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "gateway_full")
        assert {answer.result().status_code for answer in others} == {200}


def last_event(answer: httpx2.Response) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(answer.text.rpartition("data: ")[2])
    return event


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["token", "\U0001f642"])
@pytest.mark.parametrize("output", [protocol.PROMPT_LOGPROBS_OUTPUT, protocol.LOGPROBS_OUTPUT])
def test_a_value_takes_no_more_memory_than_it_counts(output: str, token: str) -> None:
    """One wide character makes all of a JSON text wide."""
    num_tokens, top = 300, 20

    def value(number: int, **more: Any) -> dict[str, Any]:
        text = f"{token}{number}"
        return {"token_id": 1000 + number, "token": text, "logprob": -number / 7, **more}

    entries = [
        value(number, rank=number, top=[value(number * top + other) for other in range(top)])
        for number in range(num_tokens)
    ]
    sent = json.dumps(entries, ensure_ascii=False).encode()
    request = CompletionRequest.model_validate(
        {"model": "m", "prompt": [5], "prompt_logprobs": top, "logprobs": top}
    )
    tracemalloc.start()
    try:
        part = read_chunk(
            "m",
            {
                protocol.OUTPUT_IDS: (5,),
                protocol.TEXT_OUTPUT: ["a"],
                protocol.FINISH_REASON: ["length"],
                output: [sent.decode()],
            },
        )
        whole = Completion.from_chunks([part])
        del part
        kept, _ = tracemalloc.get_traced_memory()
        answer = CompletionAnswer(request).whole([whole])
        answer["chat"] = token_logprobs(whole.logprobs)
        response = WholeResponse(answer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(response.body) > num_tokens * top
    num_values = num_tokens * (1 + top)
    # One answer is written at a time, and has a quarter of all that are held.
    assert kept + peak / 4 < num_values * VALUE_BYTES * BYTES_PER_BYTE
    if output == protocol.LOGPROBS_OUTPUT:
        assert chunk_bytes(whole) == num_values * VALUE_BYTES


async def test_a_client_that_does_not_read_gets_no_more() -> None:
    """Its request then still counts, because the response has not been sent."""
    sent: list[bytes] = []
    reads = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if len(sent) > 3:
            await reads.wait()

    async def receive() -> Any:
        raise AssertionError

    response = WholeResponse({"text": "a" * 1_000_000})
    sending = asyncio.create_task(response({"type": "http"}, receive, send))
    async with asyncio.timeout(DEADLINE_S):
        while len(sent) < 4:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert sum(map(len, sent)) < 1_000_000 / 4
        reads.set()
        await sending
    assert b"".join(sent) == response.body
