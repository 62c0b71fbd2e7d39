"""``python -m fastserve_backend.worker``: a rank, in torchrun's environment.

The engine starts the ranks of its own host, torchrun those of the other hosts.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path

from fastserve_backend.errors import ConfigError
from fastserve_backend.system.lasting_imports import lasting_imports
from fastserve_backend.system.logs import log_to_stderr
from fastserve_backend.worker import cores  # noqa: F401  (it is to be imported before torch)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="One rank of a FastServe engine. On the first host the engine starts its ranks "
        "itself; on every other one torchrun does, and FASTSERVE_CLUSTER_SECRET is to be set."
    )
    parser.add_argument(
        "--engine",
        required=True,
        help="address of the engine's socket: tcp://HOST0:PORT, the port after --master-port",
    )
    parser.add_argument(
        "--rendezvous",
        type=Path,
        help="file where ranks of one host meet; left out: at torchrun's MASTER_ADDR:MASTER_PORT",
    )
    arguments = parser.parse_args()
    with lasting_imports():
        from fastserve_backend.worker.worker import run
    log_to_stderr()
    # Ctrl-C, or a service manager's stop, reaches all processes. The engine ends its ranks itself,
    # when all jobs have ended; torchrun's ranks end at once.
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if is_torchruns else signal.SIG_IGN)
    try:
        return run(arguments.engine, arguments.rendezvous)
    except ConfigError as error:
        logging.error("%s", error)
        return 2


if __name__ == "__main__":
    sys.exit(main())
