"""Build a rank from the engine's ``Setup``: its model, its KV blocks and its runner."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from fastserve_kernels import ops

from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import RankPlace, layers_of_stages
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.loader import load_model
from fastserve_backend.rank_protocol.messages import Ready, Setup
from fastserve_backend.worker.cores import num_threads
from fastserve_backend.worker.disk_store import DiskStore, open_disk
from fastserve_backend.worker.groups import (
    choose_device,
    join_process_group,
    make_tensor_group,
    wait_for_all,
)
from fastserve_backend.worker.host_limits import check_swap_space, check_weights_fit
from fastserve_backend.worker.host_store import HostStore, make_host_store
from fastserve_backend.worker.kv_store import allocate_kv
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.step_inputs import StepLimits
from fastserve_backend.worker.step_memory import step_bytes
from fastserve_backend.worker.swap_engine import measure_link


class BuiltRank(NamedTuple):
    """Everything that the rank needs to serve, and what it tells the engine about itself."""

    runner: ModelRunner
    store: HostStore
    disk: DiskStore | None
    ready: Ready


def build_rank(setup: Setup, rendezvous: Path | None) -> BuiltRank:
    """Load the model and allocate the rank's memory.

    Every rank must call this: they meet on the way.

    Args:
        rendezvous: file where the ranks meet; None: they meet at torchrun's address.

    Raises:
        ConfigError: this host cannot run the model as configured.
        ModelError: the model's files are missing, damaged or inconsistent.
    """
    _check_number_of_ranks(setup)
    device = choose_device(setup.device)
    num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cpu":
        torch.set_num_threads(num_threads(setup.host_share, num_local_ranks))
    meeting = join_process_group(device, rendezvous, setup.start_id)
    place = RankPlace.of(
        int(os.environ["RANK"]), setup.tensor_parallel_size, setup.pipeline_parallel_size
    )
    config = load_model_config(
        setup.model,
        load_format=setup.load_format,
        device=device.type,
        dtype=setup.dtype,
        quantization=setup.quantization,
        kv_dtype=setup.device_dtype,
        max_model_len=setup.max_model_len,
    )
    config = replace(config, eos_token_ids=setup.eos_token_ids)
    layers = layers_of_stages(config, place.num_stages)[place.stage]
    # The rank's cache is that of a model with only its layers and its heads.
    kv_config = replace(
        config,
        kv_layers=config.layer_groups.depth(layers),
        num_kv_heads=config.num_kv_heads // place.tensor_size,
    )
    limits = StepLimits(setup.max_num_seqs, setup.max_num_batched_tokens, config.max_model_len)
    if device.type == "cpu":
        check_weights_fit(config, place.tensor_size * place.num_stages, num_local_ranks)
        wait_for_all(meeting, "weights checked")
    try:
        tensor = make_tensor_group(place)
        model = load_model(config, device, layers=layers, tensor=tensor)
        bytes_of_steps = 0
        if device.type == "cuda":
            one_block = allocate_kv(kv_config, device, setup.block_size, 1, 1.0)
            bytes_of_steps = step_bytes(model, config, one_block, limits, place, tensor)
    except torch.OutOfMemoryError:
        raise _does_not_fit(setup, config, device) from None
    kv = allocate_kv(
        kv_config,
        device,
        setup.block_size,
        setup.device_blocks,
        setup.device_memory_utilization,
        num_local_ranks,
        bytes_of_steps,
        setup.max_num_batched_tokens,
        setup.host_share,
    )
    try:
        runner = ModelRunner(model, config, kv, device, limits, place, tensor)
        check_swap_space(setup.swap_space_gib, device, num_local_ranks, setup.host_share)
        wait_for_all(meeting, "swap space checked")
        store = make_host_store(kv_config, kv, setup.swap_space_gib, setup.host_dtype)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"kv_cache.device_memory_utilization: got {setup.device_memory_utilization:g}, which "
            "leaves too little beside weights, steps and KV; lower it"
        ) from None
    block_out_s, block_in_s = measure_link(store, len(kv), setup.block_size, device)
    disk = open_disk(setup.disk_swap_dir, setup.disk_swap_gib, store)
    ready = Ready(
        num_blocks=len(kv),
        num_host_blocks=len(store),
        block_bytes=store.block_bytes,
        block_out_s=block_out_s,
        block_in_s=block_in_s,
        hardware=_hardware(device),
        dtype=config.dtype,
        num_disk_blocks=0 if disk.store is None else len(disk.store),
        disk_write_s=disk.link.block_out_s,
        disk_read_s=disk.link.block_in_s,
        disk_error=disk.error,
    )
    return BuiltRank(runner, store, disk.store, ready)


def _check_number_of_ranks(setup: Setup) -> None:
    """Another host may have been told to start a wrong number of ranks."""
    wanted = setup.tensor_parallel_size * setup.pipeline_parallel_size
    if int(os.environ["WORLD_SIZE"]) != wanted:
        raise ConfigError(
            f"parallel: torchrun started rank {os.environ['RANK']} as one of "
            f"{os.environ['WORLD_SIZE']}, but the engine has {wanted}; give every torchrun the "
            "engine's --nnodes and an even share of the ranks as --nproc-per-node"
        )


def _does_not_fit(setup: Setup, config: ModelConfig, device: torch.device) -> ConfigError:
    total = torch.cuda.get_device_properties(device).total_memory
    ranks = setup.tensor_parallel_size * setup.pipeline_parallel_size
    weights = config.weight_bytes / ranks
    return ConfigError(
        f"model.model: the weights are {weights / 2**30:.1f} GiB a rank in "
        f"{config.weight_format}; with a "
        f"step of scheduler.max_num_batched_tokens {setup.max_num_batched_tokens} they do not fit "
        f"the {total / 2**30:.1f} GiB of {torch.cuda.get_device_name(device)}; raise "
        "tensor_parallel_size or pipeline_parallel_size, or lower max_num_batched_tokens"
        f"{', or set quantization int8' if config.quantization is None else ''}"
    )


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu {capability}, {torch.get_num_threads()} threads, {ops.cpu_backend()} kernels"
