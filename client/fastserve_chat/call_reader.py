"""Reads content and calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fastserve_chat.brackets import BracketScanner
from fastserve_chat.call_ids import new_call_id
from fastserve_chat.call_syntax import (
    CallFrame,
    CallSyntax,
    HeaderMatch,
    Mismatch,
    match_header,
    partial_suffix,
)
from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content
from fastserve_chat.tool import Tool
from fastserve_chat.written_calls import (
    NO_ARGUMENTS,
    NoCallError,
    WrittenCall,
    is_xml_closed,
    json_calls,
    python_calls,
    xml_call,
)


class CallNumbers:
    """Numbers the calls of one answer.

    Args:
        id_length: None for OpenAI's form of ids; Mistral's models want 9 letters and digits.
    """

    def __init__(self, id_length: int | None = None) -> None:
        self._id_length = id_length
        self.num_calls = 0

    def start(self, name: str) -> CallStart:
        """The next call."""
        self.num_calls += 1
        return CallStart(self.num_calls - 1, new_call_id(self._id_length), name)

    def whole(self, call: WrittenCall) -> list[AnswerPart]:
        """The parts of a call that is complete."""
        start = self.start(call.name)
        return [start, CallArguments(start.index, call.arguments)]


@dataclass(frozen=True, slots=True)
class BlockProgress:
    """What a block found out about the text since its mark."""

    parts: list[AnswerPart] = field(default_factory=list)
    """The new ones."""
    length: int | None = None
    """Characters of the text that the block takes; None: it needs more text to tell."""
    is_content: bool = False
    """Whether those characters are content, because they are no calls."""


_WAIT = BlockProgress()


class CallBlock(Protocol):
    """One or more calls, from their mark on."""

    closers: tuple[str, ...]
    """What is skipped behind it."""

    def read(self, text: str) -> BlockProgress:
        """``text`` is all since the mark. That of the next call has more at its end."""
        ...

    def end(self, text: str) -> BlockProgress:
        """The answer ended, and ``text`` is all since the mark."""
        ...


class FreeBlock:
    """Calls that a model writes by itself. They count once they are complete and valid."""

    def __init__(self, syntax: CallSyntax, tools: Mapping[str, Tool], numbers: CallNumbers) -> None:
        self.closers: tuple[str, ...] = syntax.closers
        self._syntax = syntax
        self._tools = tools
        self._numbers = numbers
        self._scanner = BracketScanner("\"'" if syntax.value == "python" else '"')
        self._scanned = 0

    def end(self, text: str) -> BlockProgress:
        length = len(text)
        return self._bare_name(text, [length]) or BlockProgress(length=length, is_content=True)

    def read(self, text: str) -> BlockProgress:
        fits = 0
        for header in self._syntax.headers:
            match = match_header(header, text)
            if match is None:
                return _WAIT
            if not isinstance(match, Mismatch):
                return self._read_value(text, match.value_begin, match.name)
            fits = max(fits, match.length)
        behind = (*self._syntax.closers, *self._syntax.marks)
        length = len(text) - partial_suffix(text, behind)
        if length < len(text) and self._named(text[:length]) is not None:
            return _WAIT
        pattern = "|".join(map(re.escape, behind))
        found = self._bare_name(text, [one.start() for one in re.finditer(pattern, text)])
        return found or BlockProgress(length=fits, is_content=True)

    def _bare_name(self, text: str, ends: Iterable[int]) -> BlockProgress | None:
        """The call of a tool whose name comes without arguments, and ends at one of ``ends``."""
        for end in ends:
            name = self._named(text[:end])
            if name is not None:
                return BlockProgress(self._numbers.whole(WrittenCall(name, NO_ARGUMENTS)), end)
        return None

    def _named(self, text: str) -> str | None:
        """The tool of a header that is complete but for the value; None: it is something else."""
        if self._syntax.value != "json":
            return None
        for header in self._syntax.headers:
            match = match_header(header, text.rstrip() + NO_ARGUMENTS)
            if isinstance(match, HeaderMatch) and match.name in self._tools:
                is_all = match.value_begin == len(text.rstrip())
                return match.name if is_all else None
        return None

    def _read_value(self, text: str, begin: int, name: str | None) -> BlockProgress:
        terminator = self._syntax.terminator
        if terminator:
            value_end = text.find(terminator, max(begin, self._scanned - len(terminator)))
            while value_end >= 0 and not self._may_end(text[begin:value_end]):
                value_end = text.find(terminator, value_end + len(terminator))
            self._scanned = len(text)
        else:
            value_end = self._scanner.find_end(text, begin)
        if value_end < 0:
            return _WAIT
        end = value_end + len(terminator)
        try:
            calls = self._calls(text[begin:value_end], name)
        except NoCallError:
            return BlockProgress(length=end, is_content=True)
        parts = [part for call in calls for part in self._numbers.whole(call)]
        return BlockProgress(parts, end)

    def _may_end(self, value: str) -> bool:
        return self._syntax.value != "xml" or is_xml_closed(value)

    def _calls(self, value: str, name: str | None) -> list[WrittenCall]:
        if self._syntax.value == "xml":
            tool = self._tools.get(name or "")
            if tool is None:
                raise NoCallError
            return [xml_call(value, tool)]
        is_python = self._syntax.value == "python"
        calls = python_calls(value) if is_python else json_calls(value, name)
        if any(call.name not in self._tools for call in calls):
            raise NoCallError
        return calls


class EnforcedBlock:
    """Calls that a grammar put into a frame. Their arguments are parts as they come."""

    def __init__(self, frame: CallFrame, numbers: CallNumbers) -> None:
        self.closers: tuple[str, ...] = (frame.end,) if frame.end else ()
        self._frame = frame
        self._numbers = numbers
        self._before_name = frame.opening
        self._position = 0
        """What is read."""
        self._call: CallStart | None = None
        self._begin = 0
        """Where the arguments of the call begin."""
        self._scanner = BracketScanner()

    def read(self, text: str) -> BlockProgress:
        parts: list[AnswerPart] = []
        while True:
            if self._call is None:
                before = self._before_name
                beginning = text[self._position : self._position + len(before)]
                if not before.startswith(beginning):
                    return self._done(parts)
                name_begin = self._position + len(before)
                name_end = text.find(self._frame.after_name, name_begin)
                if name_end < 0:
                    return BlockProgress(parts)
                self._call = self._numbers.start(text[name_begin:name_end])
                parts.append(self._call)
                self._begin = self._position = name_end + len(self._frame.after_name)
                self._scanner = BracketScanner()
            end = self._scanner.find_end(text, self._begin)
            written = text[self._position : end if end >= 0 else None]
            self._position += len(written)
            if written:
                parts.append(CallArguments(self._call.index, written))
            if end < 0:
                return BlockProgress(parts)
            self._call = None
            frame = self._frame
            self._before_name = frame.after_arguments + frame.between + frame.before_name

    def _done(self, parts: list[AnswerPart]) -> BlockProgress:
        if self._position == 0:
            return BlockProgress(length=0, is_content=True)
        return BlockProgress(parts, self._position + len(self._frame.after_arguments))

    def end(self, text: str) -> BlockProgress:
        """A part of the frame that was cut off is no content."""
        return BlockProgress(length=len(text), is_content=self._position == 0)


class CallReader:
    """A ``PartReader`` for content and calls.

    White space between content and calls belongs to neither.

    Args:
        marks: texts at which a block may begin.
        is_bare: a block may also begin where the answer begins, and behind a block.
    """

    def __init__(
        self, marks: tuple[str, ...], is_bare: bool, new_block: Callable[[], CallBlock]
    ) -> None:
        self._marks = marks
        self._is_bare = is_bare
        self._new_block = new_block
        self._text = ""
        """What is not decided yet."""
        self._space = ""
        """White space behind the content, before the text."""
        self._may_be_bare = is_bare
        self._block: CallBlock | None = None
        self._closers: tuple[str, ...] = ()
        """What is skipped next."""
        self._has_calls = False

    def read(self, text: str) -> list[AnswerPart]:
        self._text += text
        parts: list[AnswerPart] = []
        while self._text and self._step(parts):
            pass
        return parts

    def end(self) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        self._closers = ()
        while self._text:
            if self._block is not None:
                self._take(parts, self._block.end(self._text))
            elif not self._step(parts):
                self._take_content(parts, len(self._text))
        if self._space and not self._has_calls:
            parts.append(Content(self._space))
        return parts

    def _step(self, parts: list[AnswerPart]) -> bool:
        """Decides about some text; False: that needs more text."""
        if self._block is not None:
            return self._take(parts, self._block.read(self._text))
        if self._closers:
            return self._skip_closer()
        if self._may_be_bare:
            self._block = self._new_block()
            return True
        found = [place for mark in self._marks if (place := self._text.find(mark)) >= 0]
        if found:
            self._take_content(parts, min(found))
            self._block = self._new_block()
            return True
        self._take_content(parts, len(self._text) - partial_suffix(self._text, self._marks))
        return False

    def _take(self, parts: list[AnswerPart], progress: BlockProgress) -> bool:
        if progress.parts:
            self._has_calls = True
            self._space = ""
            parts += progress.parts
        if progress.length is None:
            return False
        assert self._block is not None
        if progress.is_content:
            self._may_be_bare = False
            self._take_content(parts, progress.length)
        else:
            self._may_be_bare = self._is_bare
            self._closers = self._block.closers
            self._text = self._text[progress.length :]
        self._block = None
        return True

    def _skip_closer(self) -> bool:
        rest = self._text.lstrip()
        for closer in self._closers:
            if rest.startswith(closer):
                self._text = rest[len(closer) :]
                return True
        if any(closer.startswith(rest) for closer in self._closers):
            return False
        self._closers = ()
        return True

    def _take_content(self, parts: list[AnswerPart], length: int) -> None:
        text = self._space + self._text[:length]
        self._text = self._text[length:]
        content = text.rstrip()
        self._space = text[len(content) :]
        if content:
            parts.append(Content(content))


def free_calls(syntax: CallSyntax, tools: Iterable[Tool], numbers: CallNumbers) -> CallReader:
    """Reads what a model writes by itself. Calls of other tools are content."""
    by_name = {tool.name: tool for tool in tools}
    return CallReader(syntax.marks, syntax.is_bare, lambda: FreeBlock(syntax, by_name, numbers))


def enforced_calls(frame: CallFrame, numbers: CallNumbers) -> CallReader:
    """Reads what a grammar made the model write."""
    marks = (frame.opening,) if frame.mark else ()
    return CallReader(marks, not frame.mark, lambda: EnforcedBlock(frame, numbers))
