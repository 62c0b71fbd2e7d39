"""Compiles a grammar beside the process's other work.

A fork cannot hand over what it has compiled. So a grammar that takes long to compile, and has
passed its ``Check``, is compiled again by a thread. llguidance releases the interpreter's lock
meanwhile, so the masks of other jobs are not late.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

from llguidance import LLMatcher

from fastserve_backend.grammars.compiler import Compiler, GrammarError

# Four times what the check allows: a grammar that has passed does not overflow it.
_STACK_BYTES = 8 << 20


class Compiled(NamedTuple):
    """What compiling a grammar has led to."""

    known: LLMatcher | str
    """The matcher to copy, or the reason why there is none."""
    used_s: float
    """Processor time of the calling thread."""


def compile_now(compiler: Compiler, kind: str, text: str) -> Compiled:
    """Compile a grammar whose check has passed, in this thread."""
    started_s = time.thread_time()
    known: LLMatcher | str
    try:
        known = compiler.compile(kind, text)
    except GrammarError as error:
        known = str(error)
    return Compiled(known, time.thread_time() - started_s)


class Compilation:
    """A thread that compiles one grammar. Until ``wait``, the process must not fork: a fork would
    have locks that the thread holds, and nobody to release them."""

    def __init__(self, compiler: Compiler, kind: str, text: str) -> None:
        self._result: Compiled
        self._read_end, write_end = os.pipe()
        threading.stack_size(_STACK_BYTES)
        arguments = (compiler, kind, text, write_end)
        # Whoever ends the process does not wait for it.
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def _run(self, compiler: Compiler, kind: str, text: str, write_end: int) -> None:
        try:
            self._result = compile_now(compiler, kind, text)
        finally:
            os.close(write_end)

    def fileno(self) -> int:
        """A pipe that the thread closes when the grammar is compiled."""
        return self._read_end

    def wait(self) -> Compiled:
        """Wait for the thread, once."""
        self._thread.join()
        os.close(self._read_end)
        return self._result
