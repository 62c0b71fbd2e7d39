"""What clients send by default never ends their conversation, on any of the APIs.

What the server cannot serve is left out and named, unless that would make the answer false.
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from fastserve_gateway.body import parse_body
from fastserve_gateway.errors import ApiError
from fastserve_gateway.messages_schema import MessagesRequest
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest
from fastserve_gateway.tool_fields import MAX_TOOLS
from pydantic_core import to_json
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway
from tool_model import TOOL_CALLS

CHAT, RESPONSES, MESSAGES = "chat", "responses", "messages"
USER = {"role": "user", "content": "Hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    CHAT: (ChatRequest, {"model": "m", "messages": [USER]}),
    RESPONSES: (ResponsesRequest, {"model": "m", "input": [USER]}),
    MESSAGES: (MessagesRequest, {"model": "m", "max_tokens": 9, "messages": [USER]}),
}


def function(api: str, name: str = "f") -> dict[str, Any]:
    if api == MESSAGES:
        return {"name": name, "input_schema": SCHEMA}
    if api == RESPONSES:
        return {"type": "function", "name": name, "parameters": SCHEMA}
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


def read(api: str, **fields: Any) -> Any:
    schema, body = BODIES[api]
    return parse_body(to_json({**body, **fields}), schema)


def chat_of(api: str, **fields: Any) -> ChatRequest:
    request = read(api, **fields)
    if api == RESPONSES:
        request = request.chat(())
    return request.chat if api == MESSAGES else request


def ignored(api: str, **fields: Any) -> list[str]:
    names: list[str] = read(api, **fields).unknown_fields()
    return names


def refusal(api: str, **fields: Any) -> tuple[str, str]:
    """The field that a 400 names, and its message."""
    with pytest.raises(ApiError) as refused:
        read(api, **fields)
    assert refused.value.status == 400
    return refused.value.body["error"]["param"], str(refused.value)


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize(
    "kind",
    [
        *("web_search", "web_search_20250305", "web_search_preview", "file_search", "mcp"),
        *("code_interpreter", "code_execution_20250825", "image_generation", "local_shell"),
        *("computer_use_preview", "tool_search_tool_regex_20251119", "mcp_toolset", "unheard_of"),
    ],
)
def test_tools_that_others_run_are_left_out(api: str, kind: str) -> None:
    hosted = {"type": kind, "name": "theirs", "max_uses": 5}
    tools = [hosted, function(api), hosted]
    assert ignored(api, tools=tools) == ["tools.0", "tools.2"]
    assert [one.function.name for one in chat_of(api, tools=tools).tools] == ["f"]
    assert ignored(api, tools=[hosted]) == ["tools.0"]
    assert chat_of(api, tools=[hosted]).tools == []


@pytest.mark.parametrize("api", BODIES)
def test_tools_behind_the_most_are_left_out(api: str) -> None:
    tools = [function(api, f"f{number}") for number in range(MAX_TOOLS + 2)]
    assert ignored(api, tools=tools) == [f"tools.{MAX_TOOLS}", f"tools.{MAX_TOOLS + 1}"]
    assert len(chat_of(api, tools=tools).tools) == MAX_TOOLS


@pytest.mark.parametrize(
    ("api", "choice", "field"),
    [
        (CHAT, "required", "tool_choice"),
        (CHAT, {"type": "function", "function": {"name": "theirs"}}, "tool_choice.function.name"),
        (CHAT, {"type": "web_search"}, "tool_choice"),
        (RESPONSES, "required", "tool_choice"),
        (RESPONSES, {"type": "function", "name": "theirs"}, "tool_choice.name"),
        (RESPONSES, {"type": "web_search"}, "tool_choice"),
        (MESSAGES, {"type": "any"}, "tool_choice"),
        (MESSAGES, {"type": "tool", "name": "theirs"}, "tool_choice.name"),
    ],
)
def test_a_choice_of_a_tool_that_is_left_out_is_refused(api: str, choice: Any, field: str) -> None:
    """The answer would not be the call that was asked for."""
    hosted = {"type": "web_search", "name": "theirs"}
    named = isinstance(choice, dict) and choice["type"] != "any"
    tools = [hosted, function(api)] if named else [hosted]
    param, message = refusal(api, tools=tools, tool_choice=choice)
    assert param == field
    assert "must be" in message or "give a function, or the choice auto" in message


# Fields of the body: the API, the fields, and what the header names.
FIELDS: list[tuple[str, dict[str, Any], list[str]]] = [
    *((api, {"service_tier": "standard"}, ["service_tier"]) for api in BODIES),
    *((api, {"service_tier": "priority"}, []) for api in BODIES),
    (MESSAGES, {"service_tier": "standard_only"}, []),
    *((api, {"prompt_cache_key": "k"}, ["prompt_cache_key"]) for api in BODIES),
    *((api, {"prompt_cache_retention": "24h"}, ["prompt_cache_retention"]) for api in BODIES),
    *((api, {"safety_identifier": "x"}, ["safety_identifier"]) for api in BODIES),
    (CHAT, {"user": "x"}, ["user"]),
    (RESPONSES, {"user": "x"}, []),
    *((api, {"store": True}, ["store"]) for api in (CHAT, MESSAGES)),
    *((RESPONSES, {"store": value}, []) for value in (True, False)),
    (CHAT, {"metadata": {"a": "b"}}, ["metadata"]),
    (RESPONSES, {"metadata": {"a": "b"}}, []),
    (MESSAGES, {"metadata": {"user_id": "x" * 600}}, []),
    (CHAT, {"verbosity": "low"}, ["verbosity"]),
    (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (RESPONSES, {"truncation": "disabled"}, []),
    *((RESPONSES, {"truncation": value}, ["truncation"]) for value in ("auto", "later", {"a": 1})),
    (RESPONSES, {"include": ["reasoning.encrypted_content", "unheard_of"]}, []),
    (RESPONSES, {"reasoning": {"effort": "xhigh", "summary": "auto"}}, ["reasoning.summary"]),
    (RESPONSES, {"reasoning": {"effort": None, "summary": None}}, []),
    (RESPONSES, {"max_tool_calls": 3}, ["max_tool_calls"]),
    (RESPONSES, {"stream_options": {"include_obfuscation": True}}, ["stream_options"]),
    (RESPONSES, {"client_metadata": {"a": "b"}}, ["client_metadata"]),
    (RESPONSES, {"background": False, "conversation": None, "prompt": None}, []),
    (
        CHAT,
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        ["stream_options.include_obfuscation"],
    ),
    (CHAT, {"modalities": ["text"], "audio": None}, ["modalities"]),
    (CHAT, {"prediction": {"type": "content", "content": "x"}}, ["prediction"]),
    (CHAT, {"web_search_options": {}}, ["web_search_options"]),
    *((CHAT, {"function_call": value, "functions": []}, []) for value in ("auto", "none")),
    (MESSAGES, {"cache_control": {"type": "ephemeral"}}, []),
    *(
        (MESSAGES, {name: value}, [name])
        for name, value in {
            "context_management": {"edits": []},
            "container": "c",
            "mcp_servers": [{"type": "url", "url": "u"}],
            "betas": ["interleaved-thinking-2025-05-14"],
            "inference_geo": "us",
            "unheard_of": [1],
        }.items()
    ),
    (MESSAGES, {"thinking": {"type": "adaptive", "display": "summarized"}}, ["thinking.display"]),
    (MESSAGES, {"thinking": {"type": "unheard_of"}}, ["thinking.type"]),
    (
        MESSAGES,
        {"output_config": {"effort": "max", "task_budget": 5}},
        ["output_config.task_budget"],
    ),
]


@pytest.mark.parametrize(("api", "fields", "names"), FIELDS)
def test_fields(api: str, fields: dict[str, Any], names: list[str]) -> None:
    assert ignored(api, **fields) == names


def conversation(api: str, *given: dict[str, Any]) -> dict[str, Any]:
    return {"input" if api == RESPONSES else "messages": [*given]}


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize(
    "kind",
    [
        *("container_upload", "redacted_thinking", "server_tool_use", "web_search_tool_result"),
        *("mcp_tool_use", "mcp_tool_result", "compaction", "unheard_of"),
    ],
)
def test_unknown_parts_are_left_out(api: str, role: str, kind: str) -> None:
    parts = [{"type": kind, "id": "x"}, {"type": "text", "text": "Hi"}]
    given = conversation(api, {"role": role, "content": parts}, USER)
    place = "input.0" if api == RESPONSES else "messages.0"
    name = f"messages.content.{kind}" if api == CHAT else f"{place}.content.0"
    assert ignored(api, **given) == [name]
    texts = [message["content"] for message in chat_of(api, **given).template_messages]
    assert texts == ["Hi", "Hi"]


@pytest.mark.parametrize("api", BODIES)
@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_texts_of_all_apis_are_read(api: str, kind: str) -> None:
    given = conversation(api, {"role": "user", "content": [{"type": kind, "text": "Paris"}]})
    assert ignored(api, **given) == []
    assert chat_of(api, **given).template_messages == [{"role": "user", "content": "Paris"}]


@pytest.mark.parametrize("api", BODIES)
def test_an_empty_message_is_empty(api: str) -> None:
    given = conversation(api, {"role": "user", "content": []})
    assert chat_of(api, **given).template_messages == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("output", "text"),
    [(None, ""), ("", ""), ("a", "a"), ({"a": 1}, '{"a": 1}'), ([1], "[1]"), (0, "0"),
     ([{"type": "text", "text": "a"}], "a")],
)  # fmt: skip
def test_a_tool_may_return_any_json(output: Any, text: str) -> None:
    results = {
        CHAT: {"role": "tool", "tool_call_id": "c", "content": output},
        RESPONSES: {"type": "function_call_output", "call_id": "c", "output": output},
        MESSAGES: {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": output}],
        },
    }
    for api, result in results.items():
        (message, _) = chat_of(api, **conversation(api, result, USER)).template_messages
        assert message == {"role": "tool", "tool_call_id": "c", "content": text}


@pytest.mark.parametrize("arguments", [None, "", {}, "{}"])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    calls = {
        CHAT: {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            ],
        },
        RESPONSES: {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
        MESSAGES: {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c", "name": "f", "input": arguments}],
        },
    }
    for api, call in calls.items():
        (message, _) = chat_of(api, **conversation(api, call, USER)).template_messages
        found = message["tool_calls"][0]["function"]["arguments"]
        assert (json.loads(found) if isinstance(found, str) else found) == {}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "data": "a"}}, "a"),
        (
            {"type": "document", "title": "T", "source": {"type": "content", "content": "a"}},
            "T\n\na",
        ),
        ({"type": "search_result", "content": [{"type": "text", "text": "a"}]}, "a"),
    ],
)
def test_documents_of_text_are_read(block: dict[str, Any], text: str) -> None:
    given = conversation(MESSAGES, {"role": "user", "content": [block]})
    assert chat_of(MESSAGES, **given).template_messages == [{"role": "user", "content": text}]


def test_the_earlier_name_of_a_format_is_read() -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    for fields in ({"output_format": wanted}, {"output_config": {"format": wanted}}):
        assert ignored(MESSAGES, **fields) == []
        assert chat_of(MESSAGES, **fields).wanted_output == {"json_schema": SCHEMA}


# --- tools with free text in chat completions -----------------------------------------------------

PATCH = {"type": "custom", "custom": {"name": "apply_patch", "description": "Edits files."}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
DIGITS = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]{3}"}}
FORCED: dict[str, Any] = {
    "model": "fastserve",
    "messages": [USER],
    "max_tokens": 300,
    "seed": 3,
    "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}},
    "logit_bias": {str(TOOL_CALLS): 50.0},
    "chat_template_kwargs": {"thinking": False},
}


def with_format(wanted: dict[str, Any]) -> dict[str, Any]:
    return {**PATCH, "custom": {**PATCH["custom"], "format": wanted}}


def post(gateway: RunningGateway, **fields: Any) -> httpx2.Response:
    url = f"{gateway.api_url}/chat/completions"
    answer = httpx2.post(url, json=FORCED | fields, timeout=REQUEST_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_call_of_a_tool_with_text(tool_gateway: RunningGateway) -> None:
    tools = [{"type": "web_search"}, with_format(DIGITS)]
    answer = post(tool_gateway, tools=tools)
    assert answer.headers["FastServe-Ignored-Fields"] == "tools.0"
    (choice,) = answer.json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["type"]) == ("tool_calls", "custom")
    assert call["custom"]["name"] == "apply_patch"
    assert call["custom"]["input"].isdigit()
    events = post(tool_gateway, tools=tools, stream=True).text.splitlines()
    data = [json.loads(one[6:]) for one in events if one.startswith("data: {")]
    deltas = [one for event in data for one in event["choices"][0]["delta"].get("tool_calls", ())]
    assert "".join(one["custom"]["input"] for one in deltas) == call["custom"]["input"]
    assert [one["custom"]["name"] for one in deltas if "type" in one] == ["apply_patch"]
    history = [USER, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": ""}]
    post(tool_gateway, tools=tools, messages=history)


def test_a_grammar_in_lark_is_named(tool_gateway: RunningGateway) -> None:
    answer = post(tool_gateway, tools=[with_format(LARK)], max_tokens=1)
    assert answer.headers["FastServe-Ignored-Fields"] == "tools.0.custom.format"


@pytest.mark.parametrize("name", [None, "", "a b", "x" * 129])
def test_a_name_of_a_tool_with_text_is_checked(name: Any) -> None:
    param, message = refusal(CHAT, tools=[{"type": "custom", "custom": {"name": name}}])
    assert param == "tools.0"
    assert "custom.name: must have 1 to 128 letters" in message
