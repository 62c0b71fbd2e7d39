"""Answers of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastserve_client import protocol
from fastserve_client.options import Prompt, RequestOptions
from fastserve_client.results import Chunk, Completion, TokenLogprob

from fastserve_gateway.answer import ChoicesAnswer
from fastserve_gateway.call_deltas import CallDeltas
from fastserve_gateway.choice_parts import ChoiceParts
from fastserve_gateway.model_formats import ModelFormats
from fastserve_gateway.prompt_answers import vllm_prompt_logprobs
from fastserve_gateway.schemas import ChatRequest

_ROLE = "assistant"


class ChatAnswer(ChoicesAnswer):
    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, formats: ModelFormats) -> None:
        super().__init__(request)
        self._chat = request
        self._formats = formats
        self._wants_logprobs = bool(request.logprobs)
        self._counts_reasoning = formats.splits_reasoning(request)
        self._fields |= {protocol.TEXT_INPUT: "messages", protocol.LOGPROBS: "top_logprobs"}
        if request.max_completion_tokens is not None:
            self._fields[protocol.MAX_TOKENS] = "max_completion_tokens"
        if request.structured_output is None:
            field = "tools" if request.tools else request.schema_field
            self._fields[f"{protocol.STRUCTURED_OUTPUT}.grammar"] = field
        self._parts = [ChoiceParts(formats.reader(request)) for _ in range(request.num_choices)]
        custom = {one.function.name for one in request.tools if one.is_custom}
        self._deltas = [CallDeltas(custom) for _ in range(request.num_choices)]
        self._begun: set[int] = set()
        """Choices whose role has been sent."""

    def job_options(self) -> RequestOptions:
        return self._formats.options(self._chat)

    def prompts(self) -> Sequence[Prompt]:
        return self._formats.prompts(self._chat)

    def choice_parts(self, index: int) -> ChoiceParts:
        """The parts of one choice."""
        return self._parts[index]

    def on_chunk(self, index: int) -> Callable[[Chunk], None] | None:
        counts = self._counts_reasoning and not self.streams
        return self._parts[index].keep if counts else None

    def reasoning_tokens(self) -> int | None:
        if not self._counts_reasoning:
            return None
        return sum(parts.num_reasoning_tokens for parts in self._parts)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        parts = self._parts[index].whole(completion)
        message = {"role": _ROLE, **self._deltas[index].message(parts)}
        return self._choice(index, "message", message, completion)

    def whole(self, completions: Iterable[Completion]) -> dict[str, Any]:
        completions = list(completions)
        answer = super().whole(completions)
        num_top = self._request.prompt_logprobs
        if num_top is not None:
            entries = completions[0].prompt_logprobs
            answer["prompt_logprobs"] = vllm_prompt_logprobs(entries, num_top)
        return answer

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        parts, is_last = self._parts[index].read(chunk), chunk.finish_reason is not None
        delta = self._deltas[index].delta(parts, is_last=is_last)
        if index not in self._begun:
            self._begun.add(index)
            delta = {"role": _ROLE, "content": None if self._chat.tools else "", **delta}
        elif not delta and not chunk.logprobs and chunk.finish_reason is None:
            return None
        return self._choice(index, "delta", delta, chunk)

    def _choice(
        self, index: int, key: str, content: Mapping[str, Any], part: Chunk | Completion
    ) -> dict[str, Any]:
        logprobs = {"content": token_logprobs(part.logprobs)} if self._wants_logprobs else None
        return {
            "index": index,
            key: content,
            "logprobs": logprobs,
            "finish_reason": self._parts[index].finish_reason(part.finish_reason),
        }


def token_logprobs(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's JSON of tokens and their log-probabilities."""
    return [
        {**_token(entry), "top_logprobs": [_token(one) for one in entry.top]} for entry in entries
    ]


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.utf8)}
