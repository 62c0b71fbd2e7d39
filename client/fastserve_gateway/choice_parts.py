"""The parts of one choice, with what its usage and its finish reason need."""

from __future__ import annotations

import math

from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, PartReader, Reasoning
from fastserve_chat.written_calls import read_arguments
from fastserve_client.results import Chunk, Completion


class ChoiceParts:
    """Reads one choice as its chunks come, or as a whole."""

    def __init__(self, reader: PartReader) -> None:
        self._reader = reader
        self._kept: list[AnswerPart] = []
        self._in_reasoning = False
        self._num_unread = self._unread_length = 0
        """Tokens and characters since the last part."""
        self.num_reasoning_tokens = 0
        """Tokens of which only a share is reasoning are divided by the length of their text."""
        self._arguments: list[str] | None = None
        """Of the last call, in pieces; None: there is no call."""

    def read(self, piece: Chunk | Completion) -> list[AnswerPart]:
        """The parts that it completes; with a finish reason, all that are left."""
        parts = self._reader.read(piece.text)
        if piece.finish_reason is not None:
            parts += self._reader.end()
        self._num_unread += len(piece.token_ids)
        self._unread_length += len(piece.text)
        if parts or piece.finish_reason is not None:
            self.num_reasoning_tokens += self._num_unread_of_reasoning(parts)
            self._num_unread = self._unread_length = 0
        if parts:
            self._in_reasoning = isinstance(parts[-1], Reasoning)
        for part in parts:
            if isinstance(part, CallStart):
                self._arguments = []
            elif isinstance(part, CallArguments) and self._arguments is not None:
                self._arguments.append(part.text)
        return parts

    def _num_unread_of_reasoning(self, parts: list[AnswerPart]) -> int:
        texts = [part.text for part in parts if isinstance(part, Reasoning)]
        if len(texts) == len(parts):
            return self._num_unread if parts or self._in_reasoning else 0
        # No server says which token ends the reasoning.
        share = len("".join(texts)) / max(1, self._unread_length)
        return min(self._num_unread, math.ceil(self._num_unread * share))

    def keep(self, chunk: Chunk) -> None:
        """Reads a chunk of an answer that is given as a whole later."""
        self._kept += self.read(chunk)

    def whole(self, completion: Completion) -> list[AnswerPart]:
        """All parts, whether chunks were kept or not."""
        return self._kept or self.read(completion)

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's, for a job that ended with ``reason``. A stop word may have cut off a call."""
        if reason != "stop" or self._arguments is None:
            return reason
        return "stop" if read_arguments("".join(self._arguments)) is None else "tool_calls"
