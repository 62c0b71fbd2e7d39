"""What the client of a job has got, so that a server can go on with the answer after a loss."""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from fastserve_client import protocol
from fastserve_client.errors import ClientError
from fastserve_client.options import RequestOptions
from fastserve_client.results import Chunk

# More are not kept: 512 KiB of memory for a request, and a message as long.
_MAX_KEPT_TOKENS = 1 << 17
# So long a server is looked for. Meanwhile the client gets nothing.
MOVE_DEADLINE_S = 60.0
# They come once, with the first chunk.
_OF_FIRST_CHUNK = (protocol.PROMPT_LOGPROBS, protocol.RETURN_PROMPT_TOKENS)


@dataclass(frozen=True, slots=True)
class Loss:
    """A server was lost in the middle of an answer."""

    server: str
    error: ClientError
    deadline_s: float
    """Until then a server is looked for; of the event loop's thread's monotonic clock."""


class KeptAnswer:
    """The answer to one job so far.

    Args:
        max_moves: how often it may lose its server and go on.
    """

    def __init__(self, options: RequestOptions, max_moves: int) -> None:
        self.loss: Loss | None = None
        """Set while no server goes on with the answer."""
        self.token_ids = array("i")
        """What the client has; empty if that is too much to keep."""
        self.is_whole = False
        self._options = options
        if max_moves and options.get("seed") is None:  # each server draws the same numbers
            self._options = {**options, "seed": random.randint(0, protocol.MAX_SEED)}
        self._moves_left = max_moves
        self._logprob = self._logprob_of_others = 0.0

    @property
    def may_move(self) -> bool:
        """Whether a server may go on with it."""
        return self._moves_left > 0

    def options(self) -> RequestOptions:
        """Of the rest of the answer."""
        if not self.token_ids:
            return self._options
        given: Mapping[str, Any] = self._options
        rest = {name: value for name, value in given.items() if name not in _OF_FIRST_CHUNK}
        return cast("RequestOptions", rest)

    def add(self, chunk: Chunk) -> Chunk:
        """The next chunk of the present server; returns the chunk as the client gets it."""
        if self._moves_left:
            self.token_ids.extend(chunk.token_ids)
            if len(self.token_ids) > _MAX_KEPT_TOKENS:
                self.token_ids = array("i")
                self._moves_left = 0
        self.is_whole = chunk.finish_reason is not None
        if chunk.cumulative_logprob is not None:
            self._logprob = self._logprob_of_others + chunk.cumulative_logprob
            if self._logprob_of_others:
                return replace(chunk, cumulative_logprob=self._logprob)
        return chunk

    def on_lost(self, server: str, error: ClientError, now_s: float) -> None:
        """The server is lost, which costs a move."""
        self._moves_left -= 1
        self._logprob_of_others = self._logprob
        deadline_s = now_s + MOVE_DEADLINE_S if self.loss is None else self.loss.deadline_s
        self.loss = Loss(server, error, deadline_s)

    def on_resumed(self) -> None:
        """A server goes on."""
        self.loss = None
