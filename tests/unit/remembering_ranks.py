"""Ranks without a model, whose tokens depend on the same state as a model's."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.rank_protocol.messages import CopyBlocks, DiskCopy, Sampling, Step

# The tokens of a to t in a byte-level tokenizer.
FIRST_TOKEN = 4 + ord("a")
NUM_TOKENS = 20


Blocks = dict[tuple[int, int], int]
"""A job's blocks, by group of layers and position in the group's table."""


def blocks_of_jobs(step: Step, kinds: Sequence[LayerKind], block_size: int) -> Iterator[Blocks]:
    """The blocks of each job of the step that its tokens see."""
    starts, counts = array("i", step.starts), array("i", step.block_counts)
    firsts = array("i", step.first_blocks) or array("i", len(counts) * [0])
    ids, num_jobs = iter(array("i", step.block_ids)), len(starts)
    of_jobs: list[Blocks] = [{} for _ in starts]
    num_groups = 0
    for index, kind in enumerate(kinds):
        for job, blocks in enumerate(of_jobs):
            entry = index * num_jobs + job
            seen = kind.first_seen(starts[job], block_size)
            assert firsts[entry] <= seen
            for number in range(counts[entry]):
                block, group = divmod(number, kind.num_groups)
                place = num_groups + group, firsts[entry] + block
                block_id = next(ids)
                if place[1] >= seen:
                    blocks[place] = block_id
        num_groups += kind.num_groups
    assert next(ids, None) is None
    return iter(of_jobs)


class RememberedKV:
    """A rank's KV blocks. In each group of layers a token leaves a hash of itself and of what the
    tokens before it left, as far as the group's window goes.

    A job's next token is a hash of what its last token left, of its sampling and of its mask of 4
    bytes, and none that has a bias. So missing, stale or foreign KV changes tokens. Bit 32 of
    what a token leaves is its job's ``Step.are_long``, which must be that of the tokens before it.
    """

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        kinds: Sequence[LayerKind] = ONE_GROUP,
        num_slots: int = 0,
    ) -> None:
        self._disk = np.full((num_slots, block_size), 7, np.uint64)
        self._device = np.full((num_blocks, block_size), 7, np.uint64)
        self._host = np.full((num_host_blocks, block_size), 7, np.uint64)
        self._block_size = block_size
        self._kinds = kinds
        self._windows = [kind.window for kind in kinds for _ in range(kind.num_groups)]
        self._last_tokens = np.zeros(0, np.int32)

    def run(self, step: Step) -> bytes:
        """Runs a step; returns the new token of each sampling job, int32."""
        ids = np.array(np.frombuffer(step.token_ids, np.int32))
        rows = np.frombuffer(step.previous_rows, np.int32)
        assert len(rows) in (0, step.num_decodes)
        taken = np.flatnonzero(rows >= 0)
        ids[taken] = self._last_tokens[rows[taken]]
        counts, starts = array("i", step.query_lens), array("i", step.starts)
        are_long = step.are_long or bytes(len(counts))
        jobs = blocks_of_jobs(step, self._kinds, self._block_size)
        tokens = array("i")
        num_sampling = len(counts) - step.num_partial
        end = 0
        for row, (count, start, blocks) in enumerate(zip(counts, starts, jobs, strict=True)):
            begin, end = end, end + count
            left = [
                self._write(blocks, group, start, ids[begin:end], are_long[row])
                for group in range(len(self._windows))
            ]
            if row < num_sampling:
                tokens.append(_token(np.array(left), ids[end - 1], step.sampling, row))
        self._last_tokens = np.array(tokens, np.int32)
        return tokens.tobytes()

    def _write(self, blocks: Blocks, group: int, start: int, ids: np.ndarray, is_long: int) -> int:
        """Writes what these tokens leave in a group; returns what the last one leaves."""
        window, left = self._windows[group], 0
        for position, token in enumerate(ids, start):
            first = 0 if window is None else max(0, position + 1 - window)
            slots = [
                (blocks[group, seen // self._block_size], seen % self._block_size)
                for seen in range(first, position + 1)
            ]
            before = [int(self._device[slot]) for slot in slots[:-1]]
            assert all(value >> 32 == is_long for value in before), "keys of another rotation"
            left = zlib.crc32(np.array([*before, token], np.int64).tobytes()) | is_long << 32
            self._device[slots[-1]] = left
        return left

    def read(self, step: Step) -> np.ndarray:
        """The contents of the blocks that the step reads and does not write."""
        jobs = blocks_of_jobs(step, self._kinds, self._block_size)
        read = [
            block
            for start, blocks in zip(array("i", step.starts), jobs, strict=True)
            for (_, index), block in blocks.items()
            if index < start // self._block_size
        ]
        return self._device[read]

    def copy(self, blocks: CopyBlocks | DiskCopy) -> None:
        if isinstance(blocks, DiskCopy):
            host, slots = array("i", blocks.host_blocks), array("i", blocks.slots)
            if blocks.is_write:
                self._disk[slots] = self._host[host]
            else:
                self._host[host] = self._disk[slots]
            return
        device, host = array("i", blocks.device_blocks), array("i", blocks.host_blocks)
        if blocks.is_out:
            self._host[host] = self._device[device]
        else:
            self._device[device] = self._host[host]


def _token(left: np.ndarray, last: np.int32, sampling: Sampling | None, row: int) -> int:
    """
    Args:
        left: what the job's last token, ``last``, left in each group of layers.
    """
    value = zlib.crc32(left.tobytes())
    if sampling is not None:
        if np.frombuffer(sampling.temperature, np.float32)[row] > 0:
            value = zlib.crc32(sampling.uniform[8 * row : 8 * row + 8], value)
        for penalties in sampling.penalties:
            if penalties.row == row:
                newest = last.tobytes() if penalties.is_pending else b""
                value = zlib.crc32(penalties.prompt_ids + penalties.output_ids + newest, value)
        masks = dict(zip(array("i", sampling.masked_rows), array("i", sampling.masks), strict=True))
        if row in masks:
            value = zlib.crc32(masks[row].to_bytes(4, "little", signed=True), value)
        banned = {
            token_id
            for bias in sampling.biases
            if bias.row == row
            for token_id in np.frombuffer(bias.token_ids, np.int32).tolist()
        }
        while FIRST_TOKEN + value % NUM_TOKENS in banned:
            value += 1
    return FIRST_TOKEN + value % NUM_TOKENS
