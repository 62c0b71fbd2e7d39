"""What events and messages of chat completions have of an answer's parts."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content, Reasoning

from fastserve_gateway.custom_tools import custom_input


class CallDeltas:
    """The deltas of one choice.

    Args:
        custom: the names of the tools that take text. Their input is inside the JSON that the model
            writes, so it comes when the call has ended.
    """

    def __init__(self, custom: Container[str]) -> None:
        self._custom = custom
        self._open: tuple[int, str] | None = None
        """The custom call that has not ended: its index, and its arguments so far."""

    def delta(self, parts: Iterable[AnswerPart], *, is_last: bool) -> dict[str, Any]:
        """The fields of an event's delta. With ``is_last`` no parts come after these."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if not isinstance(part, CallArguments):
                self._end_custom(calls)
            match part:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallStart(index, call_id, name):
                    calls[index] = {"index": index, "id": call_id, **self._start(index, name)}
                case CallArguments(index, text) if self._open is not None:
                    self._open = (index, self._open[1] + text)
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if is_last:
            self._end_custom(calls)
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta

    def message(self, parts: Iterable[AnswerPart]) -> dict[str, Any]:
        """The fields of a whole message. Its content is null if there are only calls."""
        delta = self.delta(parts, is_last=True)
        for call in delta.get("tool_calls", ()):
            del call["index"]
        return {"content": None if "tool_calls" in delta else "", **delta}

    def _start(self, index: int, name: str) -> dict[str, Any]:
        if name not in self._custom:
            return {"type": "function", "function": {"name": name, "arguments": ""}}
        self._open = (index, "")
        return {"type": "custom", "custom": {"name": name, "input": ""}}

    def _end_custom(self, calls: dict[int, dict[str, Any]]) -> None:
        if self._open is None:
            return
        index, arguments = self._open
        self._open = None
        call = calls.setdefault(index, {"index": index, "custom": {"input": ""}})
        call["custom"]["input"] = custom_input(arguments)
