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

# `measure_link` copies so many blocks, so many times.
_TEST_BLOCKS = 32
_TEST_REPEATS = 3
SendResult = Callable[[CopyResult], None]
_log = logging.getLogger(__name__)


class SwapEngine:
    """Two threads that copy blocks, each in the order of its messages.

    A copy waits for no step. The engine requests it only when the steps that wrote its blocks have
    ended, and uses its blocks only when it has the copy's result.

    Args:
        send_out, send_in: send the results of copies out and in, each from its own thread.
    """

    def __init__(
        self, store: HostStore, device: torch.device, *, send_out: SendResult, send_in: SendResult
    ) -> None:
        self._store = store
        self._device = device
        # A new thread that limits torch's threads also sets the default of threads that have not
        # used torch yet. This call makes the calling thread one that has.
        torch.get_num_threads()
        self._out: queue.SimpleQueue[CopyBlocks | None] = queue.SimpleQueue()
        self._in: queue.SimpleQueue[CopyBlocks | None] = queue.SimpleQueue()
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        for name, copies, send in (
            ("swap-out", self._out, send_out),
            ("swap-in", self._in, send_in),
        ):
            thread = threading.Thread(target=self._run, args=(copies, send), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def start_copy(self, copy: CopyBlocks) -> None:
        """Returns at once. The result is sent when the copy has ended."""
        (self._out if copy.is_out else self._in).put(copy)

    def close(self) -> None:
        """Return when no copy is under way. Copies that have not started are never made."""
        self._is_closed = True
        for copies in (self._out, self._in):
            copies.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, copies: queue.SimpleQueue[CopyBlocks | None], send: SendResult) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(1)  # for this thread alone: the model needs the cores
        with _stream(self._device), torch.inference_mode():
            while (copy := copies.get()) is not None and not self._is_closed:
                send(self._copy(copy))

    def _copy(self, copy: CopyBlocks) -> CopyResult:
        started = time.perf_counter()
        error = None
        try:
            try:
                copy_blocks(self._store, copy)
            finally:
                _wait(self._device)  # after an error too: the engine reuses the blocks
        except Exception as reason:
            _log.exception("copying KV blocks failed")
            error = f"{type(reason).__name__}: {reason}"
        return CopyResult(copy.transfer_id, time.perf_counter() - started, error)


def copy_blocks(store: HostStore, copy: CopyBlocks) -> None:
    """Start the copy on the current stream.

    Raises:
        IndexError: a block does not exist.
    """
    device_blocks = array("i", copy.device_blocks)
    host_blocks = array("i", copy.host_blocks)
    # A slice past the end would copy nothing and report no error.
    _check_exist("device", device_blocks, store.num_device_blocks)
    _check_exist("host", host_blocks, len(store))
    if copy.is_out:
        store.copy_out(device_blocks, host_blocks, copy.num_last_tokens, copy.num_last)
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
    """Seconds to copy one block to the host, and back from it; zeros without host blocks.

    It overwrites blocks, so call it before there are jobs.
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
    """On a GPU, a stream of this thread's own."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))


def _wait(device: torch.device) -> None:
    """Wait until the current stream has done all its work."""
    if device.type == "cuda":
        ended = torch.cuda.Event(blocking=True)  # a blocking event sleeps instead of spinning
        ended.record(torch.cuda.current_stream(device))
        ended.synchronize()
