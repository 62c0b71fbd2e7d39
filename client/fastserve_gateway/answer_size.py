"""How much memory an answer takes in the gateway, and its limit.

An answer counts in the bytes of a body that take as much memory as it does, some 45 each
(docs/deploy.md, *Sizing*).

A log-probability is an object of some 250 bytes, until its answer is written. Writing takes up to
2 KB for each, but one answer is written at a time, and has a quarter of all that may be held.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from fastserve_client import protocol
from fastserve_client.options import ChatTemplateOptions, Message
from fastserve_client.results import Chunk, Completion

from fastserve_gateway.errors import invalid
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.held_bodies import Take
from fastserve_gateway.jobs import CompletionJob
from fastserve_gateway.schemas import MAX_LOGPROBS

TOKEN_BYTES = 8
"""Of a token without log-probabilities: its text, in a chunk of its own."""
VALUE_BYTES = 24
"""Of one log-probability, or of one token of a prompt that the answer repeats."""
STREAM_BYTES = 2048
"""Of each job of a stream: the buffers of its connections, and chunks that the client has not read
yet."""
JOB_BYTES = 256
"""Of each job of an answer that is held: its call to the server."""
_DEFAULT_MAX_TOKENS = 16
"""The server's."""
_DESCRIBE_TIMEOUT_S = 10.0


def chunk_bytes(part: Chunk | Completion) -> int:
    """What a part of an answer takes, without what it says about the prompt."""
    num_values = sum(1 + len(entry.top) for entry in part.logprobs)
    return VALUE_BYTES * num_values or TOKEN_BYTES * len(part.token_ids)


def completion_bytes(completion: Completion) -> int:
    """What a whole answer takes, with what it says about the prompt."""
    entries = completion.prompt_logprobs
    num_values = sum(1 + len(entry.top) for entry in entries if entry is not None)
    return chunk_bytes(completion) + VALUE_BYTES * (num_values + len(completion.prompt_tokens))


async def counted(
    chunks: AsyncGenerator[tuple[int, Chunk], None], take: Take
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """The chunks of a stream whose answer is held until its end. Raises what ``take`` raises."""
    async with aclosing(chunks):
        async for index, chunk in chunks:
            take(chunk_bytes(chunk))
            yield index, chunk


@dataclass(frozen=True, slots=True)
class AnswerLimit:
    """Bounds what the answer to one request takes."""

    max_bytes: int
    num_choices: int
    """Jobs of each prompt. They are neighbours."""
    names: Mapping[str, str]
    """Of the server's fields in the request, where they differ."""
    is_held: bool
    """See ``Answer``."""

    async def bounded(
        self, fleet: Fleet, jobs: Sequence[CompletionJob], take: Take
    ) -> list[CompletionJob]:
        """Jobs whose answers take at most ``max_bytes`` together. Takes the room for the jobs, and
        for what they say about their prompts, which comes at once.

        Where ``max_tokens`` means "what fits" (``clip_max_tokens``), less may fit than the model
        allows.

        Raises:
            ApiError: the answer could be larger (400), or there is no room now (429).
            ClientError: the server refuses a prompt, or does not answer.
        """
        prompt_bytes = await self._prompt_bytes(fleet, jobs)
        if not self.is_held:
            take(prompt_bytes + STREAM_BYTES * len(jobs))
            return list(jobs)
        take(prompt_bytes + JOB_BYTES * len(jobs))
        return self._with_bounded_tokens(jobs, self.max_bytes - prompt_bytes)

    async def _prompt_bytes(self, fleet: Fleet, jobs: Sequence[CompletionJob]) -> int:
        options = jobs[0].options
        top = options.get("prompt_logprobs")
        per_token = _num_values(top) + bool(options.get("return_prompt_tokens"))
        if not per_token:
            return 0
        tokens = [await _num_prompt_tokens(fleet, job) for job in jobs[:: self.num_choices]]
        num_values = self.num_choices * sum(tokens) * per_token
        field = "echo" if top is None else self._name(protocol.PROMPT_LOGPROBS)
        if VALUE_BYTES * num_values > self.max_bytes:
            raise invalid(
                field,
                f"got {len(tokens)} prompts of {sum(tokens)} tokens together x {self.num_choices} "
                f"answers to each (n) x {per_token} values of each token = {num_values} values; "
                f"one answer may have {self.max_bytes // VALUE_BYTES}; lower {field} or n, or send "
                "shorter prompts, each in a request of its own",
            )
        return VALUE_BYTES * num_values

    def _with_bounded_tokens(
        self, jobs: Sequence[CompletionJob], max_bytes: int
    ) -> list[CompletionJob]:
        options = jobs[0].options
        values, wanted = _num_values(options.get("logprobs")), options.get("max_tokens")
        num_tokens = _DEFAULT_MAX_TOKENS if wanted is None else wanted
        most = max_bytes // ((VALUE_BYTES * values or TOKEN_BYTES) * len(jobs))
        if num_tokens <= most:
            return list(jobs)
        if options.get("clip_max_tokens") and most > 0:
            return [replace(job, options={**job.options, "max_tokens": most}) for job in jobs]
        field = self._name(protocol.MAX_TOKENS)
        total = len(jobs) * num_tokens * max(1, values)
        factors = f"{len(jobs)} answers (prompts x n) x {num_tokens} tokens ({field})"
        fields = f"{field} or n"
        if values:
            top = self._name(protocol.LOGPROBS)
            factors += f" x {values} values of each token (1 + {top})"
            fields = f"{field}, {top} or n"
        raise invalid(
            field,
            f"got {factors} = {total}; one answer may have {len(jobs) * most * max(1, values)} "
            f"now; lower {fields}, or send several requests",
        )

    def _name(self, field: str) -> str:
        return self.names.get(field, field)


def _num_values(top: int | None) -> int:
    """The log-probabilities of each token: its own, and those of the ``top`` likeliest. The server
    refuses other numbers than 0 to ``MAX_LOGPROBS``."""
    return 0 if top is None else 1 + min(max(0, top), MAX_LOGPROBS)


async def _num_prompt_tokens(fleet: Fleet, job: CompletionJob) -> int:
    """The tokens of the job's prompt, or more. The server counts those of texts.

    Raises ClientError.
    """
    prompt, options = job.prompt, job.options
    kept = options.get("truncate_prompt_tokens")
    if not isinstance(prompt, str) and isinstance(prompt[0], int):
        return len(prompt) if kept is None or kept < 1 else min(kept, len(prompt))
    if kept is not None:  # of a text that may be longer than a prompt
        most = (await fleet.describe(timeout_s=_DESCRIBE_TIMEOUT_S)).max_model_len
        return most if kept < 1 else min(kept, most)
    template = (
        {}
        if isinstance(prompt, str)
        else {name: options.get(name) for name in protocol.CHAT_OPTIONS}
    )
    found = await fleet.tokenize(
        cast("str | Sequence[Message]", prompt),
        add_special_tokens=options.get("add_special_tokens"),
        return_token_strs=False,
        **cast("ChatTemplateOptions", template),
    )
    return found.count
