"""Pages of other sites: none by default, and those of ``--cors-origin``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client.errors import InvalidRequest
from fastserve_gateway.app import create_app
from lone_gateway import settings
from running_gateway import REQUEST_TIMEOUT_S, running_gateway
from starlette.testclient import TestClient

PAGE = "https://chat.example.com"
CHAT = "/v1/chat/completions"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
}


def guarded(*origins: str) -> TestClient:
    """A gateway with a key, and without a server."""
    return TestClient(create_app(replace(settings("sk-key"), cors_origins=origins)))


def cors_headers(answer: httpx2.Response) -> dict[str, str]:
    prefix = "access-control-"
    return {name: value for name, value in answer.headers.items() if name.startswith(prefix)}


def test_there_are_no_headers_by_default() -> None:
    with guarded() as client:
        assert client.options(CHAT, headers=PREFLIGHT).status_code == 405
        answer = client.get("/v1/models", headers={"Origin": PAGE, "x-api-key": "sk-key"})
        assert answer.status_code == 200
        assert cors_headers(answer) == {}


@pytest.mark.parametrize(
    ("origins", "allowed"), [([PAGE, "http://localhost:3000"], PAGE), (["*"], "*")]
)
def test_a_preflight_needs_no_key(origins: Sequence[str], allowed: str) -> None:
    with guarded(*origins) as client:
        answer = client.options(CHAT, headers=PREFLIGHT)
    assert answer.status_code == 200
    headers = cors_headers(answer)
    assert headers["access-control-allow-origin"] == allowed
    assert "POST" in headers["access-control-allow-methods"]
    assert "x-stainless-os" in headers["access-control-allow-headers"]
    assert ("access-control-allow-credentials" in headers) == (allowed != "*")


@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
def test_pages_read_answers_and_errors(origins: Sequence[str]) -> None:
    with guarded(*origins) as client:
        for path, key, status in (("/v1/models", "sk-key", 200), ("/v1/models", "sk-x", 401),
                                  ("/v1/none", "sk-key", 404)):  # fmt: skip
            answer = client.get(path, headers={"Origin": PAGE, "x-api-key": key})
            headers = cors_headers(answer)
            assert answer.status_code == status
            assert headers["access-control-allow-origin"] == origins[0]
            assert ("access-control-allow-credentials" in headers) == (origins[0] != "*")
            exposed = headers["access-control-expose-headers"].lower().split(", ")
            assert {"x-request-id", "retry-after", "fastserve-ignored-fields"} <= set(exposed)


def test_other_pages_are_refused() -> None:
    others = {**PREFLIGHT, "Origin": "https://evil.example.com"}
    with guarded(PAGE) as client:
        answer = client.options(CHAT, headers=others)
        assert answer.status_code == 400
        assert "access-control-allow-origin" not in cors_headers(answer)
        answer = client.get("/v1/models", headers={**others, "x-api-key": "sk-key"})
        assert "access-control-allow-origin" not in cors_headers(answer)


@pytest.mark.parametrize("origin", ["chat.example.com", f"{PAGE}/", f"{PAGE}/chat", "", "null"])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^cors_origin: got "):
        replace(settings(), cors_origins=[origin])


def test_the_flag(endpoints: Endpoints, tmp_path: Path) -> None:
    body = {"model": "fastserve", "prompt": "Hi", "colour": 1,
            "max_tokens": 1, "stream": True}  # fmt: skip
    flags = ("--cors-origin", PAGE, "--cors-origin", "http://localhost:3000")
    with running_gateway(f"grpc://{endpoints.grpc_url}", tmp_path / "log", *flags) as gateway:
        url, headers = f"{gateway.api_url}/completions", {"Origin": "http://localhost:3000"}
        answer = httpx2.post(url, json=body, headers=headers, timeout=REQUEST_TIMEOUT_S)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert answer.headers["FastServe-Ignored-Fields"] == "colour"
