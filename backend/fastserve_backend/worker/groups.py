"""The process group that the ranks form, and where a rank runs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fastserve_backend.errors import ConfigError

# A peer that is stopped, not dead, is noticed only after this long (Gloo has no heartbeat).
COLLECTIVE_TIMEOUT = timedelta(seconds=10)


def choose_device(wanted: str) -> torch.device:
    """Raises ConfigError if ``cuda`` is asked for and there is none."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.device: got 'cuda'; no CUDA device is usable here, use cpu or auto"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def join_process_group(device: torch.device, rendezvous: Path) -> None:
    """Meet the other ranks over a file (a TCP store would listen on every interface)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous.as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=COLLECTIVE_TIMEOUT,
    )
