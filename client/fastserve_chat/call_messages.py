"""Messages of conversations in which the assistant calls tools, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def assistant_message(
    text: str, reasoning: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """An assistant's message, with ``calls`` as ``function_call`` makes them."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def function_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call of a tool in an assistant's message. ``arguments`` is JSON text."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tool_message(call_id: str, output: str) -> dict[str, Any]:
    """What a tool returned."""
    return {"role": "tool", "tool_call_id": call_id, "content": output}
