"""What Codex and the AI SDK send to ``/v1/responses`` by default: stored items, namespaces, tools
with free text, compaction."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from openai import OpenAI
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway
from tool_model import TOOL_CALLS

USER = {"role": "user", "content": [{"type": "input_text", "text": "Say hi."}]}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
LIST = {"type": "function", "name": "list", "strict": False, "parameters": NO_ARGUMENTS}
NAMESPACE = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [LIST]}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}
DIGITS = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
CALLS: dict[str, Any] = {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "logit_bias": {str(TOOL_CALLS): 50.0},
    "chat_template_kwargs": {"thinking": False},
}


def post(gateway: RunningGateway, path: str, **body: Any) -> httpx2.Response:
    asked = {"model": "fastserve", "max_output_tokens": 300, "seed": 3, **body}
    return httpx2.post(f"{gateway.api_url}{path}", json=asked, timeout=REQUEST_TIMEOUT_S)


def respond(gateway: RunningGateway, **body: Any) -> dict[str, Any]:
    answer = post(gateway, "/responses", **body)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def test_a_reference_stands_for_the_stored_item(tool_gateway: RunningGateway) -> None:
    first = respond(tool_gateway, input=[USER], tools=[LIST], **CALLS)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    counts = []
    for item in (call, {"type": "item_reference", "id": call["id"]}, {"id": call["id"]}):
        second = respond(tool_gateway, input=[USER, item, result], max_output_tokens=1)
        counts.append(second["usage"]["input_tokens"])
        counted = post(tool_gateway, "/responses/input_tokens", input=[USER, item, result]).json()
        assert counted == {"object": "response.input_tokens", "input_tokens": counts[0]}
    assert len(set(counts)) == 1
    third = respond(
        tool_gateway, input="And?", previous_response_id=second["id"], max_output_tokens=1
    )
    assert third["usage"]["input_tokens"] > counts[0]  # the items themselves are stored


@pytest.mark.parametrize("unknown", ["msg_1", f"msg_{'0' * 32}_0", "x" * 999])
def test_a_reference_to_nothing_is_named(tool_gateway: RunningGateway, unknown: str) -> None:
    reference = {"type": "item_reference", "id": unknown}
    answer = post(tool_gateway, "/responses", input=[USER, reference, USER])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input.1")
    assert error["message"].startswith(f"input.1: got id '{unknown[:64]}'; no such item")
    assert error["message"].endswith("Send the item itself")


def test_encrypted_reasoning_is_passed_over(tool_gateway: RunningGateway) -> None:
    hidden = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAA"}
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}
    items = [USER, hidden, search, USER]
    answer = post(tool_gateway, "/responses", input=items, max_output_tokens=1)
    assert answer.status_code == 200
    named = answer.headers["FastServe-Ignored-Fields"]
    assert named == "input.1.encrypted_content, input.2"
    assert named in tool_gateway.log()


def test_a_call_of_a_tool_in_a_namespace(tool_gateway: RunningGateway) -> None:
    response = respond(tool_gateway, input=[USER], tools=[NAMESPACE], **CALLS)
    (call,) = response["output"]
    assert (call["type"], call["name"], call["namespace"]) == (
        "function_call",
        "list",
        "mcp__files",
    )
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a.txt"}
    respond(tool_gateway, input=[USER, call, result], tools=[NAMESPACE], max_output_tokens=1)
    named = {"type": "function", "name": "list", "namespace": "mcp__files"}
    respond(tool_gateway, input=[USER], tools=[NAMESPACE, LIST], **{**CALLS, "tool_choice": named})


@pytest.mark.parametrize(
    ("form", "ignored"), [(None, None), (LARK, "tools.0.format"), (DIGITS, None)]
)
def test_a_call_of_a_tool_with_free_text(
    tool_gateway: RunningGateway, form: dict[str, Any] | None, ignored: str | None
) -> None:
    tools = [{**PATCH, "format": form} if form else PATCH]
    limit = {"max_output_tokens": 60}  # the text may have no end
    answer = post(tool_gateway, "/responses", input=[USER], tools=tools, **CALLS, **limit)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("FastServe-Ignored-Fields") == ignored
    (call,) = answer.json()["output"]
    assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch")
    if form is DIGITS:
        assert len(call["input"]) == 3
        assert call["input"].isdecimal()
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    respond(tool_gateway, input=[USER, call, result, USER], tools=tools, max_output_tokens=1)


def test_a_stream_has_the_text(tool_gateway: RunningGateway) -> None:
    tools: Any = [{**PATCH, "format": DIGITS}]
    extra = {name: CALLS[name] for name in ("logit_bias", "chat_template_kwargs")}
    with (
        tool_gateway.client() as client,
        client.responses.create(
            model="fastserve",
            input="Hi",
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            stream=True,
            extra_body={**extra, "seed": 3},
        ) as events,
    ):
        found = {event.type: event for event in events}
    assert not any("function_call_arguments" in kind for kind in found)
    done: Any = found["response.custom_tool_call_input.done"]
    delta: Any = found["response.custom_tool_call_input.delta"]
    item: Any = found["response.output_item.done"]
    assert done.input == delta.delta == item.item.input
    assert done.input.isdecimal()


def test_a_conversation_is_compacted(tool_gateway: RunningGateway) -> None:
    """Also one that is longer than the context."""
    for text in ("Say hi.", "many words " * 2000):
        compact = post(tool_gateway, "/responses/compact", input=text, tools=[LIST]).json()
        assert compact["object"] == "response.compaction"
        (item,) = compact["output"]
        assert item["type"] == "compaction"
        response = respond(tool_gateway, input=[item, USER], max_output_tokens=1)
        summary = item["encrypted_content"].partition(":")[2]
        assert response["usage"]["input_tokens"] >= len(summary.encode())
    others = {"type": "compaction", "encrypted_content": "gAAAAA"}
    answer = post(tool_gateway, "/responses", input=[others, USER], max_output_tokens=1)
    assert answer.headers["FastServe-Ignored-Fields"] == "input.0.encrypted_content"


def test_the_official_client_compacts(tool_gateway: RunningGateway) -> None:
    client: OpenAI
    with tool_gateway.client() as client:
        compact = client.responses.compact(model="fastserve", input="Say hi.")
        assert compact.output[0].type == "compaction"
        counted = client.responses.input_tokens.count(model="fastserve", input="Say hi.")
        assert counted.input_tokens > 0


def test_names_that_are_too_long_stay_apart(tool_gateway: RunningGateway) -> None:
    long = [{**LIST, "name": "a" * 79 + end} for end in "bc"]
    space = {**NAMESPACE, "name": "n" * 64, "tools": long}
    response = respond(tool_gateway, input=[USER], tools=[space], **CALLS)
    assert response["output"][0]["name"] in [one["name"] for one in long]
    assert json.loads(response["output"][0]["arguments"]) == {}
