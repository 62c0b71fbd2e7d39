"""Interrupts functions that signal handlers may call at any moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from waiting import DEADLINE_S


def interrupts_itself(function: Callable[[], object]) -> bool:
    """Whether ``function`` still returns if, before each of its lines, the same thread calls it
    again, as a signal handler would."""

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
