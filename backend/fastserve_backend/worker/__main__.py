"""``python -m fastserve_backend.worker``: started by the engine, with torchrun's environment."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from pathlib import Path

from fastserve_backend.worker.worker import run


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of a FastServe engine.")
    parser.add_argument("--engine", required=True, help="address of the engine's socket")
    parser.add_argument("--rendezvous", required=True, type=Path, help="file where ranks meet")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    # Ctrl-C reaches the whole process group; the engine decides when its ranks end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return run(arguments.engine, arguments.rendezvous)


if __name__ == "__main__":
    sys.exit(main())
