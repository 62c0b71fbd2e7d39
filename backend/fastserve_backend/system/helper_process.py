"""A helper: a child process that answers the engine's questions, and is replaced when it dies.

The engine has a ``HelperProcess``; the child calls ``connect_to_engine``. They talk MessagePack
over a pair of sockets. Nothing but the helper's own thread ever waits for the child.
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
from typing import Generic, TypeVar

import msgspec

from fastserve_backend.system.interpreter import child_environment, python_executable
from fastserve_backend.system.logs import log_to_stderr
from fastserve_backend.system.packets import Packets
from fastserve_backend.system.restart_limit import RestartLimiter

# How often a silent child is checked, and whether a restart is allowed again.
CHECK_S = 0.1
# A child that has closed its end is about to exit; killing it sooner would hide its exit code.
_EXIT_TIMEOUT_S = 5.0
_encoder = msgspec.msgpack.Encoder()
_log = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class HelperOwner(ABC, Generic[_Answer]):
    """Who asks a helper, and decides what its silence and its death mean.

    The helper's thread calls all methods. They must return at once, but ``on_helper_started``.
    """

    def is_helper_needed(self) -> bool:
        """Whether a process is to be started now. Called with the helper's lock held."""
        return True

    def on_helper_started(self) -> None:
        """A fresh process takes messages; it knows nothing of those that others were sent."""
        return

    @abstractmethod
    def on_helper_message(self, message: _Answer) -> None: ...

    @abstractmethod
    def reason_to_kill(self, heard_s: float) -> str | None:
        """Why a process must be replaced that has been silent since ``heard_s``; None: it may go
        on. The time is that of ``time.monotonic``. Called with the helper's lock held."""

    @abstractmethod
    def on_helper_ended(self) -> None:
        """The process is gone: what it was asked and has not answered, it never will."""

    def on_restart_refused(self, limit: str) -> None:
        """A process is needed, but ``limit`` allows none; called again until one is allowed."""
        return


class HelperProcess(Generic[_Answer]):
    """Starts the child, watches it, and replaces it as often as ``RestartLimiter`` allows.

    ``start``, ``send`` and ``close`` may be called from any thread.

    Args:
        name: what logs call the child.
        meanwhile: what jobs do until a dead child is replaced, for the log.
        command: arguments of the Python interpreter.
        decoder: of the child's messages.

    Attributes:
        lock: guards what ``send`` uses. The owner may guard its own state with it too, so that
            this state and what was sent change together.
    """

    def __init__(
        self,
        name: str,
        meanwhile: str,
        command: Sequence[str],
        decoder: msgspec.msgpack.Decoder[_Answer],
        owner: HelperOwner[_Answer],
    ) -> None:
        self.lock = threading.Condition()
        self._name = name
        self._meanwhile = meanwhile
        self._command = command
        self._decoder = decoder
        self._owner = owner
        self._limiter = RestartLimiter()
        self._packets: Packets | None = None  # None: there is no child that takes messages
        self._close_by_s: float | None = None  # set when closing: the child is killed after it
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Have a child from now on, whenever the owner needs one. To be called again when the owner
        needs one and did not before."""
        with self.lock:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self.lock.notify_all()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes of messages that the child was too busy to take."""
        with self.lock:
            return 0 if self._packets is None else self._packets.num_unsent_bytes

    def send(self, message: msgspec.Struct) -> bool:
        """Send a message now, or when the child has room for it. Returns at once: False where there
        is no child."""
        with self.lock:
            if self._packets is None:
                return False
            try:
                self._packets.send(_encoder.encode(message))
            except OSError:  # it has died, which the thread is about to notice
                return False
            return True

    def close(self, timeout_s: float = 0.0) -> None:
        """End the child, and wait until it is gone; idempotent.

        Args:
            timeout_s: how long it may take to end by itself; 0: it is killed.
        """
        with self.lock:
            if self._close_by_s is None:
                self._close_by_s = time.monotonic() + timeout_s
                if self._packets is not None:
                    self._packets.end_sending()
                    self._packets = None
            self.lock.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def _is_closing(self) -> bool:
        return self._close_by_s is not None

    # --- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        may_start = True
        while self._wait_until_needed():
            may_start = may_start or self._limiter.take_restart(time.monotonic()) is not None
            if may_start:
                reason = self._serve()
                if self._is_closing:
                    return
                may_start = self._allow_restart(reason)
            else:
                self._owner.on_restart_refused(self._limiter.describe())
                with self.lock:
                    self.lock.wait_for(lambda: self._is_closing, CHECK_S)

    def _wait_until_needed(self) -> bool:
        """False: the helper is closing."""
        with self.lock:
            self.lock.wait_for(lambda: self._is_closing or self._owner.is_helper_needed())
            return not self._is_closing

    def _allow_restart(self, reason: str) -> bool:
        """Whether a child that ended for this reason may be replaced at once; the log says so."""
        number = self._limiter.take_restart(time.monotonic())
        _log.warning(
            "%s %s; %s (%s)",
            self._name,
            reason,
            self._meanwhile,
            f"restart {number} of at most {self._limiter.describe()}"
            if number is not None
            else f"there were {self._limiter.describe()} already",
        )
        return number is not None

    def _serve(self) -> str:
        """Start a child and take its messages until it ends or must be ended; returns why."""
        engine_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        packets = Packets(engine_end)
        command = [python_executable(), *self._command]
        try:
            with child_end:
                child = subprocess.Popen(command, stdin=child_end.fileno(), env=child_environment())
        except OSError as error:
            packets.close()
            return f"cannot be started: {error}"
        reason: str | None = "is replaced"
        try:
            with self.lock:
                if not self._is_closing:
                    self._packets = packets
            self._owner.on_helper_started()
            reason = self._listen(packets)
        except Exception:
            _log.exception("what %s said is not understood", self._name)
        finally:
            with self.lock:
                self._packets = None
                packets.close()
            self._owner.on_helper_ended()
            code = _end(child, at_once=reason is not None)
        return reason or f"ended with exit code {code}"

    def _listen(self, packets: Packets) -> str | None:
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
                for data in messages:
                    self._owner.on_helper_message(self._decoder.decode(data))
                heard_s = time.monotonic()
            else:
                with self.lock:
                    reason = self._owner.reason_to_kill(heard_s)
                if reason is not None:
                    return reason
            if self._close_by_s is not None and time.monotonic() > self._close_by_s:
                return "has not ended in time"


def _end(child: subprocess.Popen[bytes], *, at_once: bool) -> int:
    """Returns the exit code. The child is killed, at once or when it does not end by itself."""
    if at_once:
        child.kill()
    try:
        return child.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def connect_to_engine() -> Packets:
    """Make this process a helper: it logs to standard error, and lives until the engine closes the
    connection, which is standard input."""
    log_to_stderr()
    # Ctrl-C, or a service manager's stop, reaches all processes; the engine ends its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return Packets(socket.socket(fileno=os.dup(sys.stdin.fileno())))
