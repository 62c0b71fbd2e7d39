"""Answers of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from fastserve_client import protocol
from fastserve_client.options import Prompt, RequestOptions
from fastserve_client.results import Chunk, Completion, TokenLogprob

from fastserve_gateway.answer import ChoicesAnswer
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
        message = {"role": _ROLE, **_message(self._parts[index].whole(completion))}
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
        delta = _delta(self._parts[index].read(chunk))
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


def _message(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """The fields of a message. Its content is null if there are only calls."""
    delta = _delta(parts)
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return {"content": None if "tool_calls" in delta else "", **delta}


def _delta(parts: Iterable[AnswerPart]) -> dict[str, Any]:
    """The fields of an event's delta."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function"}
                calls[index]["function"] = function
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def token_logprobs(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's JSON of tokens and their log-probabilities."""
    return [
        {**_token(entry), "top_logprobs": [_token(one) for one in entry.top]} for entry in entries
    ]


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": entry.logprob, "bytes": list(entry.utf8)}
