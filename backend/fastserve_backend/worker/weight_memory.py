"""Whether a host without GPUs has the memory for the weights of its ranks."""

from __future__ import annotations

import psutil
import torch
from fastserve_kernels import ops

from fastserve_backend.errors import ConfigError
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.models.model_config import DTYPE_BYTES, ModelConfig


def check_weights_fit(config: ModelConfig, num_ranks: int, num_local_ranks: int) -> None:
    """To be called before any rank of the host loads its part, which leaves less to see.

    The system promises memory that it does not have, and kills whoever then writes to it. Weights
    that are not packed are not counted: they may stay in the checkpoint's mapped files.

    Raises:
        ConfigError: the weights of the host's ranks exceed its free memory, swap included.
    """
    if ops.PackedLinear(torch.empty(1, 1, dtype=torch_dtype(config))).path == "torch":
        return
    # At least: a packed LM head is a second copy of the embedding that it is tied to.
    weights = config.num_parameters * DTYPE_BYTES[config.dtype] * num_local_ranks // num_ranks
    free = psutil.virtual_memory().available + psutil.swap_memory().free
    if weights > free:
        halved = ", model.dtype bfloat16" if config.dtype == "float32" else ""
        raise ConfigError(
            f"model.model: the weights are {weights / 2**30:.1f} GiB on this host in "
            f"{config.dtype}, which has {free / 2**30:.1f} GiB of free memory; take a smaller "
            f"model{halved} or more hosts"
        )
