"""The engine's side of the grammars' process: started at the first use, fed, watched, started anew.

What the process holds of a job is only what the job's grammar and tokens say. So one that died or
hangs is replaced, and the jobs go on; those that it had to answer when it did so twice fail,
because one of them may be why.
"""

from __future__ import annotations

import logging
import select
import socket
import subprocess
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from fastserve_backend.grammars.messages import (
    Accept,
    Begin,
    End,
    Failed,
    FromGrammars,
    Masks,
    ToGrammars,
    Vocabulary,
    encoder,
    from_grammars_decoder,
)
from fastserve_backend.grammars.packets import Packets
from fastserve_backend.structured_output import StructuredOutput
from fastserve_backend.system.interpreter import child_environment, python_executable
from fastserve_backend.system.restart_limit import RestartLimiter

# Of grammars that are not compiled yet the process holds no more: they may be 64 KiB each.
_MAX_BEGINNING = 32
# A process that has to answer and is silent for so long has lost its way. Far above what compiling
# a few grammars takes beside ranks that use all cores.
ANSWER_TIMEOUT_S = 60.0
# How often that is looked at, and what the process did not take at once is sent.
_CHECK_S = 0.1
_MAX_DEATHS = 2
_log = logging.getLogger(__name__)

OnAnswer = Callable[[FromGrammars], None]


@dataclass(slots=True)
class _Job:
    wanted: StructuredOutput
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    asked_s: float | None = None
    """Since when it waits for an answer, to ``Begin`` or to its last token; None: it does not."""
    sent: bool = False
    """The process that there is knows of it."""
    is_beginning: bool = False
    """It has not answered ``Begin`` yet."""
    num_deaths: int = 0
    """How often a process died that it waited for."""


