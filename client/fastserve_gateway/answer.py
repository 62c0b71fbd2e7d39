"""Answers: what a route makes of a request's jobs. Completions and chat completions share most."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from fastserve_client import protocol
from fastserve_client.options import Prompt, RequestOptions, ServiceOptions
from fastserve_client.results import Chunk, Completion

from fastserve_gateway.errors import ApiError
from fastserve_gateway.jobs import CompletionJob, encoded_prompts
from fastserve_gateway.request_traces import note_usage
from fastserve_gateway.schemas import ChatRequest, CompletionRequest

# One encoder for all: json.dumps would make one for each event.
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
# Characters that end a line in Unicode but not in the standard of these events. Readers that go by
# Unicode, such as httpx2's aiter_lines, would cut an event in two.
_LINE_ENDS = {end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
DONE = b"data: [DONE]\n\n"
PartT = TypeVar("PartT", Chunk, Completion)


def event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    text = _ENCODER.encode(payload)
    for end, escaped in _LINE_ENDS.items():
        text = text.replace(end, escaped)
    return b"data: %b\n\n" % text.encode()


def named_event(payload: Mapping[str, Any]) -> bytes:
    """One server-sent event whose name is the payload's ``type``."""
    return f"event: {payload['type']}\n".encode() + event(payload)


@dataclass(slots=True)
class Usage:
    """Tokens of one request. A prompt with several answers counts once."""

    num_choices: int
    """Answers to each prompt. Those of one prompt are neighbours."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int | None = None
    """Those of the completion tokens that are reasoning; None: not counted."""
    cached_tokens: dict[int, int] = field(default_factory=dict)
    """For each prompt the least of its answers. The other answers may have used what that one
    computed."""

    def add(self, index: int, part: Chunk | Completion) -> None:
        """``index`` is the choice's."""
        self.completion_tokens += len(part.token_ids)
        prompt, choice = divmod(index, self.num_choices)
        if choice == 0:
            self.prompt_tokens += part.num_input_tokens or 0
        if part.num_cached_tokens is not None:
            least = self.cached_tokens.get(prompt, part.num_cached_tokens)
            self.cached_tokens[prompt] = min(least, part.num_cached_tokens)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self.cached_tokens.values())

    def to_json(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.reasoning_tokens is not None:
            details = {"reasoning_tokens": self.reasoning_tokens}
            usage["completion_tokens_details"] = details
        return usage


class Answer(ABC):
    """Turns one request into jobs, and their results into the API's JSON."""

    is_stored: ClassVar[bool] = False
    """Whether ``whole`` may keep the answer for later requests."""
    ping: ClassVar[bytes] = b": ping\n\n"
    """What a stream says while it waits for its first event: a comment, which clients skip."""

    @property
    @abstractmethod
    def streams(self) -> bool:
        """Whether the request wants events, or one whole answer."""

    @property
    def is_held(self) -> bool:
        """Whether the gateway holds all of the answer until its end."""
        return not self.streams

    @abstractmethod
    def jobs(self, service: ServiceOptions) -> list[CompletionJob]: ...

    @abstractmethod
    def whole(self, completions: Iterable[Completion]) -> dict[str, Any]:
        """The answer to a request without ``stream``. Completions are in the order of ``jobs``."""

    @abstractmethod
    def events(
        self, chunks: AsyncGenerator[tuple[int, Chunk], None]
    ) -> AsyncGenerator[bytes, None]:
        """The events of a stream. The first comes after the first chunk, or it would have the
        status 200 whatever becomes of the jobs.

        Raises ClientError, as ``chunks`` does.
        """

    @abstractmethod
    def field_names(self) -> Mapping[str, str]:
        """Names of the server's fields in this request, where they differ from completions."""

    def unused_fields(self) -> list[str]:
        """Fields of the request that this model has no use for."""
        return []

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream whose jobs failed."""
        return event(error.body)


class ChoicesAnswer(Answer):
    """An answer with choices: ``n`` for each prompt."""

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    """The field ``object`` of a whole answer."""
    chunk_object: ClassVar[str]
    """The field ``object`` of a stream's event."""

    def __init__(self, request: CompletionRequest | ChatRequest) -> None:
        self._request = request
        self._id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._fields: dict[str, str] = {protocol.PRIORITY: request.priority_field}
        """The result of ``field_names``."""
        if request.structured_output is None:
            wanted = protocol.STRUCTURED_OUTPUT
            self._fields |= {
                f"{wanted}.json_schema": request.schema_field,
                f"{wanted}.json_object": "response_format",
                wanted: "response_format",
            }

    @property
    def streams(self) -> bool:
        return bool(self._request.stream)

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """One choice of a whole answer."""

    @abstractmethod
    def delta(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """One choice of a stream's event; ``None``: the chunk has no news."""

    def answered(self, part: PartT) -> PartT:
        """What the client gets of a job's result."""
        return part

    def field_names(self) -> Mapping[str, str]:
        return self._fields

    def job_options(self) -> RequestOptions:
        """All options but the seed."""
        return self._request.options()

    def prompts(self) -> Sequence[Prompt]:
        return self._request.prompts

    def on_chunk(self, index: int) -> Callable[[Chunk], None] | None:
        """See ``CompletionJob``; ``index`` is the choice's."""
        return None

    def reasoning_tokens(self) -> int | None:
        """Of all choices so far; None: they are not counted."""
        return None

    def jobs(self, service: ServiceOptions) -> list[CompletionJob]:
        """``n`` jobs for each prompt. Those of one prompt are neighbours and differ by seed.

        Raises InvalidRequest: a message that JSON cannot carry.
        """
        request = self._request
        options = RequestOptions(**self.job_options(), **service)
        jobs: list[CompletionJob] = []
        for prompt in encoded_prompts(self.prompts()):
            for choice in range(request.num_choices):
                seeded: RequestOptions = {**options, "seed": request.choice_seed(choice)}
                index = len(jobs)
                job_id = f"{self._id}-{index}"
                jobs.append(CompletionJob(prompt, job_id, seeded, self.on_chunk(index)))
        return jobs

    def whole(self, completions: Iterable[Completion]) -> dict[str, Any]:
        usage = Usage(self._request.num_choices)
        note_usage(usage)
        choices = []
        for index, completion in enumerate(map(self.answered, completions)):
            usage.add(index, completion)
            choices.append(self.choice(index, completion))
        usage.reasoning_tokens = self.reasoning_tokens()
        return {**self._frame(self.object, choices), "usage": usage.to_json()}

    async def events(
        self, chunks: AsyncGenerator[tuple[int, Chunk], None]
    ) -> AsyncGenerator[bytes, None]:
        usage = Usage(self._request.num_choices)
        note_usage(usage)
        include_usage = self._request.include_usage
        async with aclosing(chunks):
            async for index, chunk in chunks:
                part = self.answered(chunk)
                usage.add(index, part)
                choice = self.delta(index, part)
                if choice is not None:
                    frame = self._frame(self.chunk_object, [choice])
                    yield event({**frame, "usage": None} if include_usage else frame)
        if include_usage:
            usage.reasoning_tokens = self.reasoning_tokens()
            yield event({**self._frame(self.chunk_object, []), "usage": usage.to_json()})
        yield DONE

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        frame = {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "choices": choices,
        }
        if self._request.answered_tier is not None:
            frame["service_tier"] = self._request.answered_tier
        return frame
