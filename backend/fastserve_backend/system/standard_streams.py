"""Standard streams that the shell has closed (``fastserve generate hi >&-``)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Replace closed streams: an empty stdin, a stdout and a stderr that discard what they get.

    Python sets closed streams to ``None``, which hardly any code expects. Also, the next file that
    is opened, such as a socket, would get the stream's number. Child processes inherit the new
    streams.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The new file gets the lowest free number, which is that of the first closed stream.
            stream = open(os.devnull, mode)  # noqa: SIM115 - for as long as the program runs
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
