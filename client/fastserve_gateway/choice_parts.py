"""The parts of one choice, with what its usage and its finish reason need."""

from __future__ import annotations

from fastserve_chat.parts import AnswerPart, CallStart, PartReader, Reasoning
from fastserve_client.results import Chunk, Completion


class ChoiceParts:
    """Reads one choice as its chunks come, or as a whole."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._kept: list[AnswerPart] = []
        self._in_reasoning = False
        self._num_unread = 0
        """Tokens since the last part."""
        self.num_reasoning_tokens = 0
        self.has_calls = False

    def read(self, piece: Chunk | Completion) -> list[AnswerPart]:
        """The parts that it completes; with a finish reason, all that are left."""
        parts = self._reader.read(piece.text)
        if piece.finish_reason is not None:
            parts += self._reader.end()
        self._num_unread += len(piece.token_ids)
        if parts:
            self._in_reasoning = isinstance(parts[0], Reasoning)
        if parts or piece.finish_reason is not None:
            if self._in_reasoning:
                self.num_reasoning_tokens += self._num_unread
            self._num_unread = 0
        if parts:
            self._in_reasoning = isinstance(parts[-1], Reasoning)
        self.has_calls |= any(isinstance(part, CallStart) for part in parts)
        return parts

    def keep(self, chunk: Chunk) -> None:
        """Reads a chunk of an answer that is given as a whole later."""
        self._kept += self.read(chunk)

    def whole(self, completion: Completion) -> list[AnswerPart]:
        """All parts, whether chunks were kept or not."""
        return self._kept or self.read(completion)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's, for a job that ended with ``reason``."""
        return "tool_calls" if self.has_calls and reason == "stop" else reason
