"""A helper: a child process that answers the engine's questions, and is replaced when it dies.

The engine's side is a subclass of ``HelperProcess``; the child calls ``connect_to_engine``. Nothing
but the helper's own thread ever waits for the child.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec

from fastserve_backend.system.interpreter import child_environment, python_executable
from fastserve_backend.system.logs import log_to_stderr
from fastserve_backend.system.packets import Packets
from fastserve_backend.system.restart_limit import RestartLimiter

# How often a silent child is checked, and whether a restart is allowed again.
CHECK_S = 0.1
# A child that has closed its end is about to exit; killing it sooner would hide its exit code.
_EXIT_TIMEOUT_S = 5.0
_log = logging.getLogger(__name__)

_Received = TypeVar("_Received")


class HelperProcess(ABC, Generic[_Received]):
    """Starts the child, watches it, and replaces it as often as ``RestartLimiter`` allows.

    Any thread may call ``start``, ``send`` and ``stop``. The helper's thread calls the methods that
    a subclass defines; they must return at once, but ``on_started``.

    Args:
        command: arguments of the Python interpreter.
        decoder: of the child's messages.

    Attributes:
        lock: guards the connection. A subclass may guard its own state with it too, so that this
            state and what was sent change together.
    """

    name: ClassVar[str]
    """What logs call the child."""
    meanwhile: ClassVar[str]
    """What jobs do until a dead child is replaced, for the log."""

    def __init__(self, command: Sequence[str], decoder: msgspec.msgpack.Decoder[_Received]) -> None:
        self.lock = threading.Condition()
        self._command = command
        self._decoder = decoder
        self._limiter = RestartLimiter()
        self._packets: Packets[_Received] | None = None  # None: no child takes messages
        self._stop_by_s: float | None = None  # set when stopping: the child is killed after it
        self._thread: threading.Thread | None = None

    # --- What a subclass defines --------------------------------------------------------------

    def is_needed(self) -> bool:
        """Whether a child is to be started now. Called with the lock held."""
        return True

    def on_started(self) -> None:
        """A fresh child takes messages; it knows nothing of those that others were sent."""
        return

    @abstractmethod
    def on_message(self, message: _Received) -> None: ...

    @abstractmethod
    def patience(self) -> tuple[float, float]:
        """The child is killed when it owes an answer and is silent for too long. Called with the
        lock held.

        Returns:
            Since when it owes an answer, as ``time.monotonic`` counts (infinity: it owes none), and
            the most seconds of silence.
        """

    @abstractmethod
    def on_ended(self) -> None:
        """The child is gone: what it was asked and has not answered, it never will."""

    def on_restart_refused(self, limit: str) -> None:
        """A child is needed, but ``limit`` allows none; called again until one is allowed."""
        return

    # --- Any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Have a child from now on, whenever one is needed. Call it again when one is needed and
        was not before."""
        with self.lock:
            if self._thread is None and self._stop_by_s is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self.lock.notify_all()

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message now, or when the child has room for it. Returns at once: False where there
        is no child."""
        with self.lock:
            if self._packets is None:
                return False
            try:
                self._packets.send(message)
            except OSError:  # it has died, which the thread is about to notice
                return False
            return True

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of messages that the child was too busy to take. Called with the lock held."""
        return 0 if self._packets is None else self._packets.num_unsent_bytes

    def stop(self, timeout_s: float) -> None:
        """End the child, and wait until it is gone; idempotent.

        Args:
            timeout_s: how long it may take to end by itself; 0: it is killed.
        """
        with self.lock:
            if self._stop_by_s is None:
                self._stop_by_s = time.monotonic() + timeout_s
                if self._packets is not None:
                    self._packets.end_sending()
                    self._packets = None
            self.lock.notify_all()
        if self._thread is not None:
            self._thread.join()

    # --- The helper's thread ------------------------------------------------------------------

    def _run(self) -> None:
        may_start = True
        while self._wait_until_needed():
            if may_start:
                reason = self._serve()
                if self._stop_by_s is not None:
                    return
                may_start = self._take_restart(reason)
            elif not (may_start := self._limiter.take_restart(time.monotonic()) is not None):
                self.on_restart_refused(self._limiter.describe())
                with self.lock:
                    self.lock.wait_for(lambda: self._stop_by_s is not None, CHECK_S)

    def _wait_until_needed(self) -> bool:
        """False: the helper is stopping."""
        with self.lock:
            self.lock.wait_for(lambda: self._stop_by_s is not None or self.is_needed())
            return self._stop_by_s is None

    def _take_restart(self, reason: str) -> bool:
        """Whether a child that ended for this reason may be replaced at once; the log says so."""
        number = self._limiter.take_restart(time.monotonic())
        limit = self._limiter.describe()
        count = f"restart {number} of at most {limit}" if number else f"there were {limit} already"
        _log.warning("%s %s; %s (%s)", self.name, reason, self.meanwhile, count)
        return number is not None

    def _serve(self) -> str:
        """Start a child and take its messages until it ends or must be ended; returns why."""
        try:
            child, packets = start_helper(self._command, self._decoder)
        except OSError as error:
            return f"cannot be started: {error}"
        reason: str | None = "is replaced"
        try:
            with self.lock:
                self._packets = packets if self._stop_by_s is None else None
            self.on_started()
            reason = self._listen(packets)
        except Exception:
            _log.exception("what %s said is not understood", self.name)
        finally:
            with self.lock:
                self._packets = None
                packets.close()
            self.on_ended()
            code = _end(child, at_once=reason is not None)
        return reason or f"ended with exit code {code}"

    def _listen(self, packets: Packets[_Received]) -> str | None:
        """Take messages until the child closes its end, or return why it must be killed."""
        heard_s = time.monotonic()
        while True:
            poller = select.poll()
            with self.lock:
                poller.register(packets, packets.events)
            if poller.poll(CHECK_S * 1000):
                try:
                    with self.lock:
                        packets.flush()
                    messages = packets.receive()
                except OSError:
                    return None
                for message in messages:
                    self.on_message(message)
                heard_s = time.monotonic()
            else:
                with self.lock:
                    owes_since_s, timeout_s = self.patience()
                if time.monotonic() - max(owes_since_s, heard_s) > timeout_s:
                    return f"has not answered for {timeout_s:.0f} s"
            if self._stop_by_s is not None and time.monotonic() > self._stop_by_s:
                return "has not ended in time"


