"""The gateway's application without a model server: access, memory, error messages and shutdown."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from fastserve_client.errors import (
    ClientError,
    InvalidRequest,
    RequestTimeout,
    ServerUnavailable,
    error_from_http,
    error_from_status,
)
from fastserve_client.key_file import read_key_file
from fastserve_gateway.answer import event
from fastserve_gateway.app import create_app
from fastserve_gateway.auth import ApiKeys
from fastserve_gateway.command import run_gateway
from fastserve_gateway.errors import from_client_error
from fastserve_gateway.live_feed import LiveFeed
from fastserve_gateway.schemas import CompletionRequest
from gateway_thread import gateway_thread
from lone_gateway import PICTURE, Pictures, settings
from starlette.testclient import TestClient
from waiting import wait_for

DEADLINE_S = 60.0
# For unfinished answers. A stalled viewer must not get it.
DRAIN_TIMEOUT_S = 600.0


# --- access ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:9000", "localhost", "LOCALHOST:9000", "[::1]:9000", "127.8.8.8", "me.localhost:1"],
)
def test_without_keys_names_of_this_machine_are_answered(alone: TestClient, host: str) -> None:
    assert alone.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:9000", "127.0.0.1.evil.example", "localhost.evil.example",
        "evil.example@127.0.0.1:x", "[::1", "192.168.0.1:9000", "0.0.0.0:9000", "",
    ],
)  # fmt: skip
def test_without_keys_other_names_are_refused(alone: TestClient, host: str) -> None:
    """The DNS name of another site may point to this machine."""
    headers = {"Host": host}
    body = {"model": "fastserve", "prompt": "a"}
    answers = [alone.get(path, headers=headers) for path in ("/v1/models", "/metrics")]
    answers.append(alone.get("/live/events", headers=headers))
    answers.append(alone.post("/v1/completions", headers=headers, json=body))
    for answer in answers:
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--api-keys-file" in answer.json()["error"]["message"]


def test_what_needs_no_key_needs_no_name_of_this_machine(alone: TestClient) -> None:
    """Probes and deploy/nginx use the machine's address."""
    headers = {"Host": "10.0.0.7:9000"}
    assert alone.get("/health", headers=headers).status_code == 503  # there is no server
    assert alone.head("/health", headers=headers).status_code == 503
    assert alone.get("/live", headers=headers).status_code == 200


def test_with_keys_any_name_will_do(guarded: TestClient) -> None:
    assert guarded.get("/v1/models").status_code == 401
    headers = {"Authorization": "Bearer sk-key"}
    assert guarded.get("/v1/models", headers=headers).status_code == 200


def test_a_file_of_keys_may_begin_with_a_mark(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-key\n", encoding="utf-8-sig")
    ApiKeys(read_key_file(file)).check("Bearer sk-key", None, "llm.example.com")


def test_a_slash_at_the_end_is_another_route(guarded: TestClient) -> None:
    """A redirect would lead clients from the proxy's https:// to plain HTTP."""
    answer = guarded.post("/v1/completions/", follow_redirects=False)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == (
        "no such route; there are POST /v1/chat/completions, POST /v1/completions, "
        "POST /v1/responses, POST /v1/messages and GET /v1/models"
    )


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/v1/models", "/chat/completions", "/live/x"]
)
def test_who_asks_for_another_route_is_told_which_there_are(alone: TestClient, path: str) -> None:
    answer = alone.get(path)
    assert answer.status_code == 404
    reason, _, there_are = answer.json()["error"]["message"].partition("; there are ")
    assert reason == "no such route"
    found = re.findall(r"(GET|POST) (/v1/[\w/]+)", there_are)
    assert len(found) == 5
    for method, route in found:
        assert alone.request(method, route).status_code in (200, 415)  # without a body


