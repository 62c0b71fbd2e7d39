"""From the engine's outputs to Triton's responses.

Four things kill a tritonserver 24.10: two threads that send on one response sender, a cancellation
poll after the FINAL flag, an exception in ``execute`` during such a poll, and an error that ends a
gRPC call at once. So each request has one emitter, whose thread alone uses the request's sender,
from acceptance to FINAL. Errors that end a call wait: see ``ResponseChannel.fail_if_may``.

Triton has no back-pressure: sending to a client that has stopped reading never blocks, and nobody
can see how much is unread. ``max_tokens`` bounds what one request can pile up. A time limit bounds
requests that watch the engine.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from fastserve_backend.errors import OverloadedError
from fastserve_backend.job import FinishReason, JobOutput
from fastserve_backend.serving.outbox import Outbox
from fastserve_backend.serving.responses import ResponseEncoder
from fastserve_backend.serving.sending_shares import SendingShares
from fastserve_backend.serving.tensors import TensorMaker

logger = logging.getLogger(__name__)

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
# The blocks of a cancelled job must be free within 250 ms, including the running iteration. Polling
# one sender is a message to the server and back: 40 µs.
_POLL_INTERVAL_S = 0.15
_POLLS_AT_ONCE = 64
# Tokens wait so long at most for others that are sent with them; the next poll then sends them.
_MOST_HELD_S = 0.2
# After it has handed over a request, Triton's thread reads its call's next one. It does so within
# microseconds, but on busy cores it may be interrupted first.
_CALL_IN_USE_S = 0.1


class ResponseSender(Protocol):
    """Triton's ``InferenceResponseSender``."""

    def send(self, response: Any = None, flags: int = 0) -> None: ...

    def is_cancelled(self) -> bool: ...


class RequestError(Exception):
    """An error for a client, with a ``pb_utils.TritonError`` code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def unexpected_error() -> RequestError:
    """For bugs of the server. Clients must not see exception texts, which may have file paths."""
    return RequestError("internal error; see the server's log", pb_utils.TritonError.INTERNAL)


def shut_down_error() -> RequestError:
    return RequestError(
        "the server is shutting down and could not finish the request",
        pb_utils.TritonError.UNAVAILABLE,
    )


def cancelled_error() -> RequestError:
    return RequestError("the request was cancelled", pb_utils.TritonError.CANCELLED)


class ResponseChannel:
    """Sends one request's responses. Only the emitter's thread uses it, until it is
    ``finished``."""

    def __init__(self, sender: ResponseSender, *, errors_end_call: bool) -> None:
        """
        Args:
            errors_end_call: the first error ends the gRPC stream and is its status.
        """
        self._sender = sender
        self.errors_end_call = errors_end_call
        self._may_fail_s = time.monotonic() + (_CALL_IN_USE_S if errors_end_call else 0.0)
        self.finished = False

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()

    def send(self, tensors: Sequence[Any], *, ends: bool) -> None:
        """Send Triton's tensors as one response."""
        response = pb_utils.InferenceResponse(tensors)
        if ends:
            self.finished = True
            self._sender.send(response, flags=_FINAL)
        else:
            self._sender.send(response)

    def end(self) -> None:
        self.finished = True
        self._sender.send(flags=_FINAL)

    def fail_if_may(self, error: RequestError) -> None:
        """Send the error, unless it is too early: then do nothing, and try again at the next poll.

        Triton's thread that has just handed over the request goes on to read from its call. If an
        error has ended the call by then, this is a segmentation fault.
        """
        if time.monotonic() >= self._may_fail_s:
            self.fail(error)

    def fail(self, error: RequestError) -> None:
        triton_error = pb_utils.TritonError(str(error), error.code)
        response = pb_utils.InferenceResponse(output_tensors=[], error=triton_error)
        self.finished = True
        if self.errors_end_call:
            # FINAL comes with the error: after the end of the call it is a segmentation fault.
            self._sender.send(response, flags=_FINAL)
        else:
            # Two steps: gRPC clients do not see the final marker of a response that is an error.
            self._sender.send(response)
            self._sender.send(flags=_FINAL)


