"""The main loop of a rank: take a message, launch it, answer."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from fastserve_kernels import ops

from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import RankPlace, layers_of_stages
from fastserve_backend.errors import ConfigError, FastServeError
from fastserve_backend.models.loader import load_model
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    Failed,
    Heartbeat,
    Hello,
    Ready,
    Setup,
    Step,
    Stop,
)
from fastserve_backend.worker.answering import AnsweringThread
from fastserve_backend.worker.cores import num_cores
from fastserve_backend.worker.engine_link import EngineLink, Send, sender
from fastserve_backend.worker.groups import (
    choose_device,
    join_process_group,
    make_tensor_group,
    wait_for_all,
)
from fastserve_backend.worker.host_store import check_swap_space, make_host_store
from fastserve_backend.worker.kv_store import allocate_kv
from fastserve_backend.worker.model_runner import Answer, ModelRunner
from fastserve_backend.worker.step_inputs import StepLimits
from fastserve_backend.worker.step_memory import step_bytes
from fastserve_backend.worker.swap_engine import SwapEngine, measure_link
from fastserve_backend.worker.weight_memory import check_weights_fit

HEARTBEAT_S = 1.0
_log = logging.getLogger(__name__)


def run(engine_address: str, rendezvous: Path | None) -> int:
    """Serve the engine until it says stop or goes away; returns the process's exit code.

    Args:
        rendezvous: file where the ranks meet; None: they meet at torchrun's address.

    Raises:
        ConfigError: the engine is on another host, and there is no secret to show to it.
    """
    rank = int(os.environ["RANK"])
    link = EngineLink(engine_address, rank)
    send = sender(link.main)
    send(Hello(pid=os.getpid(), host=socket.gethostname()))
    _send_heartbeats(link)
    try:
        setup = link.receive()
        assert isinstance(setup, Setup)
        runner, swaps, ready = _set_up(setup, rendezvous, link.sender)
        send(ready)
        steps = _steps(link, swaps)
        if runner.waits_for_others:
            # Copies begin while this rank waits for activations. The socket goes to a thread.
            send, steps = link.sender("runner"), _ahead(steps)
        if runner.runs_behind:
            answers = AnsweringThread(partial(_answer_sender, link, runner.device), link.fail)
            _launch(runner, steps, answers.put)
            answers.close()
        else:
            _launch(runner, steps, lambda answer: send(answer()))
        runner.close()
        torch.distributed.destroy_process_group()
        return 0
    except FastServeError as error:
        send(Failed(reason=str(error), user_error=True))
        return 2
    except Exception as error:
        _log.exception("rank %d failed", rank)
        send(Failed(reason=f"rank {rank}: {type(error).__name__}: {error}", user_error=False))
        return 1


def _launch(runner: ModelRunner, steps: Iterator[Step], give: Callable[[Answer], None]) -> None:
    for step in steps:
        answer = runner.launch(step)
        if answer is not None:
            give(answer)


def _answer_sender(link: EngineLink, device: torch.device) -> Send:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own, at first GPU 0
    return link.sender("answer")


def _set_up(
    setup: Setup, rendezvous: Path | None, connect: Callable[[str], Send]
) -> tuple[ModelRunner, SwapEngine, Ready]:
    _check_number_of_ranks(setup)
    device = choose_device(setup.device)
    num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_cores() // num_local_ranks))
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
    # The rank's KV is that of a model that has no more than its layers and its heads.
    kv_config = replace(
        config, num_layers=len(layers), num_kv_heads=config.num_kv_heads // place.tensor_size
    )
    limits = StepLimits(setup.max_num_seqs, setup.max_num_batched_tokens, config.max_model_len)
    if device.type == "cpu":
        check_weights_fit(config, place.tensor_size * place.num_stages, num_local_ranks)
        wait_for_all(meeting, "weights checked")
    try:
        tensor = make_tensor_group(place)
        model = load_model(config, device, layers=layers, tensor=tensor)
        taken = 0
        if device.type == "cuda":
            one_block = allocate_kv(kv_config, device, setup.block_size, 1, 1.0)
            taken = step_bytes(model, config, one_block, limits, place, tensor)
    except torch.OutOfMemoryError:
        raise _does_not_fit(setup, config, device) from None
    kv = allocate_kv(
        kv_config,
        device,
        setup.block_size,
        setup.device_blocks,
        setup.device_memory_utilization,
        num_local_ranks,
        taken,
    )
    try:
        runner = ModelRunner(model, config, kv, device, limits, place, tensor)
        check_swap_space(setup.swap_space_gib, device, num_local_ranks)
        wait_for_all(meeting, "swap space checked")
        store = make_host_store(kv_config, kv, setup.swap_space_gib, setup.host_dtype)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"kv_cache.device_memory_utilization: got {setup.device_memory_utilization:g}, which "
            "leaves too little beside weights, steps and KV; lower it"
        ) from None
    block_out_s, block_in_s = measure_link(store, len(kv), setup.block_size, device)
    ready = Ready(
        num_blocks=len(kv),
        num_host_blocks=len(store),
        block_bytes=store.block_bytes,
        block_out_s=block_out_s,
        block_in_s=block_in_s,
        hardware=_hardware(device),
        dtype=config.dtype,
    )
    return runner, SwapEngine(store, device, connect), ready


def _does_not_fit(setup: Setup, config: ModelConfig, device: torch.device) -> ConfigError:
    total = torch.cuda.get_device_properties(device).total_memory
    ranks = setup.tensor_parallel_size * setup.pipeline_parallel_size
    weights = config.weight_bytes / ranks
    return ConfigError(
        f"model.model: the weights are {weights / 2**30:.1f} GiB a rank in "
        f"{config.quantization or config.dtype}; with a "
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


def _check_number_of_ranks(setup: Setup) -> None:
    """Another host may have been told to start more or fewer ranks than are its share."""
    wanted = setup.tensor_parallel_size * setup.pipeline_parallel_size
    if int(os.environ["WORLD_SIZE"]) != wanted:
        raise ConfigError(
            f"parallel: torchrun started rank {os.environ['RANK']} as one of "
            f"{os.environ['WORLD_SIZE']}, but the engine has {wanted}; give every torchrun the "
            "engine's --nnodes and an even share of the ranks as --nproc-per-node"
        )


def _steps(link: EngineLink, swaps: SwapEngine) -> Iterator[Step]:
    """The engine's steps until it says stop; copies are begun as they come."""
    while not isinstance(message := link.receive(), Stop):
        if isinstance(message, CopyBlocks):
            swaps.begin(message)
        else:
            assert isinstance(message, Step)
            yield message
    link.stopped.set()


def _ahead(steps: Iterator[Step]) -> Iterator[Step]:
    """The same steps, taken by a thread of their own as soon as they come."""
    taken: queue.SimpleQueue[Step | Exception | None] = queue.SimpleQueue()

    def take() -> None:
        try:
            for step in steps:
                taken.put(step)
            taken.put(None)
        except Exception as error:
            taken.put(error)

    threading.Thread(target=take, name="steps", daemon=True).start()
    while (item := taken.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _send_heartbeats(link: EngineLink) -> None:
    def beat() -> None:
        send = link.sender("heartbeat")
        while True:
            time.sleep(HEARTBEAT_S)
            send(Heartbeat())

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
