"""Answers of models without a format: all their text is content."""

from __future__ import annotations

from fastserve_chat.parts import AnswerPart, Content


class PlainReader:
    """A ``PartReader`` for an answer without calls and reasoning."""

    def read(self, text: str) -> list[AnswerPart]:
        return [Content(text)] if text else []

    def end(self) -> list[AnswerPart]:
        return []
