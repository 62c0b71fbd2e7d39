"""Copies KV blocks between device and host while steps run: a thread for each direction."""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult
from fastserve_backend.worker.host_store import HostStore

# Blocks of the copy that tells how fast the link is, and how often it is made.
_TEST_BLOCKS = 32
_TEST_REPEATS = 3
_log = logging.getLogger(__name__)


class SwapEngine:
    """Copies in one direction are made in the order in which they came.

    A copy waits for nothing: the engine orders one only when the steps that wrote its blocks have
    ended, and reads its blocks only when it has the copy's result.

    Args:
        connect: makes a function that sends results; called once by each thread.
    """

    def __init__(
        self,
        store: HostStore,
        device: torch.device,
        connect: Callable[[str], Callable[[CopyResult], None]],
    ) -> None:
        self._store = store
        self._device = device
        self._connect = connect
        # A thread that sets its number of threads sets the default of those that never used torch
        # before; this one has now.
        torch.get_num_threads()
        self._queues: dict[bool, queue.SimpleQueue[CopyBlocks]] = {}
        for is_out in (True, False):
            self._queues[is_out] = queue.SimpleQueue()
            name = "swap-out" if is_out else "swap-in"
            threading.Thread(target=self._run, args=(is_out, name), name=name, daemon=True).start()

    def begin(self, copy: CopyBlocks) -> None:
        """Returns at once; the result is sent when the copy has ended."""
        self._queues[copy.is_out].put(copy)

    def _run(self, is_out: bool, name: str) -> None:
        send = self._connect(name)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)  # of this thread alone: the model has the cores
        with _stream(self._device), torch.inference_mode():
            while True:
                copy = self._queues[is_out].get()
                send(self._copy(copy))

    def _copy(self, copy: CopyBlocks) -> CopyResult:
        started = time.perf_counter()
        error = None
        try:
            try:
                copy_blocks(self._store, copy)
            finally:
                _wait(self._device)  # also for what began before an error: others get its blocks
        except Exception as reason:
            _log.exception("copying KV blocks failed")
            error = f"{type(reason).__name__}: {reason}"
        return CopyResult(copy.transfer_id, time.perf_counter() - started, error)


def copy_blocks(store: HostStore, copy: CopyBlocks) -> None:
    """Begins the copy on the current stream.

    Raises:
        IndexError: a block that does not exist.
    """
    device_blocks = array("i", copy.device_blocks)
    host_blocks = array("i", copy.host_blocks)
    # Slices past the end would copy nothing without a word.
    _check_exist("device", device_blocks, store.num_device_blocks)
    _check_exist("host", host_blocks, len(store))
    if copy.is_out:
        store.copy_out(device_blocks, host_blocks, copy.num_last_tokens)
    else:
        store.copy_in(device_blocks, host_blocks)


def _check_exist(side: str, blocks: array[int], num_blocks: int) -> None:
    for block in (min(blocks), max(blocks)):
        if not 0 <= block < num_blocks:
            raise IndexError(f"{side} block {block} of {num_blocks}")


@torch.inference_mode()
def measure_link(
    store: HostStore, num_device_blocks: int, block_size: int, device: torch.device
) -> tuple[float, float]:
    """Seconds to copy one block to the host and back; zeros without host blocks.

    Overwrites blocks: call before there are jobs.
    """
    count = min(_TEST_BLOCKS, num_device_blocks, len(store))
    if count == 0:
        return 0.0, 0.0
    blocks = array("i", range(count)).tobytes()
    times = []
    for is_out in (True, False):
        copy = CopyBlocks(0, is_out, blocks, blocks, block_size)
        fastest = float("inf")
        for _ in range(_TEST_REPEATS):
            started = time.perf_counter()
            copy_blocks(store, copy)
            _wait(device)
            fastest = min(fastest, time.perf_counter() - started)
        times.append(fastest / count)
    return times[0], times[1]


def _stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream of its own for what this thread begins."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def _wait(device: torch.device) -> None:
    """Until what the current stream has begun has ended."""
    if device.type == "cuda":
        ended = torch.cuda.Event(blocking=True)  # for which this thread sleeps, not spins
        ended.record(torch.cuda.current_stream(device))
        ended.synchronize()
