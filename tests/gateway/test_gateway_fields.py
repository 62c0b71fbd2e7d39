"""Request bodies without a server: their cost in memory, and the fields that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from fastserve_gateway.body import parse_body
from fastserve_gateway.errors import ApiError, from_validation
from fastserve_gateway.schemas import ChatRequest, CompletionRequest
from pydantic import ValidationError

MESSAGES: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "a"}
NUM_BYTES = 2_000_000
# The factor in docs/deploy.md. Python needs 64 bytes for an empty list, which has 2 bytes in JSON.
MAX_BYTES_PER_BYTE = 45
NESTED = "[" * 150 + "]" * 150

_MEASURE = """
import resource, sys
from fastserve_gateway.body import parse_body
from fastserve_gateway.errors import ApiError
from fastserve_gateway.schemas import ChatRequest, CompletionRequest

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
        ("ChatRequest", "messages", '{"role":"","content":[{"type":"text","text":""}]}'),
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


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("body", ["[]", "null", '"a"', "1", "[[]]"])
def test_a_body_that_is_no_object(schema: Any, body: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse_body(body.encode(), schema)
    assert raised.value.body["error"]["message"] == "the body must be a JSON object"


@pytest.mark.parametrize(
    ("schema", "fields", "message"),
    [
        (ChatRequest, {"messages": ["secret"]}, "messages.0: got a text; must be a JSON object"),
        (
            CompletionRequest,
            {"response_format": "secret"},
            "response_format: got a text; must be a JSON object",
        ),
        (
            ChatRequest,
            {"stream_options": ["secret"]},
            "stream_options: got a list; must be a JSON object",
        ),
        (
            CompletionRequest,
            {"structured_output": "secret"},
            "structured_output: got a text; must be a JSON object",
        ),
        (ChatRequest, {"messages": "secret"}, "messages: got a text; must be a list"),
        (ChatRequest, {"messages": []}, "messages: got a list; must have at least 1 item"),
        (ChatRequest, {"logprobs": 5}, "logprobs: got 5; must be true or false"),
        (
            CompletionRequest,
            {"max_tokens": "secret"},
            "max_tokens: got a text; must be a whole number",
        ),
        (CompletionRequest, {"n": True}, "n: got true; must be a whole number"),
        (ChatRequest, {"model": None}, "model: got null; must be text"),
    ],
)
def test_a_wrong_kind_of_value_is_refused_in_the_words_of_json(
    schema: Any, fields: dict[str, Any], message: str
) -> None:
    """The message has no words of Python's, such as names of classes, and no text of the body."""
    assert refusal(schema, **fields)["message"] == message


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match=r"^model: must be given$"):
        parse_body(b'{"prompt": "secret"}', CompletionRequest)


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
        ("functions", [{"name": "secret"}]),
        ("functions", "secret"),
        ("suffix", "secret"),
        ("guided_json", {"type": "object", "secret": 1}),
        ("guided_regex", "secret"),
        ("guided_choice", ["secret"]),
        ("guided_grammar", "secret"),
        ("structured_outputs", {"json": {"secret": 1}}),
        ("grammar", "secret"),
        ("json_schema", {"secret": 1}),
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


def test_the_size_of_tools_is_counted_in_bytes() -> None:
    function = {"name": "f", "description": "é" * 140_000}
    error = refusal(ChatRequest, tools=[{"type": "function", "function": function}])
    assert error["message"].startswith("tools: got 280")


def test_completions_have_no_tools() -> None:
    tools = [{"type": "function", "function": {"name": "secret"}}]
    error = refusal(CompletionRequest, tools=tools)
    assert error["param"] == "tools"
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
        ("stream_options", {}),
        ("stream_options", {"include_usage": False}),
        ("stream_options", {"include_usage": None}),
        ("logprobs", False),
        ("stop", []),
        ("stop_token_ids", []),
        ("bad_words", []),
        ("guided_json", None),
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
        ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": []}}, "response_format.schema"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "schema": {},
                    "json_schema": {"name": "a", "schema": {}},
                }
            },
            "response_format",
        ),
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
        ({"stop": ["secret"] * 17}, "stop"),
        ({"stop_token_ids": [5] * 129}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [5] * 16385}, "allowed_token_ids"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids"),
        ({"bad_words": "secret"}, "bad_words"),
        ({"bad_words": ["secret"] * 65}, "bad_words"),
        ({"bad_words": [5]}, "bad_words"),
        ({"min_p": "secret"}, "min_p"),
        ({"skip_special_tokens": "secret"}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
    ],
)
def test_forms_and_biases_that_are_none(schema: Any, fields: dict[str, Any], param: str) -> None:
    error = refusal(schema, **fields)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert "secret" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "top"),
    [
        ({"top_logprobs": 0}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": None, "top_logprobs": None}, None),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 2}, 2),
    ],
)
def test_defaults_of_logprobs_may_be_written_out(fields: dict[str, Any], top: int | None) -> None:
    request = ChatRequest.model_validate(MESSAGES | fields)
    assert request.options()["logprobs"] == top
    assert request.unknown_fields() == []
    assert (
        CompletionRequest.model_validate(PROMPT | {"logprobs": False}).options()["logprobs"] is None
    )


