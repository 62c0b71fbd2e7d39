"""The parts of a model's answer, in the order in which the model writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """More text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool."""

    index: int
    """0 for the answer's first call."""
    id: str
    name: str
    """Of the tool."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text of the arguments of call ``index``. All of it together is a JSON object."""

    index: int
    text: str


AnswerPart = Content | Reasoning | CallStart | CallArguments


class PartReader(Protocol):
    """Reads one answer. However its text is cut into pieces, the joined parts are the same."""

    def read(self, text: str) -> list[AnswerPart]:
        """The parts that the answer's next piece of text completes. May withhold text that can
        still become a mark of the format."""
        ...

    def end(self) -> list[AnswerPart]:
        """The rest, when the answer has ended."""
        ...
