"""Answers of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastserve_client import protocol
from fastserve_client.results import Chunk, Completion, TokenLogprob

from fastserve_gateway.answer import ChoicesAnswer
from fastserve_gateway.schemas import ChatRequest

_ROLE = "assistant"


class ChatAnswer(ChoicesAnswer):
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._wants_logprobs = bool(request.logprobs)
        self._fields |= {protocol.TEXT_INPUT: "messages", protocol.LOGPROBS: "top_logprobs"}
        if request.max_completion_tokens is not None:
            self._fields[protocol.MAX_TOKENS] = "max_completion_tokens"
        self._begun: set[int] = set()
        """Choices whose role has been sent."""

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        message = {"role": _ROLE, "content": completion.text}
        return self._choice(index, "message", message, completion)

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        delta: dict[str, str] = {}
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": _ROLE, "content": chunk.text}
        elif chunk.text:
            delta = {"content": chunk.text}
        elif not chunk.logprobs and chunk.finish_reason is None:
            return None
        return self._choice(index, "delta", delta, chunk)

    def _choice(
        self, index: int, key: str, content: Mapping[str, str], part: Chunk | Completion
    ) -> dict[str, Any]:
        logprobs = None
        if self._wants_logprobs:
            logprobs = {
                "content": [
                    {**_token(entry), "top_logprobs": [_token(one) for one in entry.top]}
                    for entry in part.logprobs
                ]
            }
        return {
            "index": index,
            key: content,
            "logprobs": logprobs,
            "finish_reason": part.finish_reason,
        }


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.utf8)}
