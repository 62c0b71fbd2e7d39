"""Whether a host without GPUs has the memory for the weights of its ranks."""

from __future__ import annotations

import torch
from fastserve_kernels import ops

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.worker.host_memory import host_memory


def check_weights_fit(config: ModelConfig, num_ranks: int, num_local_ranks: int) -> None:
    """To be called before any rank of the host loads its part, which leaves less to see.

    The system promises memory that it does not have, and kills whoever then writes to it. Weights
    that are neither packed nor rounded are not counted: they may stay in the checkpoint's mapped
    files.

    Raises:
        ConfigError: the weights of the host's ranks exceed its free memory, or its container's,
            swap included.
    """
    linear = ops.PackedLinear(torch.empty(1, 1, dtype=torch_dtype(config)))
    if config.quantization is None and linear.path == "torch":
        return
    weights = config.weight_bytes * num_local_ranks // num_ranks
    memory = host_memory()
    free = memory.available + memory.free_swap
    if weights > free:
        wide = ", model.dtype bfloat16" if config.dtype == "float32" else ""
        exact = ", model.quantization int8" if config.quantization is None else ""
        raise ConfigError(
            f"model.model: the weights are {weights / 2**30:.1f} GiB on this host in "
            f"{config.quantization or config.dtype}, where {free / 2**30:.1f} GiB of memory are "
            f"free (within the container's limit); take a smaller model{wide}{exact} or more hosts"
        )
