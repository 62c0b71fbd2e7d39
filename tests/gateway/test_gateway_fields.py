"""Bodies of requests, without a server: what they cost, and which fields are refused."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from fastserve_client.gateway.errors import from_validation
from fastserve_client.gateway.schemas import ChatRequest, CompletionRequest
from pydantic import ValidationError

MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "a"}
NUM_BYTES = 2_000_000
# As docs/deploy.md says; Python's own objects take 64 bytes for an empty list, of 2 bytes of JSON.
MAX_BYTES_PER_BYTE = 45
NESTED = "[" * 150 + "]" * 150

_MEASURE = """
import resource, sys
from fastserve_client.gateway.body import parse_body
from fastserve_client.gateway.errors import ApiError
from fastserve_client.gateway.schemas import ChatRequest, CompletionRequest

def peak_kib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

schema, head, part, num_bytes = sys.argv[1:]
body = (head + ",".join([part] * (int(num_bytes) // (len(part) + 1))) + "]}").encode()
before = peak_kib()
try:
    fields = parse_body(body, globals()[schema])
except ApiError:
    pass
print((peak_kib() - before) * 1024)
"""


@pytest.mark.parametrize(
    ("schema", "field", "part"),
    [
        ("ChatRequest", "messages", "{}"),
        ("ChatRequest", "messages", '{"role":"","content":""}'),
        ("CompletionRequest", "prompt", "1"),
        ("CompletionRequest", "prompt", "[1]"),
        ("CompletionRequest", "prompt", '"a"'),
        ("CompletionRequest", "stop", "1"),
        ("CompletionRequest", 'prompt": "a", "unknown', "[]"),
        pytest.param("CompletionRequest", 'prompt": "a", "unknown', NESTED, id="nested"),
    ],
)
def test_many_small_values_take_no_more_memory_than_is_planned_for(
    schema: str, field: str, part: str
) -> None:
    head = f'{{"model": "m", "{field}": ['
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, schema, head, part, str(NUM_BYTES)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert int(done.stdout) < MAX_BYTES_PER_BYTE * NUM_BYTES


def test_of_many_wrong_messages_the_first_is_named() -> None:
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate({"model": "m", "messages": [{}] * 1000})
    assert raised.value.error_count() <= 2
    assert from_validation(raised.value).body["error"]["param"] == "messages.0.role"


def refusal(schema: type[ChatRequest | CompletionRequest], **fields: Any) -> dict[str, Any]:
    body = MESSAGES if schema is ChatRequest else PROMPT
    with pytest.raises(ValidationError) as raised:
        schema.model_validate(body | fields)
    error: dict[str, Any] = from_validation(raised.value).body["error"]
    return error


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "secret"}}]),
        ("functions", [{"name": "secret"}]),
        ("functions", "secret"),
        ("suffix", "secret"),
        ("best_of", 3),
        pytest.param("best_of", 10**5000, id="long"),
        ("best_of", "2"),
    ],
)
def test_fields_that_change_the_answer_are_refused(schema: Any, name: str, value: Any) -> None:
    error = refusal(schema, n=2, tool_choice="required", **{name: value})
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: got ")
    assert "left out" in error["message"]
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tools", None),
        ("functions", []),
        ("response_format", {"type": "text"}),
        ("response_format", None),
        ("logit_bias", {}),
        ("suffix", ""),
        ("best_of", 1),
        ("best_of", 2),
    ],
)
def test_fields_that_ask_for_nothing_are_taken(name: str, value: Any) -> None:
    for request in (
        ChatRequest.model_validate(MESSAGES | {"n": 2, name: value}),
        CompletionRequest.model_validate(PROMPT | {"n": 2, name: value}),
    ):
        assert request.unknown_fields() == []


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": ["text"]}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {
                "response_format": {
                    "type": "json_object",
                    "json_schema": {"name": "a", "schema": {}},
                }
            },
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_output": {"regex": "a"}},
            "structured_output",
        ),
        ({"logit_bias": ["secret"]}, "logit_bias"),
        ({"logit_bias": {"5": "secret"}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    ],
)
def test_forms_and_biases_that_are_none(schema: Any, fields: dict[str, Any], param: str) -> None:
    error = refusal(schema, **fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert "secret" not in error["message"]


def test_what_forms_become_and_which_of_their_fields_are_not_read() -> None:
    schema = {"type": "object", "secret": {}}
    wanted = {"name": "a", "description": "b", "strict": True, "schema": schema, "other": 1}
    request = ChatRequest.model_validate(
        MESSAGES | {"response_format": {"type": "json_schema", "json_schema": wanted, "also": 2}}
    )
    assert request.options()["structured_output"] == {"json_schema": schema}
    assert request.unknown_fields() == ["response_format.also", "response_format.json_schema.other"]
    request = ChatRequest.model_validate(MESSAGES | {"response_format": {"type": "json_object"}})
    assert request.options()["structured_output"] == {"json_object": True}
    request = ChatRequest.model_validate(MESSAGES | {"structured_output": {"choice": ["a"]}})
    assert request.options()["structured_output"] == {"choice": ["a"]}
