"""Conversations that other services wrote, as agents send them back by default."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway

PICTURE = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": PICTURE}}
ANTHROPIC_IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
INPUT_IMAGE = {"type": "input_image", "image_url": PICTURE}
PLACEHOLDER = "[image left out: this model reads only text]"
USER, THANKS = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Thanks"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def post(gateway: RunningGateway, path: str, body: dict[str, Any]) -> httpx2.Response:
    asked = {"model": "fastserve", **body}
    return httpx2.post(f"{gateway.url}{path}", json=asked, timeout=REQUEST_TIMEOUT_S)


def prompt(gateway: RunningGateway, *messages: dict[str, Any], **fields: Any) -> str:
    """The text that the model gets for messages of a chat completion."""
    body = {"messages": list(messages), "return_token_strs": True, **fields}
    answer = post(gateway, "/tokenize", body)
    assert answer.status_code == 200, answer.text
    return "".join(answer.json()["token_strs"])


def test_an_image_in_the_history_is_a_placeholder(tool_gateway: RunningGateway) -> None:
    shown = {"role": "user", "content": [text("What is this? "), IMAGE]}
    told = prompt(tool_gateway, shown, THANKS, USER)
    assert f"\nuser: What is this? {PLACEHOLDER}\n" in told
    body = {"messages": [shown, THANKS, USER], "max_tokens": 1}
    answer = post(tool_gateway, "/v1/chat/completions", body)
    assert answer.headers["FastServe-Ignored-Fields"] == "messages.content.image_url"
    # What a tool shows is history at once: an agent could not go on.
    result = {"role": "tool", "tool_call_id": "1", "content": [IMAGE]}
    assert f"\ntool: {PLACEHOLDER}" in prompt(tool_gateway, USER, result)


@pytest.mark.parametrize(
    ("path", "field", "part", "param"),
    [
        ("/v1/chat/completions", "messages", IMAGE, "messages.0.content.0"),
        ("/v1/responses", "input", INPUT_IMAGE, "input.0.content.0"),
        ("/v1/messages", "messages", ANTHROPIC_IMAGE, "messages.0.content.0"),
    ],
)
def test_each_api_refuses_an_image_only_in_the_newest_message(
    tool_gateway: RunningGateway, path: str, field: str, part: dict[str, Any], param: str
) -> None:
    limit = "max_output_tokens" if field == "input" else "max_tokens"
    shown = {"role": "user", "content": [part]}
    answer = post(tool_gateway, path, {field: [shown], limit: 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{param}: got type '{part['type']}'; this")
    for later in ([shown, USER], [shown, THANKS, USER]):
        answer = post(tool_gateway, path, {field: later, limit: 1})
        assert answer.status_code == 200, answer.text
        named = "messages.content.image_url" if part is IMAGE else param
        assert answer.headers["FastServe-Ignored-Fields"] == named


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"thinking": "Hm."},
        {"reasoning_text": "Hm."},
        {"reasoning_content": None, "reasoning": "Hm."},
        {"reasoning_details": [{"type": "reasoning.text", "text": "Hm."}]},
        {"content": [{"type": "thinking", "thinking": [text("Hm.")]}, text("Yes")]},
        {"content": [{"type": "reasoning", "text": "Hm."}, text("Yes")]},
    ],
)
def test_reasoning_has_many_names(tool_gateway: RunningGateway, thought: dict[str, Any]) -> None:
    answered = {"role": "assistant", "content": "Yes", **thought}
    told = prompt(tool_gateway, USER, answered, USER)
    assert "\nassistant (Hm.): Yes\n" in told


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_calls_without_arguments(tool_gateway: RunningGateway, arguments: dict[str, Any]) -> None:
    call = {"id": "a" * 9, "type": "function", "function": {"name": "now", **arguments}}
    for content in ({}, {"content": None}, {"content": []}, {"content": ""}):
        asked = {"role": "assistant", "tool_calls": [call], **content}
        result = {"role": "tool", "tool_call_id": "a" * 9, **content}
        told = prompt(tool_gateway, USER, asked, result)
        assert "[TOOL_CALLS]now[ARGS]{}\ntool: " in told


def test_an_answer_without_content(tool_gateway: RunningGateway) -> None:
    assert "\nassistant: \n" in prompt(tool_gateway, USER, {"role": "assistant"}, USER)


def test_what_claude_code_sends(tool_gateway: RunningGateway) -> None:
    """The billing line differs from request to request, and the prompt is the same."""
    found = {"type": "tool_reference", "tool_name": "mcp__files__list"}
    messages = [
        {"role": "user", "content": "Look it up."},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                {"type": "tool_use", "id": "t1", "name": "ToolSearch", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [found]},
                {"type": "tool_result", "tool_use_id": "t2", "content": [ANTHROPIC_IMAGE]},
                {"type": "document", "source": {"type": "text", "data": "A text."}},
            ],
        },
    ]
    sizes = set()
    for number in (1, 22, 333):
        line = text(f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number}0;")
        asked = {"system": [line, text("You are an agent.")], "messages": messages}
        counted = post(tool_gateway, "/v1/messages/count_tokens", asked).json()["input_tokens"]
        answer = post(tool_gateway, "/v1/messages", {**asked, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert answer.headers["FastServe-Ignored-Fields"] == (
            "messages.1.content.0, messages.1.content.1, messages.2.content.1.content.0, system.0"
        )
        usage = answer.json()["usage"]
        sizes |= {counted, usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert len(sizes) == 1
    assert usage["cache_read_input_tokens"] > 0
