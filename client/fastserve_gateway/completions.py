"""Answers of ``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fastserve_client import protocol
from fastserve_client.results import Chunk, Completion, TokenLogprob

from fastserve_gateway.answer import ChoicesAnswer, PartT
from fastserve_gateway.prompt_answers import TextOffsets, prompt_offsets, vllm_prompt_logprobs
from fastserve_gateway.schemas import CompletionRequest


class CompletionAnswer(ChoicesAnswer):
    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request)
        self._completion_request = request
        self._wants_logprobs = request.logprobs is not None
        if request.prompt_logprobs is None:
            self._fields[protocol.PROMPT_LOGPROBS] = "logprobs"  # which ask for them, with echo
        self._offsets: dict[int, TextOffsets] = {}
        """The offsets of each choice that has begun."""

    def answered(self, part: PartT) -> PartT:
        if not self._completion_request.only_echoes:
            return part
        reason = None if part.finish_reason is None else "length"
        return replace(part, text="", token_ids=(), logprobs=(), finish_reason=reason)

    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice = self._choice(index, completion)
        num_top = self._request.prompt_logprobs
        if num_top is not None:
            entries = completion.prompt_logprobs
            choice["prompt_logprobs"] = vllm_prompt_logprobs(entries, num_top)
        return choice

    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        begins = self._completion_request.echo and index not in self._offsets
        if not (begins or chunk.text or chunk.logprobs or chunk.finish_reason):
            return None
        return self._choice(index, chunk)

    def _choice(self, index: int, part: Chunk | Completion) -> dict[str, Any]:
        text, logprobs = part.text, _Logprobs()
        if index not in self._offsets:
            prompt = b""
            if self._completion_request.echo:
                prompt = self._prompt(index, part)
                if self._wants_logprobs:
                    self._add_prompt(logprobs, prompt, part)
            echoed = prompt.decode(errors="replace")
            text = echoed + text
            self._offsets[index] = TextOffsets(len(echoed))
        for entry in part.logprobs:
            logprobs.add(entry.token, entry, self._offsets[index].add(entry.utf8))
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs.to_json() if self._wants_logprobs else None,
            "finish_reason": part.finish_reason,
        }

    def _prompt(self, index: int, part: Chunk | Completion) -> bytes:
        """The text of the choice's prompt."""
        request = self._completion_request
        prompt = request.prompts[index // request.num_choices]
        if request.echoes_texts:
            assert isinstance(prompt, str)
            return prompt.encode()
        return b"".join(token.utf8 for token in part.prompt_tokens)

    def _add_prompt(self, logprobs: _Logprobs, prompt: bytes, part: Chunk | Completion) -> None:
        offsets = prompt_offsets(prompt, part.prompt_tokens)
        for token, entry, offset in zip(
            part.prompt_tokens, part.prompt_logprobs, offsets, strict=True
        ):
            if entry is not None:
                entry = replace(entry, top=entry.top[: self._completion_request.logprobs])
            logprobs.add(token.token, entry, offset)


@dataclass(slots=True)
class _Logprobs:
    """The field ``logprobs`` of a choice."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, token: str, entry: TokenLogprob | None, offset: int) -> None:
        self.tokens.append(token)
        self.token_logprobs.append(None if entry is None else entry.logprob)
        self.top_logprobs.append(None if entry is None else _by_text(entry))
        self.text_offset.append(offset)

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


def _by_text(entry: TokenLogprob) -> dict[str, float]:
    """Log-probabilities of the token itself and of the likeliest ones, by text.

    Parts of characters share one text. All but one of them are spelled by their bytes, so that a
    reader can tell whether the token itself is the likeliest.
    """
    found = {entry.token: entry.logprob}
    for one in entry.top:
        if one.token_id != entry.token_id:
            text = _byte_spelling(one.utf8) if one.token in found else one.token
            found[text] = one.logprob
    return found


def _byte_spelling(token: bytes) -> str:
    """As OpenAI's API for completions spells such tokens."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
