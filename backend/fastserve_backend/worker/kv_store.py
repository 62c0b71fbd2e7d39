"""The rank's KV blocks on its device: how many fit, their memory, and copies among them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from fastserve_kernels.int8_cache import SCALE_BYTES
from torch import Tensor

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds
from fastserve_backend.worker.host_limits import host_memory

# On a CPU the cache shares memory with everything else on the machine. Without a number from the
# operator it takes a part of the free memory, but no more than a workload on a CPU can use.
CPU_SHARE_OF_FREE_MEMORY = 0.25
CPU_MAX_BYTES = 4 * 2**30
# What a process takes of a GPU without torch's knowledge: the context, kernels, NCCL's buffers.
_GPU_BYTES_BESIDE_TORCH = 2**30
_WAYS_TO_MORE = {
    "cuda": "raise kv_cache.device_memory_utilization",
    "cpu": "set kv_cache.device_blocks",
}


def allocate_kv(
    config: ModelConfig,
    device: torch.device,
    block_size: int,
    num_blocks: int | None,
    device_memory_utilization: float,
    num_local_ranks: int = 1,
    step_bytes: int = 0,
    step_tokens: int = 1,
    host_share: float = 1.0,
) -> Tensor:
    """The cache, ``[num_blocks, layers, 2, kv_heads, block_size, head_dim]``, uninitialised. An
    INT8 cache is as `fastserve_kernels.int8_cache` describes.

    A block has all layers of a group and is contiguous, so that one copy moves it. Call this after
    the weights are loaded: the automatic size is what they left. On a CPU the ranks of a host share
    its memory.

    Args:
        config: the rank's part of the model.
        num_blocks: None: as many as fit.
        step_bytes: what steps take on a GPU beside the cache (`step_memory.step_bytes`).
        step_tokens: most tokens of a step.
        host_share: below 1, other models have the rest of the host's free memory, and memory of the
            GPU that this process has not taken.

    Raises:
        ConfigError: the memory does not hold ``num_blocks``, or not one job of ``max_model_len``.
    """
    bytes_per_block = config.kv_bytes_per_block(block_size)
    memory = _available_bytes(device, device_memory_utilization, num_local_ranks, host_share)
    available = max(0, memory - step_bytes)
    if num_blocks is None:
        num_blocks = available // bytes_per_block
        needed = BlockNeeds(block_size, config.layer_groups.kinds, step_tokens).most(
            config.max_model_len
        )
        if num_blocks < needed:
            raise ConfigError(
                f"kv_cache: {available / 2**30:.2f} GiB are left for KV{_beside(step_bytes)}, but "
                f"one job of {config.max_model_len} tokens needs "
                f"{needed * bytes_per_block / 2**30:.2f} GiB; lower model.max_model_len or "
                f"{_WAYS_TO_MORE[device.type]}"
            )
    heads = num_blocks, config.kv_depth, 2, config.num_kv_heads
    if config.kv_dtype == "int8":
        shape, dtype = (*heads, block_size, config.head_dim + SCALE_BYTES), torch.int8
    else:
        shape, dtype = (*heads, block_size, config.head_dim), torch_dtype(config)
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError):
        raise ConfigError(
            f"kv_cache.device_blocks: got {num_blocks}, which is "
            f"{num_blocks * bytes_per_block / 2**30:.1f} GiB; about "
            f"{available // bytes_per_block} fit"
        ) from None


def _beside(step_bytes: int) -> str:
    return f" beside the {step_bytes / 2**30:.2f} GiB that a step takes" if step_bytes else ""


def _available_bytes(
    device: torch.device, utilization: float, num_local_ranks: int, host_share: float
) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        if host_share < 1.0:  # other models use this GPU, too
            used = min(used, torch.cuda.memory_reserved(device) + _GPU_BYTES_BESIDE_TORCH)
        return min(int(total * utilization) - used, free)
    share = int(host_memory().available * CPU_SHARE_OF_FREE_MEMORY)
    return int(min(CPU_MAX_BYTES, share) * host_share) // num_local_ranks


def neighbour_runs(
    blocks: Sequence[int], others: Sequence[int], others_per_piece: int | None = None
) -> Iterator[tuple[slice, slice]]:
    """Join pairs of blocks that are neighbours on both sides, so that one copy moves each run. The
    order of the runs is arbitrary.

    Args:
        others_per_piece: no run crosses a multiple of this number of ``others``; None: any may.
    """
    # A job's blocks descend where it was given blocks that were kept for another.
    pairs = sorted(zip(blocks, others, strict=True))
    begin = 0
    for end in range(1, len(pairs) + 1):
        block, other = pairs[end - 1]
        is_next = end < len(pairs) and pairs[end] == (block + 1, other + 1)
        if is_next and (others_per_piece is None or (other + 1) % others_per_piece):
            continue
        count = end - begin
        block, other = pairs[begin]
        yield slice(block, block + count), slice(other, other + count)
        begin = end
