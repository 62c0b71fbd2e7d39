"""The load test reads the answers of servers with OpenAI's API."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fastserve_bench.connection import Request, TimedAnswer
from fastserve_bench.openai_connection import OpenAIConnection
from fastserve_bench.workload import NO_CLASS, ServiceClass
from fastserve_client.errors import ConnectionFailed, InvalidRequest, RequestCancelled, ServerError
from waiting import POLL_S

DEADLINE_S = 60.0


@pytest.fixture
def usage() -> dict[str, Any]:
    """The token counts that the server reports."""
    return {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.fixture
def prefix() -> str:
    """The text before an event's data."""
    return "data: "


@pytest.fixture
def events() -> list[dict[str, Any]]:
    """The answer's events, then one with ``usage``."""
    return [{"choices": [{"text": ""}]}]


@pytest.fixture
def received() -> list[tuple[Message, dict[str, Any]]]:
    """Headers and bodies of the requests so far."""
    return []


@pytest.fixture
def url(
    usage: dict[str, Any],
    events: list[dict[str, Any]],
    prefix: str,
    received: list[tuple[Message, dict[str, Any]]],
) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.headers, json.loads(body)))
            self.send_response(200)
            self.end_headers()
            sent = [json.dumps(one) for one in (*events, {"choices": [], "usage": usage})]
            # At once: a client leaves at an error.
            self.wfile.write("".join(f"{prefix}{one}\n\n" for one in (*sent, "[DONE]")).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


async def send(url: str, service: ServiceClass = NO_CLASS) -> TimedAnswer:
    connection = OpenAIConnection(url, "fastserve", "sk-all")
    try:
        return await connection.send(Request("a", 4, exact=False, service=service), DEADLINE_S)
    finally:
        await connection.close()


@pytest.mark.parametrize("prefix", ["data: ", "data:"])  # the space is left to the server
async def test_tokens_are_those_that_the_server_counted(url: str) -> None:
    answer = await send(url)
    assert (answer.prompt_tokens, answer.output_tokens) == (3, 2)


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("count", [0, -1, None, "2", 1.5])
async def test_an_answer_without_counted_tokens_is_an_error(
    url: str, usage: dict[str, Any], name: str, count: Any
) -> None:
    usage[name] = count
    with pytest.raises(ServerError, match=r"^usage: got "):
        await send(url)


async def test_a_request_has_what_its_class_sets_and_no_other_field(
    url: str, received: list[tuple[Message, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("B_KEY", "sk-b")
    for setting in ("", ",priority=2,tenant=b,ttft_slo_ms=290", ",tenant=b,key_variable=B_KEY"):
        await send(url, ServiceClass.parse(f"a{setting}"))
    (plain_headers, plain), (headers, body), (keyed_headers, keyed) = received
    assert plain.keys() == {
        "model", "prompt", "max_tokens", "temperature", "stream", "stream_options",
    }  # fmt: skip
    assert not [name for name in plain_headers if name.startswith("x-slo")]
    assert body == plain | {"priority": 2, "tenant": "b"}
    assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("290", None)
    assert headers["Authorization"] == plain_headers["Authorization"] == "Bearer sk-all"
    # Servers know the tenant by its key.
    assert keyed == plain
    assert keyed_headers["Authorization"] == "Bearer sk-b"


async def test_a_server_without_the_api_is_named_with_what_else_the_url_may_be(url: str) -> None:
    connection = OpenAIConnection(url, "fastserve", None)
    try:
        with pytest.raises(InvalidRequest) as refused:
            await connection.check()
    finally:
        await connection.close()
    assert str(refused.value).startswith(f"url: got {url}, where no OpenAI API is (HTTP 404); give")
    assert "grpc://HOST:8001" in str(refused.value)


async def test_messages_hold_no_password() -> None:
    connection = OpenAIConnection("http://me:secret@127.0.0.1:1/v1", "fastserve", None)
    try:
        with pytest.raises(ConnectionFailed) as refused:
            await connection.check()
    finally:
        await connection.close()
    assert "no server at http://127.0.0.1:1/v1" in str(refused.value)


# --- what a user sees of an answer --------------------------------------------------------------

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


TOKEN = {"choices": [{"index": 0, "delta": {"content": "a"}}]}


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


def end(reason: str | None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


class Clock:
    """A clock on which each event comes one second after the event before."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_bench.openai_connection.time", Clock())


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("events", "first_s", "last_s"),
    [
        ([ROLE, delta(content="a"), delta(content="b"), end("stop")], 2, 4),
        ([delta(role="assistant"), delta(content="a"), end("length")], 2, 3),
        ([delta(role="assistant", content="a"), delta(content="b"), end("stop")], 1, 3),
        ([ROLE, delta(content=None), delta(), delta(content="a"), end("stop")], 4, 5),
        ([ROLE, delta(reasoning_content="a"), delta(content="b"), end("stop")], 2, 4),
        ([ROLE, delta(reasoning="a"), delta(content="b"), end("stop")], 2, 4),
        ([ROLE, delta(tool_calls=[{"index": 0}]), end("tool_calls")], 2, 3),
        ([{"choices": [{"text": one}]} for one in ("", "a", "b", "")], 2, 3),
        ([{"choices": [{"text": "a", "finish_reason": "stop"}]}], 1, 1),
        # An answer without text is seen when it ends.
        ([ROLE, end("stop")], 2, 2),
        ([{"choices": [{"text": ""}]}], 1, 1),
        # Neither a token nor an error.
        ([{"choices": []}, {"choices": None}, {}, delta(content="a"), end(None)], 4, 4),
        ([{"choices": [{"delta": None}]}, delta(content="a"), end("stop")], 2, 3),
        ([{"choices": [], "error": None}, delta(content="a"), end("stop")], 2, 3),
    ],
)
async def test_the_first_token_is_the_first_that_has_text(
    url: str, first_s: float, last_s: float
) -> None:
    answer = await send(url)
    assert (answer.first_token_s, answer.last_token_s) == (first_s, last_s)


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([TOKEN, end("error")], ServerError, "the stream ended with finish_reason 'error'"),
        ([TOKEN, end("abort")], RequestCancelled, "the stream ended with finish_reason 'abort'"),
        (
            [TOKEN, end("cancelled")],
            RequestCancelled,
            "the stream ended with finish_reason 'cancelled'",
        ),
        (
            [TOKEN, {"choices": [{"text": "b", "finish_reason": "error"}]}],
            ServerError,
            "the stream ended with finish_reason 'error'",
        ),
        ([TOKEN, {"error": {"message": "rank 0 died"}}], ServerError, "rank 0 died"),
        ([TOKEN, {"object": "error", "message": "rank 0 died"}], ServerError, "rank 0 died"),
        ([TOKEN, {"choices": ["a"]}], ServerError, "choices are no JSON objects"),
        ([TOKEN, {"choices": 3}], ServerError, "choices are no JSON objects"),
    ],
)
async def test_an_answer_that_ends_unfinished_is_an_error(
    url: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        await send(url)
