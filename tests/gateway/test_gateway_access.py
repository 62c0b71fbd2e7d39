"""Keys, limits, routes, unknown fields, metrics, and secrets that the log must not hold."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from fastserve_backend.serving.endpoints import Endpoints
from openai import OpenAI
from running_gateway import (
    COMMAND,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    RunningGateway,
    running_gateway,
)
from waiting import wait_for

KEYS = ("sk-first-0123456789", "sk-second-~!'+/= x")
SECRET = "the prompt that nobody may read"


@pytest.fixture(scope="module")
def guarded(
    endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A strict gateway with keys and small limits, on all interfaces."""
    directory = tmp_path_factory.mktemp("guarded")
    keys = directory / "keys"
    keys.write_text(f"{KEYS[0]}\n\n  {KEYS[1]}\n", encoding="utf-8")
    flags = ["--api-keys-file", str(keys), "--strict", "--host", "0.0.0.0"]
    flags += ["--max-body-bytes", "2000", "--max-jobs", "4"]
    with running_gateway(endpoints.grpc_url, directory / "gateway.log", *flags) as running:
        yield running


def local(url: str) -> str:
    return url.replace("0.0.0.0", "127.0.0.1")


def authorized(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def post(gateway: RunningGateway, body: object, key: str = KEYS[0]) -> httpx2.Response:
    return httpx2.post(
        f"{local(gateway.api_url)}/completions",
        json=body,
        headers=authorized(key),
        timeout=REQUEST_TIMEOUT_S,
    )


def test_only_with_one_of_the_keys(guarded: RunningGateway) -> None:
    url = f"{local(guarded.api_url)}/models"
    headers: list[dict[str, str | bytes]] = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {KEYS[0]}"},
        {"Authorization": f"Bearer {KEYS[0]}x"},
        {"Authorization": f"Bearer {KEYS[0][:-1]}"},
        {"Authorization": b"Bearer \xff\xfe"},
    ]
    for wrong in headers:
        refused = httpx2.get(url, headers=wrong, timeout=REQUEST_TIMEOUT_S)  # type: ignore[arg-type]
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    for key in KEYS:
        headers_of_key = {"Authorization": f"Bearer {key}".encode()}
        assert httpx2.get(url, headers=headers_of_key, timeout=REQUEST_TIMEOUT_S).is_success
    client = OpenAI(base_url=local(guarded.api_url), api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.completions.create(model="fastserve", prompt="Hello")


def test_health_is_open_and_metrics_are_not(guarded: RunningGateway) -> None:
    url = local(guarded.url)
    assert httpx2.get(f"{url}/health", timeout=REQUEST_TIMEOUT_S).json() == {"status": "ok"}
    assert httpx2.get(f"{url}/metrics", timeout=REQUEST_TIMEOUT_S).status_code == 401
    assert httpx2.get(
        f"{url}/metrics", headers=authorized(KEYS[0]), timeout=REQUEST_TIMEOUT_S
    ).is_success


def test_a_body_that_is_too_large(guarded: RunningGateway) -> None:
    body = {"model": "fastserve", "prompt": "x" * 2000}
    refused = post(guarded, body)
    assert refused.status_code == 413
    assert "2000 bytes" in refused.json()["error"]["message"]

    def chunks() -> Iterator[bytes]:  # sent without a length
        for _ in range(5):
            yield b" " * 1000

    headers = authorized(KEYS[0]) | {"Content-Type": "application/json"}
    url = f"{local(guarded.api_url)}/completions"
    assert (
        httpx2.post(url, content=chunks(), headers=headers, timeout=REQUEST_TIMEOUT_S).status_code
        == 413
    )


def test_a_body_that_is_too_large_for_its_answers(guarded: RunningGateway) -> None:
    body = {"model": "fastserve", "prompt": "x" * 600, "max_tokens": 1}
    assert post(guarded, body | {"n": 2}).status_code == 200
    refused = post(guarded, body | {"n": 4})
    assert refused.status_code == 413
    assert "for 4 answers" in refused.json()["error"]["message"]


def test_too_many_answers(guarded: RunningGateway) -> None:
    refused = post(guarded, {"model": "fastserve", "prompt": ["a", "b"], "n": 3})
    assert refused.status_code == 400
    assert "at most 4" in refused.json()["error"]["message"]
    accepted = post(guarded, {"model": "fastserve", "prompt": ["a", "b"], "n": 2, "max_tokens": 1})
    assert len(accepted.json()["choices"]) == 4


def test_strict_refuses_unknown_fields(guarded: RunningGateway) -> None:
    body = {"model": "fastserve", "prompt": "a", "user": "u", "max_tokens": 1}
    refused = post(guarded, body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "user"


def test_unknown_fields_are_ignored_and_named(gateway: RunningGateway, client: OpenAI) -> None:
    raw = client.completions.with_raw_response.create(
        model="fastserve",
        prompt="a",
        user="u",
        max_tokens=1,
        stream=True,
        stream_options={"include_usage": True, "x": 1},  # type: ignore[typeddict-unknown-key]
        extra_body={"a: b\r\nX-Evil": 1, "gruß": 2, "nothing": None},
    )
    names = "user, a%3A%20b%0D%0AX-Evil, gru%C3%9F, stream_options.x"
    assert raw.headers["FastServe-Ignored-Fields"] == names
    assert "X-Evil" not in raw.headers
    plain = client.completions.with_raw_response.create(model="fastserve", prompt="a", max_tokens=1)
    assert "FastServe-Ignored-Fields" not in plain.headers


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fastserve"]
    assert client.models.retrieve("fastserve").id == "fastserve"
    with pytest.raises(openai.NotFoundError, match="no such model; there is 'fastserve'"):
        client.models.retrieve("meta/other")
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="gpt-4", prompt="Hello")
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"


def test_routes_and_bodies_that_are_wrong(gateway: RunningGateway) -> None:
    url = f"{gateway.api_url}/completions"
    json_type = {"Content-Type": "application/json"}
    answers = {
        404: httpx2.get(f"{gateway.api_url}/nothing", timeout=REQUEST_TIMEOUT_S),
        405: httpx2.get(url, timeout=REQUEST_TIMEOUT_S),
        415: httpx2.post(
            url, content=b"{}", headers={"Content-Type": "text/plain"}, timeout=REQUEST_TIMEOUT_S
        ),
        400: httpx2.post(url, content=b"{", headers=json_type, timeout=REQUEST_TIMEOUT_S),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    for content in (b"", b"[]", b"null", b"[" * 100_000, b'{"model": "\\ud800"}', b"\xff"):
        assert (
            httpx2.post(
                url, content=content, headers=json_type, timeout=REQUEST_TIMEOUT_S
            ).status_code
            == 400
        )
    for path in ("/docs", "/openapi.json"):
        assert httpx2.get(gateway.url + path, timeout=REQUEST_TIMEOUT_S).status_code == 404


def test_metrics_count_by_route_and_status(gateway: RunningGateway, client: OpenAI) -> None:
    route = "/v1/completions"
    completed, missing = gateway.num_requests(route, 200), gateway.num_requests("other", 404)
    client.completions.create(model="fastserve", prompt="a", max_tokens=1)
    gateway.get(f"/nothing/{'x' * 50}")
    # The request before may have been counted only now.
    wait_for(lambda: completed + 1 <= gateway.num_requests(route, 200) <= completed + 2)
    wait_for(lambda: missing + 1 <= gateway.num_requests("other", 404) <= missing + 2)


def test_neither_prompts_nor_keys_are_logged(guarded: RunningGateway) -> None:
    for body in (
        {"model": "fastserve", "prompt": SECRET, "max_tokens": 1},
        {"model": "fastserve", "prompt": SECRET, "stop": [SECRET] * 20},
        {"model": SECRET, "prompt": SECRET, SECRET: SECRET},
    ):
        post(guarded, body)
        post(guarded, body, key="sk-wrong-key")
    for word in (SECRET, SECRET.split()[1], "sk-"):
        assert word not in guarded.log()


def test_jobs_over_http_are_not_logged(endpoints: Endpoints, tmp_path: Path) -> None:
    with running_gateway(endpoints.http_url, tmp_path / "gateway.log") as gateway:
        with gateway.client() as client:
            assert client.completions.create(model="fastserve", prompt="a", max_tokens=1).choices
        assert gateway.log().count("\n") == 1  # the line with its address


# --- mistakes of an operator --------------------------------------------------------------


def refusal(*flags: str) -> str:
    done = subprocess.run(
        [*COMMAND, *flags], capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_public_address_needs_keys() -> None:
    assert "--api-keys-file" in refusal("--host", "0.0.0.0", "--port", "0")


def test_a_file_without_keys(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n \n", encoding="utf-8")
    assert "it has no key" in refusal("--api-keys-file", str(empty))
    foreign = tmp_path / "foreign"
    foreign.write_text("sk-key\n\nsk-schlüssel\n", encoding="utf-8")
    assert "its line 3 is not ASCII" in refusal("--api-keys-file", str(foreign))
    foreign.write_text("sk-schlüssel\n", encoding="latin-1")
    assert "it is not ASCII" in refusal("--api-keys-file", str(foreign))
    assert "No such file" in refusal("--api-keys-file", str(tmp_path / "missing"))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "192.0.2.1"])
def test_a_host_that_is_not_this_machine(host: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-key", encoding="utf-8")
    told = refusal("--host", host, "--port", "0", "--api-keys-file", str(keys))
    assert f"host: got {host!r}; " in told
    assert "--host" in told


def test_a_busy_port_and_a_wrong_url(gateway: RunningGateway) -> None:
    port = gateway.url.rpartition(":")[2]
    assert "choose another one with --port" in refusal("--port", port)
    assert "port: got 65536; must be 0 to 65535" in refusal("--port", "65536")
    assert "url: got 'ftp://x'" in refusal("--port", "0", "--url", "ftp://x")
