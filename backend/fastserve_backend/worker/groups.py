"""The process group that the ranks form, and where a rank runs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fastserve_backend.errors import ConfigError
from fastserve_backend.models.partition import RankPlace
from fastserve_backend.models.tensor_group import ALONE, TensorGroup

# The engine watches every rank and ends all when one is dead or stopped. So a rank may wait for its
# peers as long as they live, and they may compute as long as they must; this only ends a wait that
# the engine has forgotten.
COLLECTIVE_TIMEOUT = timedelta(hours=1)


def choose_device(wanted: str) -> torch.device:
    """Raises ConfigError if ``cuda`` is asked for and there is none, or none for this rank."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.device: got 'cuda'; no CUDA device is usable here, use cpu or auto"
        )
    index, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"parallel: got {os.environ['LOCAL_WORLD_SIZE']} ranks, one CUDA device each; this "
            f"host has {count}, lower tensor_parallel_size or pipeline_parallel_size"
        )
    return torch.device("cuda", index)


def join_process_group(device: torch.device, rendezvous: Path) -> None:
    """Meet the other ranks over a file (a TCP store would listen on every interface)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous.as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=COLLECTIVE_TIMEOUT,
    )


def make_tensor_group(place: RankPlace) -> TensorGroup:
    """The ranks of this rank's stage. Every rank of all stages must call this."""
    size = place.tensor_size
    if size == 1:
        return ALONE
    groups = [
        dist.new_group(list(range(stage * size, (stage + 1) * size)), timeout=COLLECTIVE_TIMEOUT)
        for stage in range(place.num_stages)
    ]
    return TensorGroup(place.tensor_rank, size, groups[place.stage])
