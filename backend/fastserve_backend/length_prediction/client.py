"""The engine's side of the predictor's process: started, asked, watched, started anew.

Nothing here waits for the process but a thread of its own. A question that the process cannot take
at once is answered with "slow", and with "down" where there is none or it still loads.
"""

from __future__ import annotations

import logging
import select
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from fastserve_backend.length_prediction.messages import (
    MAX_MESSAGE_BYTES,
    Ended,
    FromPredictor,
    Loaded,
    Predict,
    Predicted,
    ToPredictor,
    encoder,
    from_predictor_decoder,
)
from fastserve_backend.system.interpreter import child_environment, python_executable
from fastserve_backend.system.restart_limit import RestartLimiter

# More unanswered questions would be answered too late to be of use: a prediction takes a few
# milliseconds of a core that others use too.
MAX_UNANSWERED = 256
# Ends of jobs that the process was too busy to take; the oldest go first.
MAX_UNSENT = 4096
# Importing torch and reading the encoder takes seconds, on a cold disk a minute.
LOAD_TIMEOUT_S = 120.0
# A process that does not answer for so long is stopped or has lost its way. Far above what a
# prediction takes at low priority beside ranks that use all cores.
ANSWER_TIMEOUT_S = 30.0
# How long saving what was learned may take at the end.
STOP_TIMEOUT_S = 5.0
# How often the age of the oldest question is looked at, and whether a restart is allowed again.
CHECK_S = 0.5
# And no signal where the other end is closed: in an embedded interpreter that might be deadly.
_NO_WAIT = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_log = logging.getLogger(__name__)

OnAnswer = Callable[[Predicted], None]


