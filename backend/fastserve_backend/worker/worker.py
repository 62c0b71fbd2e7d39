"""The main loop of a rank: take a message, launch its step, answer."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from fastserve_kernels import ops

from fastserve_backend.errors import FastServeError
from fastserve_backend.rank_protocol.messages import (
    CopyBlocks,
    DiskCopy,
    Failed,
    Heartbeat,
    Hello,
    Setup,
    Step,
    Stop,
)
from fastserve_backend.worker.build_rank import build_rank
from fastserve_backend.worker.cores import keep_cores
from fastserve_backend.worker.disk_engine import DiskEngine
from fastserve_backend.worker.engine_link import EngineLink, Send, send_function
from fastserve_backend.worker.model_runner import LaunchedStep
from fastserve_backend.worker.swap_engine import SwapEngine

HEARTBEAT_S = 1.0
# How long the last steps may take after the engine's stop. The engine kills a rank after 5 s.
DRAIN_TIMEOUT_S = 4.0
_log = logging.getLogger(__name__)


def run(engine_address: str, rendezvous: Path | None) -> int:
    """Serve the engine until it says stop or goes away. Returns the process's exit code.

    Args:
        rendezvous: file where the ranks meet; None: they meet at torchrun's address.

    Raises:
        ConfigError: the engine is on another host and this host has no usable secret.
    """
    rank = int(os.environ["RANK"])
    link = EngineLink(engine_address, rank)
    send = send_function(link.main)
    send(Hello(pid=os.getpid(), host=socket.gethostname()))
    _start_heartbeats(link.open_sender("heartbeat"))
    try:
        setup = link.receive()
        assert isinstance(setup, Setup)
        runner, store, disk, ready = build_rank(setup, rendezvous)
        swaps = SwapEngine(
            store,
            runner.device,
            send_out=link.open_sender("swap-out"),
            send_in=link.open_sender("swap-in"),
        )
        disk_copies = None
        if disk is not None:
            disk_copies = DiskEngine(
                disk,
                send_written=link.open_sender("disk-write"),
                send_read=link.open_sender("disk-read"),
            )
        if runner.device.type == "cpu":
            # Now that most threads are there: a thread inherits the core of the one that starts it.
            keep_cores(ops.thread_ids())
        send(ready)
        steps = _steps(link, swaps, disk_copies)
        if runner.has_earlier_stage:
            # Copies must start while this thread waits for activations. So another thread reads
            # the main socket, and this one sends through a socket of its own.
            send, steps = link.open_sender("runner"), _read_ahead(steps)
        answers = None
        if runner.is_asynchronous:
            answers = AnsweringThread(link.open_sender("answer"), runner.device, on_error=link.fail)
        for step in steps:
            launched = runner.launch(step)
            if launched is None:
                continue
            if answers is None:
                send(launched.answer())
            else:
                answers.put(launched)
        if answers is not None:
            answers.close()
        swaps.close()
        store.close()
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


def _steps(link: EngineLink, swaps: SwapEngine, disk: DiskEngine | None) -> Iterator[Step]:
    """The engine's steps until it says stop. Copies of blocks start as their messages arrive."""
    while not isinstance(message := link.receive(), Stop):
        if isinstance(message, CopyBlocks):
            swaps.start_copy(message)
        elif isinstance(message, DiskCopy):
            assert disk is not None
            disk.start_copy(message)
        else:
            assert isinstance(message, Step)
            yield message
    link.stopped.set()


def _read_ahead(steps: Iterator[Step]) -> Iterator[Step]:
    """The same steps; a thread of its own takes each as soon as it arrives."""
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


class AnsweringThread:
    """Waits for each launched step and sends its answer, in order, while later steps are launched.

    Args:
        send: sends an answer; only this thread calls it.
        on_error: called by the thread with the error that ended it, so that an owner who waits for
            something else learns of it.
    """

    def __init__(
        self, send: Send, device: torch.device, *, on_error: Callable[[Exception], None]
    ) -> None:
        self._send = send
        self._device = device
        self._on_error = on_error
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="answers", daemon=True)
        self._thread.start()

    def put(self, launched: LaunchedStep) -> None:
        """Queue a step for its answer. Returns at once."""
        self._launched.put(launched)

    def close(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Return when all answers have been sent.

        Raises:
            TimeoutError: some are still not sent after ``timeout_s``.
            Exception: the error that ended the thread.
        """
        self._launched.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the device has not ended its last steps after {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread starts with GPU 0
            while (launched := self._launched.get()) is not None:
                self._send(launched.answer())
        except Exception as error:
            self._error = error
            self._on_error(error)


def _start_heartbeats(send: Send) -> None:
    def beat() -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            send(Heartbeat())

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