class GrammarClient:
    """Owns the process. All but ``close`` may be called from any thread, and return at once.

    Args:
        vocabulary: asked once, by the client's thread.
        on_answer: called by the client's thread for each ``begin`` and each accepted token of a job
            that has not ended, also twice; must return at once.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], on_answer: OnAnswer) -> None:
        self._vocabulary = vocabulary
        self._on_answer = on_answer
        self._limiter = RestartLimiter()
        self._changed = threading.Condition()  # guards all that follows
        self._jobs: dict[int, _Job] = {}
        self._unsent: deque[int] = deque()  # jobs that the process is to begin
        self._num_beginning = 0
        self._process: Packets | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def begin(self, number: int, wanted: StructuredOutput) -> None:
        """A new job, by its number: what may its first token be?"""
        with self._changed:
            self._jobs[number] = _Job(wanted, asked_s=time.monotonic())
            self._unsent.append(number)
            self._send_begins()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
                self._thread.start()
            self._changed.notify()

    def accept(self, tokens: Sequence[tuple[int, int]]) -> None:
        """These jobs have these tokens now, each by its number: what may the next be?"""
        with self._changed:
            known = []
            for number, token_id in tokens:
                job = self._jobs.get(number)
                if job is None:
                    continue  # it has failed, and the engine is about to hear of it
                job.output_ids.append(token_id)
                job.asked_s = time.monotonic()
                if job.sent:  # else its tokens go with ``Begin``
                    known.append((number, token_id))
            if known:
                self._send(Accept(known))

    def end(self, number: int) -> None:
        """The job is over; unknown numbers are ignored."""
        with self._changed:
            job = self._jobs.pop(number, None)
            if job is None:
                return
            if job.sent:
                self._send(End(number))
                self._begun(job)
            else:
                self._unsent.remove(number)

    def close(self) -> None:
        """Ends the process; idempotent."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    # --- With the lock held -------------------------------------------------------------------

    def _send(self, message: ToGrammars) -> None:
        if self._process is not None:
            with suppress(OSError):  # it died, which the thread notices
                self._process.send(encoder.encode(message))

    def _send_begins(self) -> None:
        while self._process and self._unsent and self._num_beginning < _MAX_BEGINNING:
            number = self._unsent.popleft()
            job = self._jobs[number]
            job.sent = job.is_beginning = True
            self._num_beginning += 1
            wanted = job.wanted
            self._send(Begin(number, wanted.kind, wanted.text, job.output_ids.tobytes()))

    def _begun(self, job: _Job) -> None:
        self._num_beginning -= job.is_beginning
        job.is_beginning = False
        self._send_begins()

    # --- The thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        vocabulary = encoder.encode(self._vocabulary())
        is_first = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._jobs)
                if self._is_closing:
                    return
            if not is_first and self._limiter.restart(time.monotonic()) is None:
                self._fail_all(
                    f"the process that checks outputs failed: {self._limiter.describe()}"
                )
                continue
            is_first = False
            reason = self._serve(vocabulary)
            if self._is_closing:
                return
            _log.warning("the process of the grammars %s; it is started anew", reason)
            self._bury()

    def _serve(self, vocabulary: bytes) -> str:
        """Start a process and take its answers until it ends, or is closed; says why."""
        engine_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        command = [python_executable(), "-m", "fastserve_backend.grammars"]
        packets = Packets(engine_end)
        try:
            with other_end:
                process = subprocess.Popen(
                    command, stdin=other_end.fileno(), env=child_environment()
                )
        except OSError as error:
            packets.close()
            return f"cannot be started: {error}"
        try:
            packets.send(vocabulary)
            with self._changed:
                self._process = packets
                self._send_begins()
            return self._listen(packets)
        except OSError:
            return "died"
        except Exception:
            _log.exception("what the process of the grammars said is not understood")
            return "is replaced"
        finally:
            with self._changed:
                self._process = None
                packets.close()
            process.kill()
            process.wait()

    def _listen(self, packets: Packets) -> str:
        """Raises OSError: it has closed its end."""
        heard_s = time.monotonic()
        while not self._is_closing:
            poller = select.poll()
            with self._changed:
                poller.register(packets, packets.events)
            if poller.poll(_CHECK_S * 1000):
                with self._changed:
                    packets.flush()
                for data in packets.receive():
                    self._take(from_grammars_decoder.decode(data))
                heard_s = time.monotonic()
            elif time.monotonic() - max(heard_s, self._oldest_question_s()) > ANSWER_TIMEOUT_S:
                return f"has not answered for {ANSWER_TIMEOUT_S:.0f} s"
        return "was closed"

    def _oldest_question_s(self) -> float:
        with self._changed:
            asked = (job.asked_s for job in self._jobs.values() if job.asked_s is not None)
            return min(asked, default=time.monotonic())

    def _take(self, message: FromGrammars) -> None:
        with self._changed:
            for number, num_tokens in _answered(message):
                job = self._jobs.get(number)
                if job is not None:
                    if num_tokens in (None, len(job.output_ids)):
                        job.asked_s = None
                    self._begun(job)
        self._on_answer(message)

    def _bury(self) -> None:
        """The process died: what it had to answer twice fails, the others are begun anew."""
        with self._changed:
            for job in self._jobs.values():
                job.num_deaths += job.sent and job.asked_s is not None
                job.sent = job.is_beginning = False
            failed = [n for n, job in self._jobs.items() if job.num_deaths == _MAX_DEATHS]
            self._forget(failed)
            self._num_beginning = 0
            self._unsent = deque(self._jobs)
        self._fail(failed, "the process that checks outputs died at it")

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            numbers = list(self._jobs)
            self._forget(numbers)
            self._unsent.clear()
        self._fail(numbers, reason)

    def _forget(self, numbers: Sequence[int]) -> None:
        """Of jobs that ``end`` does not find any more; the lock is held."""
        for number in numbers:
            del self._jobs[number]

    def _fail(self, numbers: Sequence[int], reason: str) -> None:
        for number in numbers:
            self._on_answer(Failed(number, reason))


def _answered(message: FromGrammars) -> list[tuple[int, int | None]]:
    """Numbers of jobs, and of the tokens up to which they have an answer; None: there is no
    other."""
    if isinstance(message, Masks):
        return [(mask.number, mask.num_tokens) for mask in message.masks]
    return [(message.number, None)]
