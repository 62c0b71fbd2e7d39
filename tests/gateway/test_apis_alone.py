"""The Responses and Messages APIs without a model server: keys, errors, stored responses."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_client.key_file import NamedKey
from fastserve_gateway.app import create_app
from fastserve_gateway.auth import ApiKeys
from lone_gateway import MAX_BODY_BYTES, settings
from starlette.testclient import TestClient

MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "fastserve",
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "Hi"}],
}


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "sk-key"},
        {"Authorization": "Bearer sk-key"},
        {"Authorization": "Bearer sk-other", "x-api-key": "sk-key"},
        {"Authorization": "Basic sk-other", "x-api-key": " sk-key "},
    ],
)
def test_a_key_comes_in_either_header(guarded: TestClient, headers: dict[str, str]) -> None:
    assert guarded.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"x-api-key": ""}, {"x-api-key": "sk-ke"}, {"x-api-key": "Bearer sk-key"}],
)
def test_other_keys_are_refused(guarded: TestClient, headers: dict[str, str]) -> None:
    assert guarded.get("/v1/models", headers=headers).status_code == 401


def test_a_tenant_is_that_of_its_key() -> None:
    keys = ApiKeys([NamedKey("ann", 1.0, "sk-a", None), NamedKey("bob", 1.0, "sk-b", None)])
    assert keys.check(None, "sk-b", "any.example").tenant == "bob"
    assert keys.check("Bearer sk-a", "sk-b", "any.example").tenant == "ann"


def error(client: TestClient, method: str, path: str, **request: Any) -> tuple[int, str, str]:
    """Status, type and message of an error in Anthropic's shape."""
    answer = client.request(method, path, **request)
    body = answer.json()
    assert body.keys() == {"type", "error"}
    assert body["error"].keys() == {"type", "message"}
    assert body["type"] == "error"
    return answer.status_code, body["error"]["type"], body["error"]["message"]


def test_errors_of_messages_have_anthropics_shape(alone: TestClient, guarded: TestClient) -> None:
    assert error(guarded, "POST", MESSAGES, json=BODY)[:2] == (401, "authentication_error")
    host = {"Host": "evil.example"}
    assert error(alone, "POST", MESSAGES, json=BODY, headers=host)[:2] == (403, "permission_error")
    assert error(alone, "POST", f"{MESSAGES}/batches")[:2] == (404, "not_found_error")
    assert error(alone, "GET", MESSAGES)[:2] == (405, "invalid_request_error")
    other = {**BODY, "model": "claude"}
    assert error(alone, "POST", MESSAGES, json=other)[:2] == (404, "not_found_error")
    large = {**BODY, "system": "x" * MAX_BODY_BYTES}
    assert error(alone, "POST", MESSAGES, json=large)[:2] == (413, "request_too_large")
    assert error(alone, "POST", MESSAGES, content="Hi")[:2] == (415, "invalid_request_error")
    status, kind, message = error(alone, "POST", MESSAGES, json={**BODY, "max_tokens": "5"})
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("max_tokens: ")
    for streams in (False, True):  # there is no server
        body = {**BODY, "stream": streams}
        assert error(alone, "POST", MESSAGES, json=body)[:2] == (503, "api_error")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_without_a_store_there_are_no_responses(alone: TestClient, method: str) -> None:
    answer = alone.request(method, "/v1/responses/resp_1")
    assert answer.status_code == 404
    assert "no such response" in answer.json()["error"]["message"]


def test_a_response_that_is_gone_cannot_be_continued(alone: TestClient) -> None:
    body = {"model": "fastserve", "input": "Hi", "previous_response_id": "resp_1"}
    answer = alone.post("/v1/responses", json=body)
    assert answer.status_code == 404
    found = answer.json()["error"]
    assert (found["code"], found["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_names_of_tenants_and_priorities_count_for_all_apis(alone: TestClient) -> None:
    with TestClient(
        create_app(settings("sk-key")),
        base_url="http://llm.example.com",
        headers={"x-api-key": "sk-key"},
    ) as guarded:
        urgent = guarded.post(MESSAGES, json={**BODY, "priority": -1})
        assert urgent.status_code == 403
        body = {"model": "fastserve", "input": "Hi", "service_tier": "priority"}
        answer = guarded.post("/v1/responses", json=body)
        assert answer.status_code == 403
        assert answer.json()["error"]["param"] == "service_tier"
        named = guarded.post("/v1/responses", json={**body, "tenant": "x", "service_tier": None})
        assert named.json()["error"]["param"] == "tenant"