class RequestStream(ABC):
    """One request. Subclasses have a ``push``, with which other threads hand over what to send. The
    emitter's thread calls all other methods."""

    def __init__(
        self, channel: ResponseChannel, emitter: Emitter, tenant: str | None = None
    ) -> None:
        """
        Args:
            tenant: whose job it is; None if it is no job.
        """
        self.tenant = tenant
        self._channel = channel
        self._emitter = emitter
        self._queued = False
        self._cancel: Callable[[], None] | None = None

    @property
    def finished(self) -> bool:
        return self._channel.finished

    def on_accepted(self, cancel: Callable[[], None]) -> None:
        """The engine has the request. If the client cancels from now on, ``cancel`` is called."""
        self._cancel = cancel
        self._emitter.wake(self)

    @abstractmethod
    def emit(self) -> None:
        """Send all that is pending as one response, with FINAL if it is the last."""

    @abstractmethod
    def poll(self) -> None:
        """Called regularly: if the client has gone away, tell the engine, once."""

    def abort(self) -> None:
        """End the request as well as possible after an unexpected error."""
        if self._cancel is not None:
            self._cancel()
        if not self.finished:
            self._channel.fail(unexpected_error())

    def _wake(self) -> None:
        """Something is pending. Any thread may call it."""
        # The emitter clears the flag before it reads what is pending, so nothing is missed.
        if not self._queued:
            self._queued = True
            self._emitter.wake(self)


class RefusedStream(RequestStream):
    """A refused request: ``error`` is its only response. ``Emitter.wake`` or a later poll sends
    it."""

    def __init__(self, channel: ResponseChannel, emitter: Emitter, error: RequestError) -> None:
        super().__init__(channel, emitter)
        self._error = error

    def emit(self) -> None:
        self._channel.fail_if_may(self._error)

    def poll(self) -> None:
        """There is nothing to cancel."""
        self.emit()


class ResponseStream(RequestStream):
    """A request that is a job. One thread, which may be any, calls ``push``.

    Args:
        interval: number of outputs in one response; the first response has one, and the last may
            have fewer. None: there is only one response, at the end.
        on_end: called with the last output, after the last response.
    """

    def __init__(
        self,
        channel: ResponseChannel,
        emitter: Emitter,
        encoder: ResponseEncoder,
        interval: int | None,
        tenant: str,
        on_end: Callable[[JobOutput], None] | None = None,
    ) -> None:
        super().__init__(channel, emitter, tenant)
        self._on_end = on_end
        self._pending: deque[JobOutput] = deque()
        self._encoder = encoder
        self._is_whole = interval is None
        self._interval = interval or 1
        # Only the pushing thread writes the next four.
        self._num_unannounced = 0
        self._num_wanted = 1
        self._oldest_s = 0.0
        self._ended = False
        self._cancelled = False
        self._error: RequestError | None = None  # the request is about to end with it

    def push(self, output: JobOutput) -> None:
        """Hand over new tokens, or the end. Returns at once."""
        if self._num_unannounced == 0:
            self._oldest_s = time.monotonic()
        self._pending.append(output)
        self._num_unannounced += 1
        self._ended = output.finish_reason is not None
        if self._ended or (not self._is_whole and self._num_unannounced >= self._num_wanted):
            self._num_wanted = self._interval
            self._num_unannounced = 0
            self._wake()

    def emit(self) -> None:
        self._queued = False
        if self._is_whole and not self._ended:
            return
        if self._pending and not (self._cancelled or self._encoder.encode_prompt(self._pending[0])):
            self._wake()  # the rest behind what others have to send
            return
        outputs: list[JobOutput] = []
        output: JobOutput | None = None
        while self._pending and self._error is None:
            output = self._pending.popleft()
            self._error = self._error_of(output)
            if self._error is None and not self._cancelled:
                outputs.append(output)
        if outputs and (self._error is None or not self._is_whole):
            ends = outputs[-1].finish_reason is not None
            self._channel.send(self._emitter.tensors.make(self._encoder.encode(outputs)), ends=ends)
        if self._error is not None:
            self._channel.fail_if_may(self._error)
        if self._on_end is not None and output is not None and output.finish_reason is not None:
            self._on_end(output)

    def poll(self) -> None:
        if self._error is not None:
            self._channel.fail_if_may(self._error)
            return
        # Tokens must not wait while their job is preempted, or its ranks are restarted.
        if self._pending and time.monotonic() - self._oldest_s > _MOST_HELD_S:
            self.emit()
        if self.finished or self._cancelled or self._cancel is None:
            return
        if self._channel.is_cancelled():
            self._cancelled = True
            self._cancel()

    def _error_of(self, output: JobOutput) -> RequestError | None:
        """The error that ends the request; None: it goes on, or ends with its answer."""
        if output.finish_reason is None:
            return None
        if self._cancelled:
            return cancelled_error()
        if output.finish_reason is FinishReason.CANCELLED:
            return shut_down_error()
        if isinstance(output.refusal, OverloadedError):
            return RequestError(str(output.refusal), pb_utils.TritonError.UNAVAILABLE)
        if output.refusal is not None:
            return RequestError(str(output.refusal), pb_utils.TritonError.INVALID_ARG)
        if output.finish_reason is FinishReason.ERROR:
            return RequestError(output.error or "", pb_utils.TritonError.INTERNAL)
        return None


