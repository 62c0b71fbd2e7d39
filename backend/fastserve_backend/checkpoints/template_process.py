"""The processes that render chat templates, and the side of the process that asks them.

A template is a program that comes with a checkpoint. It may loop for ever, or build texts of any
size. So it runs in a process of its own with limits (`template_renderer`). A template that exceeds
them ends with that process, and the next request gets another one.
"""

from __future__ import annotations

import select
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from functools import cache

import msgspec

from fastserve_backend.errors import FastServeError
from fastserve_backend.system.helper_process import start_helper
from fastserve_backend.system.packets import Packets

CPU_SECONDS = 2.0
"""Processor time for one prompt. Templates take some microseconds for each message; quadratic ones
take a tenth of a second for a thousand messages."""
MEMORY_BYTES = 512 << 20
"""Memory beside that of the interpreter. A prompt is in it several times."""
MAX_CHARS = 16 << 20
"""Characters of a prompt: those of millions of tokens."""
MAX_PROCESSES = 3
"""Templates that are rendered at a time: as many as requests are prepared at a time
(`serving/preparation.py`)."""
# Far above the processor time: other processes may use all cores, and the process may have to
# start. A template that waits for something would reach it.
_DEADLINE_S = 60.0
# A process that has closed its end is about to exit.
_EXIT_TIMEOUT_S = 1.0
_PROGRAM = "fastserve_backend.checkpoints.template_renderer"


class Render(msgspec.Struct, tag="render", array_like=True):
    """Asks for a prompt."""

    source: str
    """The template. The process keeps those that it has compiled."""
    variables: str | None
    """The template's variables as a JSON object; None: only compile it."""


class Rendered(msgspec.Struct, tag="rendered", array_like=True):
    """The answer if the template has ended by itself."""

    text: bytes
    """UTF-8, in which lone surrogates may occur: tools and other variables may have them."""


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The answer if the template is not valid, or has raised an error."""

    reason: str


class TooMuch(msgspec.Struct, tag="too_much", array_like=True):
    """The answer if the template exceeded a limit which its process survived."""

    limit: str
    """Such as "512 MiB of memory"."""


Answer = Rendered | Refused | TooMuch

render_decoder = msgspec.msgpack.Decoder(Render)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


class RefusedByTemplate(FastServeError):
    """The template is not valid Jinja, or it raised an error."""


class TemplateLimitError(FastServeError):
    """The template exceeded a limit. The message names it, and the remedy."""


class TemplateProcesses:
    """Owns the processes, which end with this object: one, which starts at once, and more while
    threads render at the same time. A thread waits if ``MAX_PROCESSES`` are busy."""

    def __init__(self) -> None:
        self._free = threading.Semaphore(MAX_PROCESSES)
        self._idle: deque[_Renderer] = deque()
        with suppress(OSError):  # `render` tries again, and says why
            self._idle.append(_Renderer())

    def render(self, name: str, source: str, variables: str | None) -> str:
        """A template's text; nothing if there are no variables: see ``Render``.

        It waits until the template ends or exceeds a limit, up to 60 s.

        Args:
            name: the template's, for messages.

        Raises:
            RefusedByTemplate, TemplateLimitError.
        """
        with self._free:
            answer = self._ask(Render(source, variables))
        if isinstance(answer, Refused):
            raise RefusedByTemplate(answer.reason)
        if isinstance(answer, TooMuch):
            raise TemplateLimitError(
                f"the chat template {name} exceeds {answer.limit}; shorten the conversation, or "
                "correct the template"
            )
        return answer.text.decode("utf-8", "surrogatepass")

    def pids(self) -> list[int]:
        """Of the processes that are idle now."""
        return [renderer.pid for renderer in tuple(self._idle)]

    def _ask(self, message: Render) -> Answer:
        try:
            renderer = self._take_idle() or _Renderer()
        except OSError as error:
            return TooMuch(f"what the machine has for its process ({error})")
        try:
            answer = renderer.ask(message)
        except OSError:
            answer = TooMuch(renderer.end())
            with suppress(OSError):  # as in the constructor
                self._idle.append(_Renderer())
        else:
            self._idle.append(renderer)
        return answer

    def _take_idle(self) -> _Renderer | None:
        with suppress(IndexError):
            return self._idle.pop()  # used last, so it has the template
        return None


@cache
def template_processes() -> TemplateProcesses:
    """Those that all templates of this process share."""
    return TemplateProcesses()


class _Renderer:
    """One process, from its start to its end. Raises OSError if it cannot be started."""

    def __init__(self) -> None:
        self._packets: Packets[Answer]
        self._child, self._packets = start_helper(["-m", _PROGRAM], _answer_decoder)
        # No process survives its owner.
        self._kill = weakref.finalize(self, _kill, self._child, self._packets)

    @property
    def pid(self) -> int:
        return self._child.pid

    def ask(self, message: Render) -> Answer:
        """Raises OSError: the process has ended, or it must be ended because it does not answer."""
        deadline_s = time.monotonic() + _DEADLINE_S
        self._packets.send(message)
        while (left_s := deadline_s - time.monotonic()) > 0:
            poller = select.poll()
            poller.register(self._packets, self._packets.events)
            if poller.poll(left_s * 1000):
                self._packets.flush()
                for answer in self._packets.receive():
                    return answer
        raise TimeoutError

    def end(self) -> str:
        """End the process, and return the limit that it must have exceeded."""
        with suppress(subprocess.TimeoutExpired):  # killing it sooner would hide its exit code
            self._child.wait(_EXIT_TIMEOUT_S)
        self._kill()
        code = self._child.returncode
        if code == -signal.SIGPROF:
            return f"{CPU_SECONDS:g} s of processor time"
        if code == -signal.SIGKILL:  # by the kernel, or here
            return f"the machine's memory, or {_DEADLINE_S:g} s"
        return f"what its process survives (exit code {code})"


def _kill(child: subprocess.Popen[bytes], packets: Packets[Answer]) -> None:
    packets.close()
    child.kill()
    child.wait()
