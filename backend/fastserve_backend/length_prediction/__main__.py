"""``python -m fastserve_backend.length_prediction``: the predictor's process.

The engine starts it; standard input is a socket to the engine.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from fastserve_backend.length_prediction.encoder import Encoder
from fastserve_backend.length_prediction.predictor import LengthPredictor
from fastserve_backend.length_prediction.process import PredictorLoop

# The ranks and the engine come first wherever cores are short.
NICENESS = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Predicts output lengths for a FastServe engine, which starts this itself."
    )
    parser.add_argument("--capacity", type=int, required=True, help="most entries of the index")
    parser.add_argument("--directory", type=Path, help="where they are kept; left out: nowhere")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Ctrl-C reaches the whole process group; the engine decides when its processes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    torch.set_num_threads(1)
    engine = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    predictor = LengthPredictor.open(arguments.directory, Encoder(), arguments.capacity)
    PredictorLoop(engine, predictor, arguments.directory).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
