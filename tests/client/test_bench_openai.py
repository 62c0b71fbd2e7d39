"""What the load test makes of answers that a server of OpenAI's API may give."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from fastserve_client.bench.connection import Request
from fastserve_client.bench.openai_connection import OpenAIConnection
from fastserve_client.errors import ConnectionFailed, InvalidRequest, ServerError

DEADLINE_S = 20.0


@pytest.fixture
def usage() -> dict[str, Any]:
    """What the server says that it has counted."""
    return {"prompt_tokens": 3, "completion_tokens": 2}


@pytest.fixture
def prefix() -> str:
    """Of the data of an event."""
    return "data: "


@pytest.fixture
def url(usage: dict[str, Any], prefix: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            for event in ({"choices": [{"text": ""}]}, {"choices": [], "usage": usage}):
                self.wfile.write(f"{prefix}{json.dumps(event)}\n\n".encode())
            self.wfile.write(f"{prefix}[DONE]\n\n".encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


async def send(url: str) -> tuple[int, int]:
    connection = OpenAIConnection(url, "fastserve", None)
    try:
        answer = await connection.send(Request("a", 4, exact=False), DEADLINE_S)
    finally:
        await connection.close()
    return answer.prompt_tokens, answer.output_tokens


@pytest.mark.parametrize("prefix", ["data: ", "data:"])  # the space is left to the server
async def test_tokens_are_those_that_the_server_counted(url: str) -> None:
    assert await send(url) == (3, 2)


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("count", [0, -1, None, "2", 1.5])
async def test_an_answer_without_counted_tokens_is_an_error(
    url: str, usage: dict[str, Any], name: str, count: Any
) -> None:
    usage[name] = count
    with pytest.raises(ServerError, match=r"^usage: got "):
        await send(url)


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