class PredictorClient:
    """Owns the process. ``ask``, ``ended`` and ``close`` may be called from any thread.

    A process that died or hangs is replaced, as often as ``RestartLimiter`` allows; what it had
    learned since it last saved is lost.

    Args:
        arguments: those of ``python -m fastserve_backend.length_prediction``.
        on_answer: called once for each question, by the thread that asked or by the client's own;
            must return at once.
    """

    def __init__(self, arguments: Sequence[str], on_answer: OnAnswer) -> None:
        self._command = [
            python_executable(),
            "-m",
            "fastserve_backend.length_prediction",
            *arguments,
        ]
        self._on_answer = on_answer
        self._limiter = RestartLimiter()
        self._lock = threading.Lock()  # guards the next three
        self._engine_end: socket.socket | None = None  # None: there is no process
        self._unanswered: dict[int, float] = {}  # job → when it was asked for, oldest first
        self._unsent: deque[Ended] = deque(maxlen=MAX_UNSENT)
        self.is_loaded = False
        """Whether there is a process that answers."""
        self.num_entries = 0
        """In the predictor's index, when it last said."""
        self._closing = threading.Event()
        self._close_by_s: float | None = None  # set when closing: the process is killed after it
        self._thread = threading.Thread(target=self._run, name="length-predictor", daemon=True)
        self._thread.start()

    def ask(self, number: int, text: str) -> None:
        """How many output tokens will this job have? Returns at once; the answer comes later."""
        with self._lock:
            sent = len(self._unanswered) < MAX_UNANSWERED and self._send(Predict(number, text))
            if sent:
                self._unanswered[number] = time.monotonic()
        if not sent:
            self._on_answer(Predicted(number, None, "slow" if self.is_loaded else "down"))

    def ended(self, number: int, num_tokens: int | None) -> None:
        """The job is over; ``num_tokens`` are to be learned, if given. Returns at once."""
        with self._lock:
            if self._engine_end is not None:
                self._unsent.append(Ended(number, num_tokens))
                self._send_ended()

    def close(self) -> None:
        """Lets the process save and end; idempotent."""
        with self._lock:
            self._closing.set()
            if self._close_by_s is None:
                self._close_by_s = time.monotonic() + STOP_TIMEOUT_S
                if self._engine_end is not None:
                    self._engine_end.shutdown(socket.SHUT_WR)
        self._thread.join()

    def _send_ended(self) -> None:
        """What the process takes now; the lock is held."""
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()

    def _send(self, message: ToPredictor) -> bool:
        """Whether it was sent; the lock is held."""
        if self._engine_end is None:
            return False
        try:
            self._engine_end.send(encoder.encode(message), _NO_WAIT)
        except OSError:  # it is full because the process lags, or closed because it ended
            return False
        return True

    # --- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            reason = self._serve()
            if self._closing.is_set():
                return
            number = self._limiter.restart(time.monotonic())
            _log.warning(
                "the length predictor %s; jobs run without predictions until it is back (%s)",
                reason,
                f"restart {number} of at most {self._limiter.describe()}"
                if number is not None
                else f"there were {self._limiter.describe()} already",
            )
            while number is None:
                if self._closing.wait(CHECK_S):
                    return
                number = self._limiter.restart(time.monotonic())

    def _serve(self) -> str:
        """Start a process and take its answers until it ends or has to be ended; says why."""
        engine_end, predictor_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = child_environment() | {"OMP_NUM_THREADS": "1"}
        try:
            with predictor_end:
                process = subprocess.Popen(
                    self._command, stdin=predictor_end.fileno(), env=environment
                )
        except OSError as error:
            engine_end.close()
            return f"cannot be started: {error}"
        with self._lock:
            self._engine_end = engine_end
        hangs = True
        try:
            reason = self._listen(engine_end)
            hangs = reason is not None
        except Exception:
            _log.exception("what the length predictor said is not understood")
            reason = "is replaced"
        finally:
            self._disconnect(engine_end)
            code = self._end(process, at_once=hangs)
        return reason or f"ended with exit code {code}"

    def _listen(self, engine_end: socket.socket) -> str | None:
        """Take messages until the process has closed its end; or why it is to be killed."""
        poller = select.poll()
        poller.register(engine_end, select.POLLIN)
        heard_s = time.monotonic()
        while True:
            if poller.poll(CHECK_S * 1000):
                try:
                    data = engine_end.recv(MAX_MESSAGE_BYTES)
                except ConnectionResetError:  # it ended with questions unread
                    data = b""
                if not data:
                    return None
                self._take(from_predictor_decoder.decode(data))
                heard_s = time.monotonic()
            with self._lock:
                self._send_ended()
            reason = self._reason_to_kill(heard_s)
            if reason is not None:
                return reason

    def _take(self, message: FromPredictor) -> None:
        if isinstance(message, Predicted):
            with self._lock:
                del self._unanswered[message.number]
            self._on_answer(message)
            return
        self.num_entries = message.num_entries
        if isinstance(message, Loaded):
            self.is_loaded = True
            _log.info("the length predictor is ready, with %d entries", message.num_entries)

    def _reason_to_kill(self, heard_s: float) -> str | None:
        """Of a process that was last heard, or started, at ``heard_s``; None: it may go on."""
        now = time.monotonic()
        if self._close_by_s is not None and (not self.is_loaded or now > self._close_by_s):
            return "has not ended in time"
        if not self.is_loaded:
            late = now - heard_s > LOAD_TIMEOUT_S
            return f"was not ready after {LOAD_TIMEOUT_S:.0f} s" if late else None
        with self._lock:
            asked_s = next(iter(self._unanswered.values()), now)
        late = now - max(asked_s, heard_s) > ANSWER_TIMEOUT_S
        return f"has not answered for {ANSWER_TIMEOUT_S:.0f} s" if late else None

    def _disconnect(self, engine_end: socket.socket) -> None:
        with self._lock:
            self._engine_end = None
            self.is_loaded = False
            unanswered, self._unanswered = self._unanswered, {}
            self._unsent.clear()
            engine_end.close()
        for number in unanswered:
            self._on_answer(Predicted(number, None, "down"))

    def _end(self, process: subprocess.Popen[bytes], *, at_once: bool) -> int:
        """Its exit code; it ends by itself, or is killed when that takes too long."""
        if at_once:
            process.kill()
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
