"""The main loop of a rank: take a message, run it, answer."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
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
# A socket that is closed still delivers its last message, for so long.
LINGER_MS = 1000
Send = Callable[[FromRank], None]
_log = logging.getLogger(__name__)


def run(engine_address: str, rendezvous: Path) -> int:
    """Serve the engine until it says stop or goes away; returns the process's exit code."""
    rank = int(os.environ["RANK"])
    _end_with_engine()
    connect = partial(_connect, zmq.Context(), engine_address, rank)
    socket = connect("rank")
    send: Send = _sender(socket)
    send(Hello(rank=rank, pid=os.getpid()))
    _send_heartbeats(connect)
    try:
        setup = to_rank_decoder.decode(socket.recv())
        assert isinstance(setup, Setup)
        runner, swaps, ready = _set_up(setup, rendezvous, lambda name: _sender(connect(name)))
        send(ready)
        steps = _steps(socket, swaps)
        if runner.waits_for_others:
            # Copies begin while this rank waits for activations. The socket goes to a thread.
            send, steps = _sender(connect("answer")), _ahead(steps)
        for step in steps:
            answer = runner.run(step)
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


def _set_up(
    setup: Setup, rendezvous: Path, connect: Callable[[str], Send]
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


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], address: str, rank: int, name: str
) -> zmq.Socket[bytes]:
    """A socket to the engine, for the thread that calls this."""
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, f"{name}-{rank}".encode())
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(address)
    return socket


def _sender(socket: zmq.Socket[bytes]) -> Send:
    return lambda message: socket.send(encoder.encode(message))


def _steps(socket: zmq.Socket[bytes], swaps: SwapEngine) -> Iterator[Step]:
    """The engine's steps until it says stop; copies are begun as they come."""
    while not isinstance(message := to_rank_decoder.decode(socket.recv()), Stop):
        if isinstance(message, CopyBlocks):
            swaps.begin(message)
        else:
            assert isinstance(message, Step)
            yield message


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


def _send_heartbeats(connect: Callable[[str], zmq.Socket[bytes]]) -> None:
    def beat() -> None:
        send = _sender(connect("heartbeat"))
        while not stopped.wait(HEARTBEAT_S):
            send(Heartbeat())

    stopped = threading.Event()
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
