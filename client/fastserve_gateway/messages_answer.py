"""Answers of ``POST /v1/messages``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fastserve_client.options import ServiceOptions

from fastserve_gateway.answer import named_event
from fastserve_gateway.block_answer import Block, BlockAnswer
from fastserve_gateway.errors import ApiError
from fastserve_gateway.jobs import CompletionJob
from fastserve_gateway.messages_schema import MESSAGES_FIELDS, MessagesRequest
from fastserve_gateway.model_formats import ModelFormats

_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of each kind of block's events, and their field."""


class MessagesAnswer(BlockAnswer):
    """A message of the assistant, with blocks of text, thinking and tool use."""

    ping = named_event({"type": "ping"})

    def __init__(self, request: MessagesRequest, formats: ModelFormats) -> None:
        super().__init__(request.chat, formats, MESSAGES_FIELDS, request.template_variables())
        self._request = request
        self._reasoning = formats.reasoning
        self._id = f"msg_{uuid.uuid4().hex}"

    def jobs(self, service: ServiceOptions) -> list[CompletionJob]:
        """As with Anthropic, ``max_tokens`` may be more than the prompt leaves."""
        return [
            replace(job, options={**job.options, "clip_max_tokens": True})
            for job in super().jobs(service)
        ]

    def result(self) -> dict[str, Any]:
        # An answer may be cut off in the arguments of a call, which then has no input.
        blocks = [one for one in self._blocks if one.kind != "call" or one.arguments() is not None]
        return self._message([_content(block) for block in blocks], self._end(), self._counts())

    def first_events(self) -> Iterator[bytes]:
        # The server counts the prompt's tokens at the end; the last events have the numbers.
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = self._message([], {"stop_reason": None, "stop_sequence": None}, usage)
        yield named_event({"type": "message_start", "message": message})

    def start_events(self, block: Block) -> Iterator[bytes]:
        yield _event("content_block_start", block, content_block=_content(block))

    def delta_events(self, block: Block, text: str) -> Iterator[bytes]:
        kind, field = _DELTAS[block.kind]
        yield _event("content_block_delta", block, delta={"type": kind, field: text})

    def end_events(self, block: Block) -> Iterator[bytes]:
        yield _event("content_block_stop", block)

    def last_events(self) -> Iterator[bytes]:
        yield named_event({"type": "message_delta", "delta": self._end(), "usage": self._counts()})
        yield named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return named_event(error.anthropic_body)

    def _message(
        self, content: list[dict[str, Any]], end: Mapping[str, Any], usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.model,
            "content": content,
            **end,
            "usage": usage,
        }

    def _end(self) -> dict[str, Any]:
        """Why the answer ended."""
        word = self._stop_sequence()
        if self.is_cut_off:
            is_long = self._usage.completion_tokens >= self._request.max_tokens
            reason = "max_tokens" if is_long else "model_context_window_exceeded"
        elif self.calls_tools:
            reason = "tool_use"
        else:
            reason = "end_turn" if word is None else "stop_sequence"
        return {
            "stop_reason": reason,
            "stop_sequence": word if reason == "stop_sequence" else None,
        }

    def _stop_sequence(self) -> str | None:
        """The first of the stop sequences that the answer's tokens have, if any."""
        text = b"".join([entry.utf8 for entry in self._logprobs])
        if self._reasoning is not None and self._blocks and self._blocks[0].kind == "reasoning":
            text = text.partition(self._reasoning.close.encode())[2]  # none counts before
        words = self._request.stop_sequences or ()
        found = {text.find(word.encode()): word for word in words if word.encode() in text}
        return found[min(found)] if found else None

    def _counts(self) -> dict[str, Any]:
        """Tokens, which in this API either came from the cache or are input."""
        cached = self._usage.num_cached_tokens
        return {
            "input_tokens": self._usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._chat.reasoning_tokens() or 0},
        }


def _event(kind: str, block: Block, **fields: Any) -> bytes:
    return named_event({"type": kind, "index": block.index, **fields})


def _content(block: Block) -> dict[str, Any]:
    """The block with its text or arguments so far."""
    if block.call is not None:
        arguments = block.arguments() or {}
        call = block.call
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}
