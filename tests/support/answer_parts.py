"""The parts of an answer, joined so that they can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fastserve_chat.parts import (
    AnswerPart,
    CallArguments,
    CallStart,
    Content,
    PartReader,
    Reasoning,
)


@dataclass
class Joined:
    """An answer whose neighbouring parts of one kind are one."""

    pieces: list[tuple[str, str]] = field(default_factory=list)
    """In order: ``content`` and ``reasoning`` with their text, and calls by name with their
    arguments."""
    ids: list[str] = field(default_factory=list)
    """Of the calls."""

    @property
    def content(self) -> str:
        return "".join(text for kind, text in self.pieces if kind == "content")

    @property
    def reasoning(self) -> str:
        return "".join(text for kind, text in self.pieces if kind == "reasoning")

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [one for one in self.pieces if one[0] not in ("content", "reasoning")]

    def add(self, kind: str, text: str) -> None:
        if self.pieces and self.pieces[-1][0] == kind:
            text = self.pieces.pop()[1] + text
        self.pieces.append((kind, text))


def joined(parts: Iterable[AnswerPart]) -> Joined:
    found = Joined()
    for part in parts:
        match part:
            case Content(text):
                found.add("content", text)
            case Reasoning(text):
                found.add("reasoning", text)
            case CallStart(index, call_id, name):
                assert index == len(found.ids)
                found.ids.append(call_id)
                found.pieces.append((name, ""))
            case CallArguments(index, text):
                assert index == len(found.ids) - 1
                name, before = found.pieces.pop()
                found.pieces.append((name, before + text))
    return found


def read_in_pieces(new_reader: Callable[[], PartReader], pieces: Iterable[str]) -> Joined:
    reader = new_reader()
    parts = [part for piece in pieces for part in reader.read(piece)]
    return joined([*parts, *reader.end()])
