"""``python -m fastserve_backend.length_prediction``: the predictor's process.

The engine starts it; standard input is a socket to the engine.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

from fastserve_backend.system.lasting_imports import lasting_imports
from fastserve_backend.system.logs import log_to_stderr

# The ranks and the engine come first wherever cores are short.
NICENESS = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Predicts output lengths for a FastServe engine, which starts this itself."
    )
    parser.add_argument("--capacity", type=int, required=True, help="most entries of the index")
    parser.add_argument("--directory", type=Path, help="where they are kept; left out: nowhere")
    arguments = parser.parse_args()
    log_to_stderr()
    # Ctrl-C, or a service manager's stop, reaches all processes; the engine ends its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    _serve(arguments.directory, arguments.capacity)
    return 0


def _serve(directory: Path | None, capacity: int) -> None:
    # Not before this process is the last that gets a core: importing torch takes seconds.
    with lasting_imports():
        import torch

        from fastserve_backend.length_prediction.encoder import Encoder
        from fastserve_backend.length_prediction.predictor import LengthPredictor
        from fastserve_backend.length_prediction.process import PredictorLoop

    torch.set_num_threads(1)
    engine = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    predictor = LengthPredictor.open(directory, Encoder(), capacity)
    PredictorLoop(engine, predictor, directory).run()


if __name__ == "__main__":
    sys.exit(main())