def test_the_name_of_json_in_any_case(alone: TestClient) -> None:
    for name in ("Application/JSON", "application/json; charset=utf-8"):
        headers = {"Content-Type": name}
        assert alone.post("/v1/completions", headers=headers, content=b"{").status_code == 400


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "Identity, gzip"])
def test_a_compressed_body_is_not_read_as_text(alone: TestClient, name: str) -> None:
    content = gzip.compress(b'{"model": "fastserve", "prompt": "a"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": name}
    answer = alone.post("/v1/completions", headers=headers, content=content)
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json()["error"]["message"]


def test_a_body_that_says_it_is_not_compressed(alone: TestClient) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    assert alone.post("/v1/completions", headers=headers, content=b"{").status_code == 400


# --- memory ---------------------------------------------------------------------------------------


def test_bodies_together_are_bounded_until_they_are_answered() -> None:
    size = 600_000
    halves_sent, go_on = threading.Event(), threading.Event()
    body = json.dumps({"model": "fastserve", "prompt": "a" * size}).encode()

    def slowly() -> Iterator[bytes]:
        yield body[:size]
        halves_sent.set()
        assert go_on.wait(DEADLINE_S)
        yield body[size:]

    def post(content: bytes | Iterator[bytes]) -> httpx2.Response:
        headers = {"Content-Type": "application/json"}
        return httpx2.post(url, content=content, headers=headers, timeout=DEADLINE_S)

    with gateway_thread(settings(max_held_bytes=1 << 20)) as gateway, ThreadPoolExecutor(1) as pool:
        url = f"{gateway.url}/v1/completions"
        slow = pool.submit(post, slowly())
        try:
            assert halves_sent.wait(DEADLINE_S)
            wait_for(lambda: post(body).status_code == 429, DEADLINE_S)
            refused = post(body)
        finally:
            go_on.set()
        assert refused.json()["error"]["code"] == "gateway_full"
        assert int(refused.headers["Retry-After"]) > 0
        # The gateway reads the rest, else a proxy would see a reset and answer 502.
        assert "Connection" not in refused.headers
        # There is no model server.
        assert slow.result().status_code == 503
        wait_for(lambda: post(body).status_code == 503, DEADLINE_S)


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastserve_gateway.body.READ_TIMEOUT_S", 0.1)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    with (
        gateway_thread(settings()) as gateway,
        socket.create_connection(gateway.address, DEADLINE_S) as client,
    ):
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 2])
def test_a_failed_request_is_not_left_to_the_collector(stream: bool, prompts: int) -> None:
    def num_requests() -> int:
        return sum(isinstance(one, CompletionRequest) for one in gc.get_objects())

    body = {"model": "fastserve", "prompt": ["a"] * prompts, "stream": stream}
    gc.collect()
    gc.freeze()  # so that only new objects are looked at, again and again
    gc.disable()
    try:
        with gateway_thread(settings()) as gateway:
            url = f"{gateway.url}/v1/completions"
            assert httpx2.post(url, json=body, timeout=DEADLINE_S).status_code == 503
            wait_for(lambda: num_requests() == 0, DEADLINE_S)
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_body_that_could_never_be_held() -> None:
    with pytest.raises(InvalidRequest, match="max_held_bytes: got 1000; must be at least"):
        settings(max_held_bytes=1000)


# --- error messages -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (error_from_status("grpc://10.0.0.7:8001", "INVALID_ARGUMENT", "bad frame"), 400),
        (
            error_from_status(
                "grpc://10.0.0.7:8001",
                "RESOURCE_EXHAUSTED",
                "Sent message larger than max (9 vs. 4)",
            ),
            413,
        ),
        (error_from_http("http://10.0.0.7:8000", 413, None), 413),
    ],
)
def test_refusals_on_the_way_name_no_address(error: InvalidRequest, status: int) -> None:
    shown = from_client_error(error, {})
    assert shown.status == status
    assert shown.body["error"]["param"] is None
    assert "10.0.0.7" not in json.dumps(shown.body)


@pytest.mark.parametrize("error", [ServerUnavailable("x"), RequestTimeout("x")])
def test_a_server_that_does_not_answer_is_unavailable(error: ClientError) -> None:
    assert from_client_error(error, {}).status == 503


def test_refusals_of_a_field_name_it() -> None:
    error = InvalidRequest("input_ids[3]: got 99; token ids are 0 to 9")
    body = from_client_error(error, {}).body["error"]
    assert body["param"] == "prompt[3]"
    assert body["message"] == "prompt[3]: got 99; token ids are 0 to 9"


