"""Answers that are a list of blocks: text, reasoning and calls of tools, as the model writes them.

The Responses API calls a block an output item, and Anthropic's API a content block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

from fastserve_chat.parts import AnswerPart, CallStart, Content, Reasoning
from fastserve_chat.written_calls import read_arguments
from fastserve_client import protocol
from fastserve_client.options import ServiceOptions
from fastserve_client.results import Chunk, Completion, TokenLogprob

from fastserve_gateway.answer import Answer, Usage
from fastserve_gateway.chat import ChatAnswer
from fastserve_gateway.chat_conversion import FieldNames, TemplateVariables
from fastserve_gateway.errors import SERVER_FIELDS
from fastserve_gateway.jobs import CompletionJob
from fastserve_gateway.model_formats import ModelFormats
from fastserve_gateway.request_traces import note_usage
from fastserve_gateway.schemas import ChatRequest

BlockKind = Literal["text", "reasoning", "call"]


@dataclass(slots=True)
class Block:
    index: int
    """In the answer."""
    kind: BlockKind
    call: CallStart | None = None
    """Which tool is called; only for a call."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text or reasoning so far; of a call the JSON of its arguments."""
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any] | None:
        """See ``read_arguments``."""
        return read_arguments(self.text)


class BlockAnswer(Answer):
    """One answer to a conversation. Its jobs are those of a chat completion.

    Args:
        chat: the same request as a chat completion.
        names: of this API's fields, where they differ from chat completions.
        variables: see ``TemplateVariables``.
    """

    def __init__(
        self,
        chat: ChatRequest,
        formats: ModelFormats,
        names: FieldNames,
        variables: TemplateVariables,
    ) -> None:
        self._chat = ChatAnswer(chat, formats)
        self._names = names
        self._unused = formats.unused(variables)
        self._choice = self._chat.choice_parts(0)
        self._usage = Usage(num_choices=1)
        note_usage(self._usage)
        self._blocks: list[Block] = []
        self._logprobs: list[TokenLogprob] = []
        """Of all tokens so far, if the request asks for them."""
        self._finish_reason: str | None = None

    @property
    def streams(self) -> bool:
        return self._chat.streams

    @property
    def is_held(self) -> bool:
        """A stream's last events repeat the whole answer."""
        return True

    def jobs(self, service: ServiceOptions) -> list[CompletionJob]:
        return self._chat.jobs(service)

    def field_names(self) -> Mapping[str, str]:
        fields = {protocol.MESSAGES: "messages", **SERVER_FIELDS, **self._chat.field_names()}
        return {name: self._names.of(field) for name, field in fields.items()}

    def unused_fields(self) -> list[str]:
        return self._unused

    def whole(self, completions: Iterable[Completion]) -> dict[str, Any]:
        (completion,) = completions
        self._note(completion)
        for part in self._choice.whole(completion):
            self._add(part)
        self._finish_reason = completion.finish_reason
        return self.result()

    async def events(
        self, chunks: AsyncGenerator[tuple[int, Chunk], None]
    ) -> AsyncGenerator[bytes, None]:
        has_begun = False
        async with aclosing(chunks):
            async for _, chunk in chunks:
                events = [] if has_begun else [*self.first_events()]
                has_begun = True
                self._note(chunk)
                for part in self._choice.read(chunk):
                    events += self._part_events(part)
                self._finish_reason = chunk.finish_reason  # now, for it is about the last block
                if events:
                    yield b"".join(events)
        # One at a time: with log-probabilities each may be megabytes.
        for event in chain(self._end_block(), self.last_events()):
            yield event

    @abstractmethod
    def result(self) -> dict[str, Any]:
        """The whole answer."""

    @abstractmethod
    def first_events(self) -> Iterator[bytes]: ...

    @abstractmethod
    def last_events(self) -> Iterator[bytes]: ...

    @abstractmethod
    def start_events(self, block: Block) -> Iterator[bytes]:
        """A block has begun; its text is empty."""

    @abstractmethod
    def delta_events(self, block: Block, text: str) -> Iterator[bytes]:
        """The last block has more text."""

    @abstractmethod
    def end_events(self, block: Block) -> Iterator[bytes]:
        """The last block is whole, or the answer is cut off in it."""

    @property
    def calls_tools(self) -> bool:
        """Whether the answer ended with calls, which are whole."""
        return self._choice.finish_reason(self._finish_reason) == "tool_calls"

    @property
    def is_cut_off(self) -> bool:
        """Whether the answer ended because it was as long as it may be."""
        return self._finish_reason == "length"

    def _note(self, piece: Chunk | Completion) -> None:
        self._usage.add(0, piece)
        self._logprobs += piece.logprobs

    def _part_events(self, part: AnswerPart) -> Iterator[bytes]:
        if self._starts_block(part):
            yield from self._end_block()
            yield from self.start_events(self._start_block(part))
        if not isinstance(part, CallStart):
            self._blocks[-1].pieces.append(part.text)
            yield from self.delta_events(self._blocks[-1], part.text)

    def _add(self, part: AnswerPart) -> None:
        if self._starts_block(part):
            self._start_block(part)
        if not isinstance(part, CallStart):
            self._blocks[-1].pieces.append(part.text)

    def _start_block(self, part: AnswerPart) -> Block:
        call = part if isinstance(part, CallStart) else None
        self._blocks.append(Block(len(self._blocks), _kind(part), call))
        return self._blocks[-1]

    def _starts_block(self, part: AnswerPart) -> bool:
        if isinstance(part, CallStart):
            return True
        return not self._blocks or self._blocks[-1].kind != _kind(part)

    def _end_block(self) -> Iterator[bytes]:
        if self._blocks:
            yield from self.end_events(self._blocks[-1])


def _kind(part: AnswerPart) -> BlockKind:
    if isinstance(part, Content):
        return "text"
    return "reasoning" if isinstance(part, Reasoning) else "call"
