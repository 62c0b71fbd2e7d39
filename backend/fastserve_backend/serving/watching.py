"""Requests that watch the engine: they get pictures of it instead of tokens."""

from __future__ import annotations

import time

import msgspec
import triton_python_backend_utils as pb_utils
from fastserve_client import protocol
from fastserve_client.engine_state import EngineState

from fastserve_backend.serving.responses import strings
from fastserve_backend.serving.streaming import (
    Emitter,
    RequestStream,
    ResponseChannel,
    cancelled_error,
)

# A watch ends after this time; a client that wants more asks again. The limit bounds what a client
# that has stopped reading can pile up in the server. It also bounds how long a server that was not
# told to drain waits for watchers: less than its usual exit timeout of 30 s.
WATCH_LIMIT_S = 20.0


class WatchStream(RequestStream):
    """Several threads may call ``push``. The emitter sends only the latest picture."""

    def __init__(self, channel: ResponseChannel, emitter: Emitter) -> None:
        super().__init__(channel, emitter)
        self._state: EngineState | None = None
        self._ended = False
        self._limit_s = time.monotonic() + WATCH_LIMIT_S

    def push(self, state: EngineState | None) -> None:
        """Hand over a picture, or None for the end. Returns at once."""
        if state is None:
            self._ended = True
        else:
            self._state = state
        self._wake()

    def emit(self) -> None:
        self._queued = False
        state, self._state = self._state, None
        ends = self._ended or time.monotonic() >= self._limit_s
        if state is not None:
            text = msgspec.json.encode(state).decode()
            self._channel.send([pb_utils.Tensor(protocol.ENGINE_STATE, strings(text))], ends=ends)
        elif ends:
            self._channel.end()
        if self.finished and self._cancel is not None:
            self._cancel()

    def poll(self) -> None:
        if self._cancel is not None and self._channel.is_cancelled():
            self._cancel()
            self._channel.fail(cancelled_error())
