"""Holds a process's main thread, while its other threads go on.

A stopped process (SIGSTOP) sends no heartbeats, so the engine replaces a rank after some seconds. A
rank whose main thread a tracer holds computes nothing either, but goes on to send them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from waiting import DEADLINE_S

# Requests of ptrace(2), and the flag of wait(2) for threads that are no children.
_DETACH, _SEIZE, _INTERRUPT = 17, 0x4206, 0x4207
_WALL = 0x40000000
# A tracer keeps the death of its thread from the real parent until it has looked.
_LOOK_S = 0.02


@contextmanager
def main_thread_held(pid: int) -> Iterator[None]:
    """Where tracing is forbidden, the whole process stands still."""
    tracer = _Tracer(pid)
    tracer.start()
    assert tracer.has_begun.wait(DEADLINE_S)
    if not tracer.holds:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if not tracer.holds:
            with suppress(ProcessLookupError):  # the block may end the process
                os.kill(pid, signal.SIGCONT)
        tracer.may_end.set()
        tracer.join()


class _Tracer(threading.Thread):
    """Only the thread that traces another one may let it go."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.holds = False

    def run(self) -> None:
        try:
            self.holds = _request(_SEIZE, self._pid) and _request(_INTERRUPT, self._pid)
            if self.holds:
                os.waitpid(self._pid, _WALL)  # returns once the thread stands still
        finally:
            self.has_begun.set()
        if not self.holds:
            return
        while not self.may_end.wait(_LOOK_S):
            with suppress(ChildProcessError):
                if os.waitpid(self._pid, _WALL | os.WNOHANG)[0]:
                    return  # it has died
        _request(_DETACH, self._pid)


def _request(request: int, pid: int) -> bool:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    ptrace.restype = ctypes.c_long
    return bool(ptrace(request, pid, None, None) == 0)
