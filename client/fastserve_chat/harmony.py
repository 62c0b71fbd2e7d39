"""Reads the answers of gpt-oss, which are messages on channels.

https://cookbook.openai.com/articles/openai-harmony describes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import Enum, auto

from fastserve_chat.brackets import BracketScanner
from fastserve_chat.call_reader import CallNumbers
from fastserve_chat.call_syntax import partial_suffix
from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from fastserve_chat.tool import Tool
from fastserve_chat.written_calls import NO_ARGUMENTS, NoCallError, json_calls

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
    SKIPPED = auto()
    """What follows the arguments of a call."""


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
        self._scanner = BracketScanner()
        self._call: CallStart | None = None
        """The call whose arguments are parts already."""
        self._num_sent = 0
        """Characters of the message that are such parts."""

    def read(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while self._text and self._step(parts):
            pass
        return parts

    def end(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        if self._kind is _Kind.CALL:
            if self._is_enforced:
                return []
            return self._whole_call(self._text if self._text.strip() else NO_ARGUMENTS)
        if self._kind is _Kind.HEADER:
            self._kind = _Kind.CONTENT
        self._take(parts, len(self._text))
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Decides about some text; False: that needs more text."""
        if self._kind is _Kind.HEADER:
            return self._read_header(parts)
        if self._kind is _Kind.CALL:
            return self._read_call(parts)
        found = [place for mark in _BODY_MARKS if (place := self._text.find(mark)) >= 0]
        if not found:
            self._take(parts, len(self._text) - partial_suffix(self._text, _BODY_MARKS))
            return False
        self._take(parts, min(found))
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

    def _read_call(self, parts: list[AnswerPart]) -> bool:
        begin = len(self._text) - len(self._text.lstrip())
        rest = self._text[begin:]
        if any(mark.startswith(rest) and mark != rest for mark in _ENDS):
            return False
        if rest.startswith(_ENDS):
            parts += self._whole_call(NO_ARGUMENTS)
            self._kind = _Kind.SKIPPED
            return True
        if rest[0] != "{":
            self._kind = _Kind.CONTENT
            parts.append(Content(self._header))
            return True
        end = self._scanner.find_end(self._text, begin)
        if self._is_enforced:
            parts += self._enforced(self._text[: end if end >= 0 else None])
        if end < 0:
            return False
        if not self._is_enforced:
            parts += self._whole_call(self._text[:end])
        self._text, self._kind = self._text[end:], _Kind.SKIPPED
        self._scanner, self._call, self._num_sent = BracketScanner(), None, 0
        return True

    def _take(self, parts: list[AnswerPart], length: int) -> None:
        """The message has ``length`` more characters."""
        text, self._text = self._text[:length], self._text[length:]
        if text and self._kind is not _Kind.SKIPPED:
            parts.append(Reasoning(text) if self._kind is _Kind.REASONING else Content(text))

    def _enforced(self, text: str) -> list[AnswerPart]:
        """The new parts of a call that has this text so far."""
        parts: list[AnswerPart] = []
        if self._call is None:
            self._call = self._numbers.start(self._name)
            self._num_sent = len(text) - len(text.lstrip())
            parts.append(self._call)
        if len(text) > self._num_sent:
            parts.append(CallArguments(self._call.index, text[self._num_sent :]))
            self._num_sent = len(text)
        return parts

    def _whole_call(self, text: str) -> list[AnswerPart]:
        try:
            [call] = json_calls(text, self._name)
        except NoCallError:
            return [Content(self._header + text)]
        return self._numbers.whole(call)
