"""The process group of the ranks, and the device of a rank."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.utils.store import barrier

from fastserve_backend.checkpoints.partition import RankPlace
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.model_part import ALONE, TensorGroup
from fastserve_backend.worker.private_gloo import private_gloo

# The engine watches every rank and ends all when one is dead or stopped. So a rank may wait for its
# peers however long they compute. This timeout only ends a wait that the engine has forgotten.
COLLECTIVE_TIMEOUT = timedelta(hours=1)
LEAST_CAPABILITY = (8, 0)
"""Least compute capability of a GPU: the first with bfloat16 and asynchronous copies."""


def choose_device(wanted: str) -> torch.device:
    """
    Raises:
        ConfigError: ``cuda`` is wanted and there is no GPU, none for this rank, or an old one.
    """
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
    capability = torch.cuda.get_device_capability(index)
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"model.device: {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need {LEAST_CAPABILITY[0]}."
            f"{LEAST_CAPABILITY[1]} (A100, RTX 30 series) or newer, use cpu"
        )
    return torch.device("cuda", index)


def join_process_group(device: torch.device, rendezvous: Path | None, start_id: str) -> Store:
    """Meet the other ranks. Returns the store at which they meet.

    Args:
        rendezvous: a file if all ranks are on this host, where a TCP store would listen on every
            interface; None: the store of torchrun's first agent.
        start_id: names this start of the ranks. That agent's store keeps earlier starts too.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store: Store
    if rendezvous is not None:
        interface = "lo"
        # Not init_method: torch cannot read special characters in the path of its URL.
        store = FileStore(str(rendezvous), int(os.environ["WORLD_SIZE"]))
        store.set_timeout(COLLECTIVE_TIMEOUT)
    else:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        interface = _interface_to(host, port)
        agents = TCPStore(host, port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        store = PrefixStore(f"fastserve/{start_id}", agents)
    # By default both listen on an interface that others can reach, NCCL even on a single host.
    # There GPUs only find each other: data goes over NVLink, PCIe or shared memory.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    backend = "nccl"
    if device.type != "cuda":
        backend = "private_gloo"
        connect = private_gloo(is_one_host=rendezvous is not None)
        dist.Backend.register_backend(backend, connect, devices=["cpu"])
    dist.init_process_group(
        backend,
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=COLLECTIVE_TIMEOUT,
    )
    return store


def wait_for_all(store: Store, point: str) -> None:
    """Wait until every rank is at this point. Each point needs a name of its own.

    NCCL's barrier would do the same but take GPU memory.
    """
    barrier(store, dist.get_world_size(), point, COLLECTIVE_TIMEOUT.total_seconds())


def _interface_to(host: str, port: int) -> str:
    """The network interface of this machine that leads to ``host``. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        own_address = probe.getsockname()[0]
    return next(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(one.address == own_address for one in addresses)
    )


def make_tensor_group(place: RankPlace) -> TensorGroup:
    """The ranks of this rank's stage. Every rank of all stages must call this."""
    size = place.tensor_size
    if size == 1:
        return ALONE
    if place.num_stages == 1:
        return TensorGroup(place.tensor_rank, size)  # all ranks: they are connected already
    groups = [
        dist.new_group(list(range(stage * size, (stage + 1) * size)), timeout=COLLECTIVE_TIMEOUT)
        for stage in range(place.num_stages)
    ]
    return TensorGroup(place.tensor_rank, size, groups[place.stage])
