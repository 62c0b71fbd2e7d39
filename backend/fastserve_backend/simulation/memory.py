"""How much KV modelled ranks hold, and how fast their links to the host are."""

from __future__ import annotations

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import share_of_kv
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.engine.loop_setup import KVMemory
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.rank_protocol.link import Link


def memory_of_roofline(
    roofline: Roofline, model: ModelConfig, kv: KVCacheSection, step_tokens: int = 1
) -> KVMemory:
    """The memory of GPUs that are not here.

    Args:
        step_tokens: most tokens of a step. They count where layers have windows.

    Raises:
        ConfigError: the device cannot hold one job of the model's ``max_model_len``.
    """
    block_bytes = model.host_kv_bytes_per_block(kv.block_size, kv.host_dtype)
    block_s = roofline.swap_s(block_bytes)
    num_blocks = kv.device_blocks or roofline.num_device_blocks(
        kv.block_size, kv.device_memory_utilization, step_tokens
    )
    num_host_blocks = _host_blocks(kv, block_bytes * roofline.share_of_kv)
    kinds = model.layer_groups.kinds
    return KVMemory(num_blocks, num_host_blocks, block_bytes, Link(block_s, block_s), kinds)


def memory_of_profile(profile: LatencyProfile, model: ModelConfig, kv: KVCacheSection) -> KVMemory:
    """The memory of the machine that was measured. Its link's speed holds for the KV type that was
    measured."""
    block_bytes = model.host_kv_bytes_per_block(kv.block_size, kv.host_dtype)
    share = share_of_kv(
        model, profile.identity.tensor_parallel_size, profile.identity.pipeline_parallel_size
    )
    has_link = profile.link.block_out_s > 0
    return KVMemory(
        num_blocks=kv.device_blocks or profile.num_blocks,
        num_host_blocks=_host_blocks(kv, block_bytes * share) if has_link else 0,
        block_bytes=block_bytes,
        link=profile.link,
        kinds=model.layer_groups.kinds,
    )


def _host_blocks(kv: KVCacheSection, rank_block_bytes: float) -> int:
    return int(kv.swap_space_gib * 2**30 // rank_block_bytes)
