"""How much memory the host, or its container, leaves to the ranks.

Each rank checks before any rank of the host takes memory: afterwards there is less to see.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from fastserve_kernels import ops

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.loader import torch_dtype

# Control groups of version 2, as a container sees its own. A host's root has no limits.
_CGROUP = Path("/sys/fs/cgroup")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostMemory:
    """In bytes. available: can be taken without swapping. free_swap: unused swap space."""

    total: int
    available: int
    free_swap: int


def host_memory(cgroup: Path = _CGROUP) -> HostMemory:
    """The host's memory, or less if the container's limits leave less. Beyond those limits the
    kernel kills the process that writes, however much memory the host has."""
    memory, free_swap = psutil.virtual_memory(), psutil.swap_memory().free
    total, available = memory.total, memory.available
    if (limit := _limit(cgroup / "memory.max")) is not None:
        total = min(total, limit)
        used = int(_read(cgroup / "memory.current")) - _file_cache(cgroup / "memory.stat")
        available = min(available, max(0, limit - used))
    if (limit := _limit(cgroup / "memory.swap.max")) is not None:
        left = limit - int(_read(cgroup / "memory.swap.current"))
        free_swap = min(free_swap, max(0, left))
    return HostMemory(total, available, free_swap)


def check_weights_fit(config: ModelConfig, num_ranks: int, num_local_ranks: int) -> None:
    """Check a host without GPUs. It promises memory that it does not have, and kills whoever then
    writes to it.

    Weights that are neither packed nor quantized do not count: they may stay in the checkpoint's
    mapped files.

    Raises:
        ConfigError: the weights of the host's ranks exceed the free memory, swap included.
    """
    linear = ops.PackedLinear(torch.empty(1, 1, dtype=torch_dtype(config)))
    if config.quantization is None and linear.path == "torch":
        return
    if config.quantization == "as_stored" and linear.path != "compiled":
        # They are dequantized.
        config = replace(config, quantization=None, stored_weight_bytes=None)
    weights = config.weight_bytes * num_local_ranks // num_ranks
    memory = host_memory()
    free = memory.available + memory.free_swap
    if weights > free:
        wide = ", model.dtype bfloat16" if config.dtype == "float32" else ""
        exact = ", model.quantization int8" if config.quantization is None else ""
        raise ConfigError(
            f"model.model: the weights are {weights / 2**30:.1f} GiB on this host in "
            f"{config.weight_format}, where {free / 2**30:.1f} GiB of memory are "
            f"free (within the container's limit); take a smaller model{wide}{exact} or more hosts"
        )


def check_swap_space(
    swap_space_gib: float, device: torch.device, num_local_ranks: int, host_share: float = 1.0
) -> None:
    """Check and log how much memory the host has for its ranks' KV blocks.

    Raises:
        ConfigError: the host has less than ``swap_space_gib`` GiB for each of its ranks.
    """
    memory = host_memory()
    # Pinned memory is taken at once, other memory as it is used.
    shared = memory.available if device.type == "cuda" else int(memory.total * host_share)
    limit, wanted = shared // num_local_ranks, swap_space_gib * 2**30
    state = (
        f"{memory.available / 2**30:.1f} of the {memory.total / 2**30:.1f} GiB of the host or its "
        "container are left"
    )
    if wanted > limit:
        raise ConfigError(
            f"kv_cache.swap_space_gib: got {swap_space_gib:g}; {state}, for KV blocks at most "
            f"{limit / 2**30:.1f} GiB{' a rank' if num_local_ranks > 1 else ''}, lower it"
        )
    _log.info("%s; KV blocks take %g GiB a rank", state, swap_space_gib)
    if wanted * num_local_ranks > memory.available:
        _log.warning(
            "kv_cache.swap_space_gib: got %g, which the host does not have while others use its "
            "memory; it may kill a rank that fills its blocks",
            swap_space_gib,
        )


def _limit(file: Path) -> int | None:
    try:
        text = _read(file)
    except OSError:
        return None
    return None if text == "max" else int(text)


def _file_cache(stat_file: Path) -> int:
    """Bytes of cached files. They count as used, but the kernel drops them when memory is short."""
    stat = dict(line.split() for line in _read(stat_file).splitlines())
    return int(stat["active_file"]) + int(stat["inactive_file"])


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii").strip()
