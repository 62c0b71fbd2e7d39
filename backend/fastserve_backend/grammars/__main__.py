"""``python -m fastserve_backend.grammars``: the grammars' process.

The engine starts it; standard input is a socket to the engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from fastserve_backend.grammars.packets import Packets
from fastserve_backend.grammars.process import GrammarLoop
from fastserve_backend.system.logs import log_to_stderr


def main() -> int:
    log_to_stderr()
    # Ctrl-C, or a service manager's stop, reaches all processes; the engine ends its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Where memory runs out this goes first: it can be started anew, and no job is lost.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    engine = Packets(socket.socket(fileno=os.dup(sys.stdin.fileno())))
    with contextlib.suppress(OSError):  # the engine is gone
        GrammarLoop(engine).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