def test_an_event_is_one_line_for_those_who_go_by_unicode() -> None:
    text = "a\u2028b\x85c\u2029d\re\x1cf"
    sent = event({"text": text}).decode()
    assert len(sent.splitlines()) == 2  # including the empty name
    assert json.loads(sent.removeprefix("data: ")) == {"text": text}


def test_an_address_that_cannot_be_is_refused_before_anybody_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    with pytest.raises(InvalidRequest, match=r"'http://127.0.0.256:8000'"):
        run_gateway(settings(url="http://127.0.0.256:8000"), "127.0.0.1", 0, told.append)
    monkeypatch.setenv("HTTP_PROXY", "foo:bar")
    with pytest.raises(InvalidRequest, match="HTTP_PROXY"):
        run_gateway(settings(url="http://127.0.0.1:8000"), "127.0.0.1", 0, told.append)
    assert told == []


def test_each_server_and_each_model_is_named_once() -> None:
    with pytest.raises(InvalidRequest, match="url: got grpc://a:8001 twice"):
        replace(settings(), urls=["a", "b", "grpc://a:8001"])
    with pytest.raises(InvalidRequest, match="model: got m twice"):
        replace(settings(), models=["m", "m"])
    with pytest.raises(InvalidRequest, match="model: got an empty name"):
        replace(settings(), models=[""])


def test_several_models_are_listed_and_told_apart() -> None:
    app = create_app(replace(settings(), models=["small", "large"]))
    with TestClient(app, base_url="http://127.0.0.1:9000") as client:
        listed = client.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["small", "large"]
        assert client.get("/v1/models/large").json() == listed[1]
        for answer in (
            client.get("/v1/models/medium"),
            client.post("/v1/completions", json={"model": "medium", "prompt": "a"}),
            client.post("/tokenize", json={"model": "medium", "prompt": "a"}),
        ):
            assert (answer.status_code, answer.json()["error"]["message"]) == (
                404,
                "model: got 'medium'; no such model; there are 'small', 'large'",
            )
        answer = client.post("/tokenize", json={"prompt": "a"})
        assert answer.json()["error"]["message"] == "model: must be one of small, large"


# --- the end of the live view ---------------------------------------------------------------------


class NoPictures(Pictures):
    """A watch without a picture, as during a long iteration."""

    async def next_json(self) -> str:
        return await asyncio.get_running_loop().create_future()


async def until(pictures: Pictures, number: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while pictures.num_shown < number:
            await asyncio.sleep(0)


async def rest(viewer: AsyncIterator[bytes]) -> Sequence[bytes]:
    async with asyncio.timeout(DEADLINE_S):
        return [one async for one in viewer]


async def test_the_end_comes_before_what_is_not_read() -> None:
    pictures = Pictures()
    feed = LiveFeed(pictures)  # type: ignore[arg-type]
    viewer = feed.events()
    await anext(viewer)
    await until(pictures, 10)
    feed.close()
    for _ in range(100):  # time in which more would come
        await asyncio.sleep(0)
    assert await rest(viewer) == []


async def test_viewers_hear_something_while_there_is_no_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastserve_gateway.live_feed.KEEPALIVE_S", 0.01)
    feed = LiveFeed(NoPictures())  # type: ignore[arg-type]
    viewer = feed.events()
    async with asyncio.timeout(DEADLINE_S):
        comments = [await anext(viewer) for _ in range(3)]
    feed.close()
    assert await rest(viewer) == []
    assert all(one.startswith(b":") and one.endswith(b"\n\n") for one in comments)


def test_a_viewer_that_does_not_read_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastserve_gateway.app.AsyncFastServeClient", Pictures)
    with (
        gateway_thread(settings(), drain_timeout_s=DRAIN_TIMEOUT_S) as gateway,
        socket.create_connection(gateway.address) as silent,
        httpx2.stream("GET", f"{gateway.url}/live/events", timeout=DEADLINE_S) as reader,
    ):
        silent.sendall(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        num_bytes = 0
        for part in reader.iter_bytes():
            num_bytes += len(part)
            if num_bytes > 1000 * len(PICTURE):  # more than any buffer of the other's
                gateway.server.should_exit = True
        gateway.stop()  # fails if it takes a minute
    assert not caplog.records
