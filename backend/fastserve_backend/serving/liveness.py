"""The launcher's view of processes that have not ended, but do nothing any more."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from pathlib import Path

from fastserve_backend.serving.stall_detector import StallDetector

LOOK_INTERVAL_S = 0.5
"""The launcher looks so often for stubs that are new, report a broken engine, or hang. It notices
the death of a process at once."""
STOPPED_LOOKS = 6
"""A stopped process is left alone for 3 s: whoever stops it and its launcher may continue the
launcher first."""
SILENT_LOOKS = 30
"""For 15 s. A healthy process may be silent for some seconds. On two cores with twenty busy
processes, tritonserver took 2 s to answer beside eight prompts of 10 MB, and the model process was
silent for 1 s. With 32 such prompts tritonserver took 3.2 s on idle cores. A false alarm ends all
answers, so 5 s would be too near, although hung processes would be replaced sooner."""
_ASK_INTERVAL_S = 1.0
_STOPPED = "T"
"""The state of a process after SIGSTOP in ``/proc/PID/stat``; see proc(5)."""


class ProcessLife:
    """One process, which shows that it works by a sign that changes."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._stopped = StallDetector(STOPPED_LOOKS)
        self._silent = StallDetector(SILENT_LOOKS)

    def find_fault(self, sign: object) -> str | None:
        """What is wrong with the process; None: nothing, or not for long enough. To be asked every
        ``LOOK_INTERVAL_S``.

        Args:
            sign: changes while the process works; None: nothing is known yet.
        """
        if self._stopped.is_stalled(_is_stopped(self._pid) or None):
            return f"has been stopped for {STOPPED_LOOKS * LOOK_INTERVAL_S:.0f} s"
        if self._silent.is_stalled(sign):
            return f"has shown no sign of life for {SILENT_LOOKS * LOOK_INTERVAL_S:.0f} s"
        return None


class AnswerCount:
    """Asks a server every second whether it lives, on a thread of its own. ``close`` it.

    Args:
        ask: returns when the server has answered. Raises TimeoutError: it has not.
    """

    def __init__(self, ask: Callable[[], object]) -> None:
        self._ask = ask
        self.number = 0
        """How often the server has answered. It grows while the server works."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Returns when the last question has ended, as it does at once if the server is gone."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(_ASK_INTERVAL_S):
            try:
                self._ask()
            except TimeoutError:
                continue
            except (OSError, http.client.HTTPException):
                pass  # nobody listens: the server is about to end, and does not hang
            self.number += 1


def _is_stopped(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:  # it has ended
        return False
    return stat.rpartition(b")")[2].split()[0].decode() == _STOPPED
