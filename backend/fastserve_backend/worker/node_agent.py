"""``python -m fastserve_backend.worker.node_agent``: torchrun's agent of the first host.

The agents of the other hosts meet at its store and get the numbers of their ranks from it. This
agent starts no ranks, because the engine starts those of its host; it starts processes that only
wait. Unlike torchrun it listens on one address. It outlives the ranks, so that the other agents
find it again when they restart their ranks.
"""

from __future__ import annotations

import argparse

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.run import main as torchrun

from fastserve_backend.worker.engine_watch import end_with_stdin


def main() -> None:
    parser = argparse.ArgumentParser(description="The agent of the first of several hosts.")
    parser.add_argument("--listener", type=int, required=True, help="descriptor that listens")
    parser.add_argument("--nnodes", required=True)
    parser.add_argument("--nproc-per-node", required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", required=True)
    arguments = parser.parse_args()
    end_with_stdin()
    # torchrun would listen on every interface. It finds this server on its port and uses it.
    server = TCPStore(
        arguments.master_addr,
        int(arguments.master_port),
        is_master=True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=arguments.listener,
    )
    agent = ["--nnodes", arguments.nnodes, "--nproc-per-node", arguments.nproc_per_node]
    agent += ["--node-rank", "0"]
    agent += ["--master-addr", arguments.master_addr, "--master-port", arguments.master_port]
    torchrun([*agent, "--no-python", "cat"])
    del server  # torchrun needs it until here


if __name__ == "__main__":
    main()
