"""Tries out, where it can do no harm, whether a grammar can be compiled.

With some grammars of a few bytes the compiler runs out of stack or memory, or never ends. So a fork
of the process, with tight limits, compiles each grammar first.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from typing import NamedTuple

from fastserve_backend.grammars.compiler import Compiler, GrammarError

# Most grammars take a millisecond, the largest practical ones a tenth of a second.
CPU_SECONDS = 1
_MEMORY_BYTES = 256 << 20
# A quarter of a usual thread's stack: a grammar that passes here does not overflow it later.
_STACK_BYTES = 2 << 20
_TOO_MUCH = (
    f"is too complex: compiling it took more than {CPU_SECONDS} s, {_MEMORY_BYTES >> 20} MiB of "
    "memory or too deep a recursion; simplify it"
)


# A fork that computes gets its second in this time, also beside many other processes.
DEADLINE_S = 30.0


class Verdict(NamedTuple):
    """What a check has found."""

    reason: str | None
    """Why the grammar cannot be compiled; None: it can."""
    used_s: float
    """Processor time of the fork."""


class Check:
    """A fork that compiles one grammar.

    Only a process with a single thread may use it.
    """

    def __init__(self, compiler: Compiler, kind: str, text: str) -> None:
        self.due_s = time.monotonic() + DEADLINE_S
        """When to give up, as ``time.monotonic`` counts."""
        self._result, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run(compiler, kind, text, write_end)
        os.close(write_end)

    def fileno(self) -> int:
        """A pipe that the fork closes when it ends. It may be readable earlier."""
        return self._result

    def kill(self) -> None:
        """End the fork, which then has compiled nothing."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> Verdict:
        """Wait for the fork, once."""
        with open(self._result, "rb") as file:
            said = file.read().decode()
        _, _, usage = os.wait4(self._pid, 0)
        reason = _TOO_MUCH if not said else said.removeprefix(_VERDICT) or None
        return Verdict(reason, usage.ru_utime + usage.ru_stime)


def _data_bytes() -> int:
    """The memory of this process that ``RLIMIT_DATA`` counts."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


# Marks a verdict, which may be empty, from a fork that died and said nothing.
_VERDICT = ":"


def _run(compiler: Compiler, kind: str, text: str, write_end: int) -> None:
    try:
        # The fork may die by a signal; no core file is needed then.
        for limit, value in (
            (resource.RLIMIT_CPU, CPU_SECONDS),
            (resource.RLIMIT_DATA, _data_bytes() + _MEMORY_BYTES),
            (resource.RLIMIT_STACK, _STACK_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(limit)
            with contextlib.suppress(ValueError):  # the hard limit is lower
                resource.setrlimit(limit, (value, hard))
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        said = _VERDICT
        try:
            compiler.compile(kind, text)
        except GrammarError as error:
            said += str(error)
        os.write(write_end, said.encode("utf-8", "replace"))
    finally:
        os._exit(0)
