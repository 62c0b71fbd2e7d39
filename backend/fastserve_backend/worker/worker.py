"""The main loop of a rank: take a message, run it, answer."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import zmq
from fastserve_kernels import ops

from fastserve_backend.errors import FastServeError
from fastserve_backend.models.config import load_model_config
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.partition import RankPlace, layers_of_stages
from fastserve_backend.worker.groups import choose_device, join_process_group, make_tensor_group
from fastserve_backend.worker.host_store import make_host_store
from fastserve_backend.worker.kv_store import allocate_kv
from fastserve_backend.worker.messages import (
    CopyBlocks,
    CopyResult,
    Failed,
    FromRank,
    Heartbeat,
    Hello,
    Ready,
    Setup,
    Step,
    Stop,
    encoder,
    to_rank_decoder,
)
from fastserve_backend.worker.model_runner import ModelRunner
from fastserve_backend.worker.swap_engine import SwapEngine, measure_link

HEARTBEAT_S = 1.0
_log = logging.getLogger(__name__)


def run(engine_address: str, rendezvous: Path) -> int:
    """Serve the engine until it says stop or goes away; returns the process's exit code."""
    rank = int(os.environ["RANK"])
    _end_with_engine()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"rank-{rank}".encode())
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(engine_address)

    def send(message: FromRank) -> None:
        socket.send(encoder.encode(message))

    send(Hello(rank=rank, pid=os.getpid()))
    _send_heartbeats(context, engine_address, rank)
    try:
        setup = to_rank_decoder.decode(socket.recv())
        assert isinstance(setup, Setup)
        runner, swaps, ready = _set_up(
            setup, rendezvous, lambda name: _copy_sender(context, engine_address, rank, name)
        )
        send(ready)
        while not isinstance(message := to_rank_decoder.decode(socket.recv()), Stop):
            if isinstance(message, CopyBlocks):
                swaps.begin(message)
            else:
                assert isinstance(message, Step)
                answer = runner.run(message)
                if answer is not None:
                    send(answer)
        return 0
    except FastServeError as error:
        send(Failed(reason=str(error), user_error=True))
        return 2
    except Exception as error:
        _log.exception("rank %d failed", rank)
        send(Failed(reason=f"rank {rank}: {type(error).__name__}: {error}", user_error=False))
        return 1
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        socket.close()


def _set_up(
    setup: Setup, rendezvous: Path, connect: Callable[[str], Callable[[CopyResult], None]]
) -> tuple[ModelRunner, SwapEngine, Ready]:
    device = choose_device(setup.device)
    num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_local_ranks))
    join_process_group(device, rendezvous)
    place = RankPlace.of(
        int(os.environ["RANK"]), setup.tensor_parallel_size, setup.pipeline_parallel_size
    )
    config = load_model_config(
        setup.model,
        load_format=setup.load_format,
        device=device.type,
        dtype=setup.dtype,
        max_model_len=setup.max_model_len,
    )
    layers = layers_of_stages(config, place.num_stages)[place.stage]
    model = load_model(config, device, layers=layers, tensor=make_tensor_group(place))
    # The rank's KV is that of a model that has no more than its layers and its heads.
    kv_config = replace(
        config, num_layers=len(layers), num_kv_heads=config.num_kv_heads // place.tensor_size
    )
    kv = allocate_kv(
        kv_config,
        device,
        setup.block_size,
        setup.device_blocks,
        setup.device_memory_utilization,
        num_local_ranks,
    )
    store = make_host_store(kv_config, kv, setup.swap_space_gib, setup.host_dtype, num_local_ranks)
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
    runner = ModelRunner(model, config, kv, device, place)
    return runner, SwapEngine(store, device, connect), ready


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu {capability}, {torch.get_num_threads()} threads, {ops.cpu_backend()} kernels"


def _end_with_engine() -> None:
    """End this process when the engine's end of standard input closes: it died or let go of us."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="engine-watch", daemon=True).start()


def _copy_sender(
    context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int, name: str
) -> Callable[[CopyResult], None]:
    """Sends from the thread that calls this; a socket belongs to one thread."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"{name}-{rank}".encode())
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return lambda result: socket.send(encoder.encode(result))


def _send_heartbeats(context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int) -> None:
    def beat() -> None:
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.IDENTITY, f"heartbeat-{rank}".encode())
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            message = encoder.encode(Heartbeat())
            while not stopped.wait(HEARTBEAT_S):
                socket.send(message)

    stopped = threading.Event()
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
