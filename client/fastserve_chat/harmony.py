"""Reads the answers of gpt-oss, which are messages on channels.

https://cookbook.openai.com/articles/openai-harmony describes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto

from fastserve_chat.call_reader import CallNumbers
from fastserve_chat.call_syntax import partial_suffix
from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from fastserve_chat.tool import Tool
from fastserve_chat.written_calls import NoCallError, json_calls

_MESSAGE = "<|message|>"
_NEXT = ("<|start|>", "<|channel|>")
"""What the next header begins with."""
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = (*_NEXT, " to=")
_BODY_MARKS = (*_ENDS, *_NEXT)
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class _Kind(Enum):
    HEADER = auto()
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class HarmonyReader:
    """A ``PartReader``. The channel analysis is reasoning, and messages to functions are calls.

    Args:
        is_enforced: a grammar makes the arguments of calls, so they are parts as they come.
    """

    def __init__(self, tools: Iterable[Tool], numbers: CallNumbers, *, is_enforced: bool) -> None:
        self._names = {tool.name for tool in tools}
        self._numbers = numbers
        self._is_enforced = is_enforced
        self._kind = _Kind.HEADER
        self._text = ""
        self._header = ""
        self._name = ""
        """Of the called tool."""
        self._call: CallStart | None = None
        """The call whose arguments are parts already."""

    def read(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while self._text and self._step(parts):
            pass
        return parts

    def end(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._kind is _Kind.HEADER:
            self._kind = _Kind.CONTENT
        self._take(parts, len(self._text), is_end=True)
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Decides about some text; False: that needs more text."""
        if self._kind is _Kind.HEADER:
            return self._read_header(parts)
        found = [place for mark in _BODY_MARKS if (place := self._text.find(mark)) >= 0]
        if not found:
            if self._kind is not _Kind.CALL or self._is_enforced:
                held = partial_suffix(self._text, _BODY_MARKS)
                self._take(parts, len(self._text) - held, is_end=False)
            return False
        self._take(parts, min(found), is_end=True)
        for mark in _ENDS:
            self._text = self._text.removeprefix(mark)
        self._kind = _Kind.HEADER
        return True

    def _read_header(self, parts: list[AnswerPart]) -> bool:
        if not any(self._text.startswith(head) for head in _HEADS):
            if any(head.startswith(self._text) for head in _HEADS):
                return False
            self._kind = _Kind.CONTENT
            return True
        header, found, behind = self._text.partition(_MESSAGE)
        if not found:
            return False
        self._header, self._text = header + found, behind
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._kind, self._name = _Kind.CALL, recipient[1]
        elif recipient is not None:
            self._kind = _Kind.CONTENT
            parts.append(Content(self._header))
        else:
            self._kind = _Kind.REASONING if "analysis" in header else _Kind.CONTENT
        return True

    def _take(self, parts: list[AnswerPart], length: int, *, is_end: bool) -> None:
        """The message has ``length`` more characters; ``is_end``: and then it ends."""
        text, self._text = self._text[:length], self._text[length:]
        if self._kind is _Kind.CALL:
            parts += self._enforced(text) if self._is_enforced else self._whole_call(text)
        elif text:
            parts.append(Reasoning(text) if self._kind is _Kind.REASONING else Content(text))
        if is_end:
            self._call = None

    def _enforced(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._call is None:
            self._call = self._numbers.start(self._name)
            parts.append(self._call)
        if text:
            parts.append(CallArguments(self._call.index, text))
        return parts

    def _whole_call(self, text: str) -> list[AnswerPart]:
        try:
            [call] = json_calls(text, self._name)
        except NoCallError:
            return [Content(self._header + text)]
        return self._numbers.whole(call)
