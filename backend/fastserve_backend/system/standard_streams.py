"""The streams that a program finds open, or does not (``fastserve generate hi >&-``)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """An empty stdin, a stdout and a stderr that take everything, in place of closed ones.

    Python has ``None`` for those, which next to nothing expects; and a closed one's number would go
    to the next file that is opened, a socket say. Processes that are started get them too.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Its number is the lowest that is free: of those that are closed, the first.
            stream = open(os.devnull, mode)  # noqa: SIM115 - for as long as the program runs
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
