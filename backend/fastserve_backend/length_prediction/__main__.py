"""``python -m fastserve_backend.length_prediction``: the predictor's process, a helper of the
engine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from fastserve_backend.length_prediction.messages import ToPredictor, to_predictor_decoder
from fastserve_backend.system.helper_process import connect_to_engine
from fastserve_backend.system.lasting_imports import lasting_imports
from fastserve_backend.system.packets import Packets

# The ranks and the engine come first wherever cores are short.
NICENESS = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Predicts output lengths for a FastServe engine, which starts this itself."
    )
    parser.add_argument("--capacity", type=int, required=True, help="most entries of the index")
    parser.add_argument("--directory", type=Path, help="where they are kept; left out: nowhere")
    arguments = parser.parse_args()
    engine = connect_to_engine(to_predictor_decoder)
    os.nice(NICENESS)
    os.environ["OMP_NUM_THREADS"] = "1"
    _serve(engine, arguments.directory, arguments.capacity)
    return 0


def _serve(engine: Packets[ToPredictor], directory: Path | None, capacity: int) -> None:
    # Importing torch takes seconds: it starts only now that all other processes get a core first.
    with lasting_imports():
        import torch

        from fastserve_backend.length_prediction.encoder import Encoder
        from fastserve_backend.length_prediction.predictor import LengthPredictor
        from fastserve_backend.length_prediction.process import PredictorLoop

    torch.set_num_threads(1)
    predictor = LengthPredictor.open(directory, Encoder(), capacity)
    PredictorLoop(engine, predictor, directory).run()


if __name__ == "__main__":
    sys.exit(main())
