"""Phase "swap": copies of KV blocks to the host and back, and how much they slow decoding."""

from __future__ import annotations

import queue
import random
import statistics
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult, Step
from fastserve_backend.worker.host_store import make_host_store
from fastserve_backend.worker.swap_engine import SwapEngine

from benchmarks.gpu.ceilings import link_rates
from benchmarks.gpu.decode_steps import (
    BLOCK_SIZE,
    LoadedModel,
    block_bytes,
    blocks_of,
    decode_step,
    load,
    steps_ahead,
)
from benchmarks.gpu.phase_context import CheckFailed, Context, Value
from benchmarks.gpu.random_models import largest_model

SWAPPED_BYTES = 10**9
BATCH, CONTEXT = 16, 512  # of the decode steps that run while blocks are copied
REPEATS = 5
DECODE_STEPS = 60
COPY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class _Copy:
    is_out: bool
    device_blocks: Sequence[int]
    host_blocks: Sequence[int]


class _Swaps:
    """The rank's own copy engine, in this process."""

    def __init__(self, context: Context, model: LoadedModel, num_host_blocks: int) -> None:
        block_bytes = model.config.host_kv_bytes_per_block(BLOCK_SIZE, "same")
        gib = (num_host_blocks + 0.5) * block_bytes / 2**30
        store = make_host_store(model.config, model.kv, gib, "same")
        self._results: queue.SimpleQueue[CopyResult] = queue.SimpleQueue()
        self._engine = SwapEngine(
            store,
            context.device.torch_device,
            send_out=self._results.put,
            send_in=self._results.put,
        )
        self._under_way: dict[int, _Copy] = {}
        self._num_begun = 0

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    def begin(self, copy: _Copy) -> None:
        self._num_begun += 1
        self._under_way[self._num_begun] = copy
        device_blocks, host_blocks = (
            array("i", blocks).tobytes() for blocks in (copy.device_blocks, copy.host_blocks)
        )
        self._engine.start_copy(
            CopyBlocks(self._num_begun, copy.is_out, device_blocks, host_blocks, BLOCK_SIZE)
        )

    def wait(self) -> _Copy:
        """Waits for the next copy to end.

        Raises:
            CheckFailed: it failed.
        """
        return self._end(self._results.get(timeout=COPY_TIMEOUT_S))

    def begin_ended_again(self) -> None:
        """Begins the copies anew that have ended so far."""
        while True:
            try:
                result = self._results.get_nowait()
            except queue.Empty:
                return
            self.begin(self._end(result))

    def _end(self, result: CopyResult) -> _Copy:
        if result.error is not None:
            raise CheckFailed(f"a copy of KV blocks failed: {result.error}")
        return self._under_way.pop(result.transfer_id)


def run(context: Context) -> None:
    batch, tokens = (2, 32) if context.tiny else (BATCH, CONTEXT)
    name = largest_model(context)
    in_use = batch * blocks_of(tokens)
    count = 4 if context.tiny else -(-SWAPPED_BYTES // block_bytes(name))
    model = load(context, name, in_use + 2 * count, batch)
    swaps = _Swaps(context, model, 2 * count)
    free = range(in_use, in_use + 2 * count)
    rates = link_rates(context.device)
    # Best case: the blocks are neighbours on both sides, so one copy moves all.
    layouts = {"neighbours": list(free), "scattered": random.Random(2).sample(free, len(free))}
    for layout, blocks in layouts.items():
        out = _Copy(True, blocks[:count], range(count))
        back = _Copy(False, blocks[count:], range(count, 2 * count))
        for direction, copies in {"out": [out], "in": [back], "both": [out, back]}.items():
            num_bytes = len(copies) * count * model.config.kv_bytes_per_block(BLOCK_SIZE)
            bytes_s = num_bytes / _seconds(swaps, copies)
            context.recorder.row(
                "swap",
                {"model": name, "blocks": f"{count} {layout}", "direction": direction},
                {"GB/s": bytes_s / 1e9, "share of pinned copy": bytes_s / rates[direction]},
            )
        step = decode_step(1, batch, tokens)
        copied = f"both directions, {layout}"
        where: dict[str, Value] = {"model": name, "batch": batch, "copies": copied}
        _slowdown(context, where, model, swaps, step, [out, back])


def _seconds(swaps: _Swaps, copies: Sequence[_Copy]) -> float:
    """Median seconds from the order of all copies to the end of the last."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for copy in copies:
            swaps.begin(copy)
        for _ in copies:
            swaps.wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _slowdown(
    context: Context,
    where: Mapping[str, Value],
    model: LoadedModel,
    swaps: _Swaps,
    step: Step,
    copies: Sequence[_Copy],
) -> None:
    """Times decode steps alone, and while other blocks are copied both ways without a pause."""
    with steps_ahead(model.runner, step) as run_one:
        alone = context.device.wall_time(run_one, DECODE_STEPS)
        # Two for each direction: the second begins when the first ends.
        for copy in [*copies, *copies]:
            swaps.begin(copy)

        def decode() -> None:
            swaps.begin_ended_again()
            run_one()

        beside = context.device.wall_time(decode, DECODE_STEPS)
    while not swaps.is_idle:
        swaps.wait()
    context.recorder.row(
        "decode while swapping",
        where,
        {
            "ms alone": alone.seconds * 1e3,
            "spread": alone.spread,
            "ms while swapping": beside.seconds * 1e3,
            "its spread": beside.spread,
            "slowdown": beside.seconds / alone.seconds - 1,
        },
    )
