"""Streams that wait for their first token, ids of requests, and names of models."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.errors import InvalidRequest
from lone_gateway import settings
from running_gateway import (
    COMMAND,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    RunningGateway,
    running_gateway,
)
from running_server import rank_stopped
from starlette.testclient import TestClient

ASKED = [{"role": "user", "content": "Hi"}]
COMMENT = b": ping\n\n"
EVENT = b'event: ping\ndata: {"type":"ping"}\n\n'


@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 2}, COMMENT),
        ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 2}, COMMENT),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}, COMMENT),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 2}, EVENT),
    ],
)
def test_a_stream_says_that_it_waits(
    chat_gateway: RunningGateway,
    chat_server: TritonServer,
    path: str,
    body: dict[str, Any],
    ping: bytes,
) -> None:
    asked = {"model": "fastserve", "stream": True, **body}
    url = f"{chat_gateway.url}{path}"
    with (
        httpx2.Client(timeout=REQUEST_TIMEOUT_S) as client,
        rank_stopped(chat_server.runtime),
        client.stream("POST", url, json=asked) as answer,
    ):
        assert answer.status_code == 200
        parts = answer.iter_raw()
        assert next(parts) == next(parts) == ping


def test_the_answer_comes_behind_the_pings(
    chat_gateway: RunningGateway, chat_server: TritonServer
) -> None:
    asked = {"model": "fastserve", "stream": True, "messages": ASKED, "max_tokens": 2}
    url = f"{chat_gateway.url}/v1/chat/completions"
    with httpx2.stream("POST", url, json=asked, timeout=REQUEST_TIMEOUT_S) as whole:
        whole.read()
    with httpx2.Client(timeout=REQUEST_TIMEOUT_S) as client:
        with rank_stopped(chat_server.runtime):
            stream = client.stream("POST", url, json=asked)
            answer = stream.__enter__()
            parts = answer.iter_raw()
            assert next(parts) == COMMENT
        text = b"".join(parts)
        stream.__exit__(None, None, None)
    events = [line for line in text.split(b"\n\n") if line.startswith(b"data: ")]
    assert events[-1] == b"data: [DONE]"
    assert len(events) == whole.content.count(b"data: ")


@pytest.mark.parametrize(
    ("given", "is_kept"), [("abc-1", True), (None, False), ("x" * 129, False), ("\t", False)]
)
def test_each_answer_has_an_id(alone: TestClient, given: str | None, is_kept: bool) -> None:
    headers = {} if given is None else {"x-request-id": given}
    for path in ("/health", "/v1/models", "/nowhere"):
        answer = alone.get(path, headers=headers)
        found = answer.headers["x-request-id"]
        assert found == answer.headers["request-id"]
        assert (found == given) if is_kept else found.startswith("req_")


@pytest.fixture(scope="module")
def named(
    chat_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    flags = ("--alias", "claude-sonnet-4=fastserve", "--alias", "*=fastserve")
    log_path: Path = tmp_path_factory.mktemp("named") / "gateway.log"
    with running_gateway(f"grpc://{chat_server.endpoints.grpc_url}", log_path, *flags) as gateway:
        yield gateway


def test_models_have_more_names(named: RunningGateway) -> None:
    shown = named.get("/v1/models").json()["data"]
    assert [one["id"] for one in shown] == ["fastserve", "claude-sonnet-4"]
    assert {one["context_length"] for one in shown} == {2048}
    assert {one["max_model_len"] for one in shown} == {2048}
    for name in ("fastserve", "claude-sonnet-4", "claude-haiku-4"):
        assert named.get(f"/v1/models/{name}").json()["id"] == name
        body = {"model": name, "messages": ASKED, "max_tokens": 1}
        url = f"{named.api_url}/chat/completions"
        answer = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S)
        assert answer.json()["model"] == name
        url = f"{named.api_url}/messages/count_tokens"
        assert httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S).status_code == 200


def test_without_a_server_there_is_no_context_length(alone: TestClient) -> None:
    (shown,) = alone.get("/v1/models").json()["data"]
    assert shown.keys() == {"id", "object", "created", "owned_by"}


@pytest.mark.parametrize("aliases", [{"a": "other"}, {"fastserve": "fastserve"}, {"": "fastserve"}])
def test_aliases_that_name_nothing(aliases: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=r"^alias: got "):
        replace(settings(), aliases=aliases)


@pytest.mark.parametrize("flags", [["a"], ["a=fastserve", "a=fastserve"], ["a=other"]])
def test_flags_that_are_no_aliases(flags: list[str]) -> None:
    given = [part for flag in flags for part in ("--alias", flag)]
    ended = subprocess.run(
        [*COMMAND, "--port", "0", *given], capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert ended.returncode != 0
    assert "alias: got 'a" in ended.stderr