class Emitter:
    """A thread that sends the responses of its requests, tenants in turn, and polls whether clients
    cancel them.

    It sleeps while nothing is pending and there is no request. Tokens of one request that arrive
    while the thread is busy with others, or while its tenant `waits <SendingShares>`, are sent
    together.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        """
        Args:
            on_end: called by this emitter's thread after each request's last response; must return
                at once.
        """
        self._on_end = on_end
        self.tensors = TensorMaker()
        """For this emitter's thread alone."""
        self._outbox = Outbox[RequestStream]()
        self._shares = SendingShares()
        # Streams of tenants that wait for their share, by when they are sent; numbers break ties.
        self._held: list[tuple[float, int, RequestStream]] = []
        self._active: set[RequestStream] = set()
        self._num_held = 0
        self._num_calls = 0
        self._is_calling = False
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
        self._thread.start()

    def wake(self, stream: RequestStream) -> None:
        """``stream`` has something to send. Thread-safe, returns at once."""
        self._outbox.put(stream.tenant, stream)

    def close(self) -> None:
        """End the thread once all that was handed over is sent."""
        self._outbox.close()
        self._thread.join()
        self.tensors.forget()

    @property
    def num_active(self) -> int:
        return len(self._active)

    def current_call(self) -> int | None:
        """The number of the thread's call to Triton under way; None: there is none."""
        return self._num_calls if self._is_calling else None

    def _run(self) -> None:
        next_round_s = 0.0
        unpolled: list[RequestStream] = []  # in the current round of polls
        while not self._outbox.is_over or self._held:
            # Send all that waits, then do some polls only: with thousands of streams a whole round
            # takes longer than tokens may wait.
            for number in range(max(1, len(self._outbox))):
                self._emit_held()
                is_waiting = not (number or unpolled)
                stream = self._outbox.take(self._timeout_s(next_round_s) if is_waiting else 0.0)
                if stream is None:
                    break
                self._emit_or_hold(stream)
            if not unpolled and time.monotonic() >= next_round_s:
                unpolled = list(self._active)
                next_round_s = time.monotonic() + _POLL_INTERVAL_S
            for stream in unpolled[-_POLLS_AT_ONCE:]:
                self._guarded(stream, stream.poll)
            del unpolled[-_POLLS_AT_ONCE:]

    def _timeout_s(self, next_round_s: float) -> float | None:
        """How long the thread may sleep; None: until something comes."""
        due_s = [next_round_s] if self._active else []
        if self._held:
            due_s.append(self._held[0][0])
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _emit_or_hold(self, stream: RequestStream) -> None:
        began_s = time.monotonic()
        if wait_s := self._shares.wait_s(stream.tenant, began_s):
            self._num_held += 1
            heapq.heappush(self._held, (began_s + wait_s, self._num_held, stream))
        else:
            self._emit(stream, began_s)

    def _emit_held(self) -> None:
        """Send what has waited long enough."""
        while self._held and self._held[0][0] <= (now_s := time.monotonic()):
            self._emit(heapq.heappop(self._held)[2], now_s)

    def _emit(self, stream: RequestStream, began_s: float) -> None:
        self._guarded(stream, stream.emit)
        now_s = time.monotonic()
        self._shares.charge(stream.tenant, now_s - began_s, now_s)

    def _guarded(self, stream: RequestStream, action: Callable[[], None]) -> None:
        if stream.finished:
            return
        self._num_calls += 1
        self._is_calling = True
        try:
            action()
        except Exception:
            logger.exception("sending a response failed")
            try:
                stream.abort()
            except Exception:
                logger.exception("ending that request failed too")
        self._is_calling = False
        if stream.finished:
            self._active.discard(stream)
            self._on_end()
        else:
            self._active.add(stream)