@pytest.mark.parametrize(
    ("schema", "fields", "param"),
    [
        (ChatRequest, {"top_logprobs": 1}, "top_logprobs"),
        (ChatRequest, {"top_logprobs": 1, "logprobs": False}, "top_logprobs"),
        (ChatRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CompletionRequest, {"logprobs": True}, "logprobs"),
        (CompletionRequest, {"stop_token_ids": "5"}, "stop_token_ids"),
        (CompletionRequest, {"stop_token_ids": [True]}, "stop_token_ids"),
        (CompletionRequest, {"stop_token_ids": [[5]]}, "stop_token_ids"),
        (CompletionRequest, {"stop_token_ids": False}, "stop_token_ids"),
    ],
)
def test_what_is_not_a_default_is_refused(schema: Any, fields: dict[str, Any], param: str) -> None:
    assert refusal(schema, **fields)["param"] == param


@pytest.mark.parametrize("given", [5, [5], [5, 7]])
def test_stop_tokens_go_to_the_server_as_they_are(given: Any) -> None:
    for request in (
        ChatRequest.model_validate(MESSAGES | {"stop_token_ids": given}),
        CompletionRequest.model_validate(PROMPT | {"stop_token_ids": given}),
    ):
        assert request.options()["stop_token_ids"] == given
        assert request.unknown_fields() == []


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_fields_of_vllm_go_to_the_server(schema: Any) -> None:
    given = {
        "min_p": 0.05,
        "allowed_token_ids": [5, 7],
        "bad_words": ["a", " b"],
        "truncate_prompt_tokens": -1,
        "skip_special_tokens": False,
    }
    request = schema.model_validate(MESSAGES | PROMPT | given)
    assert request.options().items() >= given.items()


@pytest.mark.parametrize("schema", [ChatRequest, CompletionRequest])
def test_a_byte_order_mark_is_passed_over(schema: Any) -> None:
    body = json.dumps(MESSAGES | PROMPT | {"max_tokens": 3})
    request = parse_body(body.encode("utf-8-sig"), schema)
    assert request.max_tokens == 3
    for other in (body.encode("utf-16"), "\ufeff\ufeff{}".encode(), b"\xef\xbb\xbf"):
        with pytest.raises(ApiError, match="the body is not valid JSON"):
            parse_body(other, schema)


def test_schemas_beside_json_object_count() -> None:
    def wanted(**form: Any) -> Any:
        request = ChatRequest.model_validate(MESSAGES | {"response_format": form})
        assert request.unknown_fields() == []
        return request.options()["structured_output"]

    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert wanted(type="json_object", schema=schema) == {
        "json_schema": {"type": "object", **schema}
    }
    listed = {"type": "array"}
    assert wanted(type="json_object", schema=listed) == {"json_schema": listed}
    assert wanted(type="json_object", schema={}) == {"json_object": True}
    assert wanted(type="json_object", schema=None) == {"json_object": True}
    assert wanted(type="json_schema", schema=schema) == {"json_schema": schema}
    assert wanted(type="text", schema=None, json_schema=None) is None


FORMATTED = {
    "type": "object",
    "properties": {
        "format": {"type": "string", "format": "date"},
        "a": {"type": "array", "items": {"format": "regex"}},
        "b": {"anyOf": [{"format": "uuid"}, {"format": "iri"}], "enum": [{"format": "x"}]},
    },
    "not": {"format": "x"},
    "additionalProperties": {"type": "integer", "format": "int32"},
    "$defs": {"c": {"format": "x"}, "d": True, "e": {"format": 5}},
}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": FORMATTED},
                }
            },
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_object", "schema": FORMATTED}},
            "response_format.schema",
        ),
        ({"structured_output": {"json_schema": FORMATTED}}, "structured_output.json_schema"),
        (
            {"structured_output": {"json_schema": FORMATTED}, "response_format": {"type": "text"}},
            "structured_output.json_schema",
        ),
    ],
)
def test_formats_that_are_left_out_are_named(fields: dict[str, Any], path: str) -> None:
    assert ChatRequest.model_validate(MESSAGES | fields).unknown_fields() == [
        f"{path}.properties.a.items.format",
        f"{path}.properties.b.anyOf.1.format",
        f"{path}.additionalProperties.format",
        f"{path}.$defs.c.format",
    ]


def test_messages_of_assistants_that_call_tools() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "On it.", "tool_calls": None, "refusal": None},
        {"role": "tool", "content": [{"type": "text", "text": "5"}], "tool_call_id": "c"},
    ]
    request = ChatRequest.model_validate({"model": "m", "messages": messages})
    assert request.prompts == [
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "assistant", "content": "On it."},
            {"role": "tool", "content": "5", "tool_call_id": "c"},
        ]
    ]
    assert request.unknown_fields() == []


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "system"}, "messages.0.content"),
        ({"role": "user", "content": None, "tool_calls": [{}]}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content"),
        ({"role": "user", "content": ["secret"]}, "messages.0.content"),
        ({"role": "assistant", "content": "a", "tool_calls": ["f"]}, "messages.0.tool_calls.0"),
    ],
)
def test_messages_that_say_nothing_are_refused(message: dict[str, Any], param: str) -> None:
    error = refusal(ChatRequest, messages=[message])
    assert error["param"] == param
    assert "secret" not in error["message"]


def test_what_parts_say_beside_their_text_is_named() -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "x": None}]
    request = ChatRequest.model_validate(
        {"model": "m", "messages": [{"role": "user", "content": parts, "name": "n", "weight": 1}]}
    )
    assert request.prompts == [[{"role": "user", "content": "a", "name": "n"}]]
    assert request.unknown_fields() == ["messages.content.cache_control", "messages.weight"]


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
