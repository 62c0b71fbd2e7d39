"""The messages that a chat template gets, and their form."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend.checkpoints.chat_messages import check_messages
from fastserve_backend.errors import InvalidRequestError

TEXT = {"type": "text", "text": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def with_arguments(arguments: Any) -> dict[str, Any]:
    return {**CALL, "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Hello", "Hello"),
        ("", ""),
        ([TEXT], "Hello"),
        ([TEXT, {"type": "text", "text": ", you"}], "Hello, you"),
        ((TEXT,), "Hello"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_parts_of_text_are_joined(role: str, content: Any, text: str) -> None:
    assert check_messages([{"role": role, "content": content}]) == [{"role": role, "content": text}]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user"}, ""),
        ({"content": "a"}, ""),
        ({}, ""),
        ("Hello", ""),
        (None, ""),
        ({"role": "user", "content": None}, ".content"),
        ({"role": "user", "content": 5}, ".content"),
        ({"role": "user", "content": b"a"}, ".content"),
        ({"role": "user", "content": {"type": "text", "text": "a"}}, ".content"),
        ({"role": "user", "content": []}, ".content"),
        ({"role": "user", "content": ["a"]}, ".content"),
        ({"role": "user", "content": [None]}, ".content"),
        ({"role": "user", "content": [{"text": "a"}]}, ".content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, ".content"),
        ({"role": "user", "content": [TEXT, {"type": "image_url", "image_url": {}}]}, ".content"),
        ({"role": "user", "content": "\ud800"}, ".content"),
        ({"role": None, "content": "a"}, ".role"),
        ({"role": "\udfff", "content": "a"}, ".role"),
        ({"role": "user", "content": None, "tool_calls": [CALL]}, ".content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, ".content"),
        ({"role": "assistant", "tool_calls": None}, ""),
        ({"role": "assistant", "content": "a", "tool_calls": "f"}, ".tool_calls"),
        ({"role": "assistant", "content": "a", "tool_calls": {"f": 1}}, ".tool_calls"),
        ({"role": "assistant", "tool_calls": ["f"]}, ".tool_calls"),
        ({"role": "user", "content": "a", "name": 5}, ".name"),
        ({"role": "tool", "content": "a", "tool_call_id": {}}, ".tool_call_id"),
        ({"role": "assistant", "content": "a", "reasoning": ["a"]}, ".reasoning"),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "\ud800"},
            ".reasoning_content",
        ),
    ],
)
def test_what_is_no_message_is_named(message: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_messages([{"role": "user", "content": "secret"}, message])
    assert caught.value.field == f"messages[1]{field}"
    assert "secret" not in str(caught.value)
    assert "Hello" not in str(caught.value)


@pytest.mark.parametrize("messages", [None, [], (), "Hello", {"role": "user"}, 5, iter([])])
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^messages: got .*; must be a list of at least"):
        check_messages(messages)


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": "On it."}])
def test_an_assistant_that_calls_tools_needs_no_content(content: dict[str, Any]) -> None:
    message = {"role": "assistant", **content, "tool_calls": [CALL]}
    text = content.get("content") or ""
    assert check_messages([message]) == [
        {"role": "assistant", "content": text, "tool_calls": [CALL]}
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"x": 1}', {"x": 1}), ({"x": 1}, {"x": 1}), ("{x", "{x"), ("5", "5"), (None, None)],
)
def test_arguments_of_calls_become_what_templates_expect(arguments: Any, expected: Any) -> None:
    message = {"role": "assistant", "tool_calls": [with_arguments(arguments)]}
    (checked,) = check_messages([message])
    assert checked["tool_calls"] == [with_arguments(expected)]
    assert message["tool_calls"] == [with_arguments(arguments)]  # the caller's stay as they were


def test_other_keys_stay_and_empty_calls_do_not() -> None:
    message = {"role": "tool", "content": "2", "tool_call_id": "c1", "tool_calls": None}
    assert check_messages([message]) == [{"role": "tool", "content": "2", "tool_call_id": "c1"}]
