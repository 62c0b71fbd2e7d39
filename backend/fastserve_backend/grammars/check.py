"""Whether a grammar can be compiled, found out where it can do no harm.

There are grammars of a few bytes over which the compiler runs out of stack, out of memory, or never
ends. So each is first compiled by a fork of the process, which may not take much of anything.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal

from fastserve_backend.grammars.compiler import Compiler, GrammarError

# Most take a millisecond, the largest of practical use a tenth of a second.
CPU_SECONDS = 1
_MEMORY_BYTES = 256 << 20
# A quarter of what threads mostly have, so that what passes here does not run out of it later.
_STACK_BYTES = 2 << 20
_TOO_MUCH = (
    f"is too complex: compiling it took more than {CPU_SECONDS} s, {_MEMORY_BYTES >> 20} MiB of "
    "memory or too deep a recursion; simplify it"
)


class Check:
    """One grammar that is being compiled by a fork.

    Call this only in a process with a single thread.
    """

    def __init__(self, compiler: Compiler, kind: str, text: str) -> None:
        self._result, write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run(compiler, kind, text, write_end)
        os.close(write_end)

    def fileno(self) -> int:
        """Readable when ``reason`` does not wait."""
        return self._result

    def reason(self) -> str | None:
        """Why there is no such grammar; None: there is. To be called once."""
        with open(self._result, "rb") as file:
            said = file.read().decode()
        os.waitpid(self._pid, 0)
        return _TOO_MUCH if not said else said.removeprefix(_VERDICT) or None


def _data_bytes() -> int:
    """That the process has already, of what ``RLIMIT_DATA`` counts."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[5]) * resource.getpagesize()


# So that it is told apart from saying nothing.
_VERDICT = ":"


def _run(compiler: Compiler, kind: str, text: str, write_end: int) -> None:
    try:
        # A death by a signal is no news, and its core file nobody's.
        for limit, value in (
            (resource.RLIMIT_CPU, CPU_SECONDS),
            (resource.RLIMIT_DATA, _data_bytes() + _MEMORY_BYTES),
            (resource.RLIMIT_STACK, _STACK_BYTES),
            (resource.RLIMIT_CORE, 0),
        ):
            _, hard = resource.getrlimit(limit)
            with contextlib.suppress(ValueError):  # lower than that already
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