def start_helper(
    command: Sequence[str], decoder: msgspec.msgpack.Decoder[_Received]
) -> tuple[subprocess.Popen[bytes], Packets[_Received]]:
    """Start a child that calls ``connect_to_engine``. Raises OSError.

    Args:
        command: arguments of the Python interpreter.
        decoder: of the child's messages.
    """
    own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    packets = Packets(own_end, decoder)
    try:
        with child_end:
            child = subprocess.Popen(
                [python_executable(), *command], stdin=child_end.fileno(), env=child_environment()
            )
    except OSError:
        packets.close()
        raise
    return child, packets


def _end(child: subprocess.Popen[bytes], *, at_once: bool) -> int:
    """Returns the exit code. The child is killed, at once or when it does not end by itself."""
    if at_once:
        child.kill()
    try:
        return child.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def connect_to_engine(decoder: msgspec.msgpack.Decoder[_Received]) -> Packets[_Received]:
    """Make this process a helper: it logs to standard error, and lives until the engine closes the
    connection, which is standard input.

    Args:
        decoder: of the engine's messages.
    """
    log_to_stderr()
    # Ctrl-C, or a service manager's stop, reaches all processes; the engine ends its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return Packets(socket.socket(fileno=os.dup(sys.stdin.fileno())), decoder)
