"""Functions that signal handlers call, and that a signal may interrupt anywhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

DEADLINE_S = 10.0


def interrupts_itself(function: Callable[[], object]) -> bool:
    """Whether ``function`` returns when, before each line that runs in it, it is called once more
    by the same thread, as by a signal handler."""

    def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            function()
        return interrupt

    def run() -> None:
        sys.settrace(interrupt)
        function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    return not thread.is_alive()
