"""Ranks without a model, whose tokens depend on the same state as a model's."""

from __future__ import annotations

import zlib
from array import array

import numpy as np
from fastserve_backend.rank_protocol.messages import CopyBlocks, Sampling, Step

# The tokens of a to t in a byte-level tokenizer.
FIRST_TOKEN = 4 + ord("a")
NUM_TOKENS = 20


class RememberedKV:
    """A rank's KV blocks, which hold the ids of the tokens themselves.

    A job's next token is a hash of all tokens in its block table, of its sampling and of its mask
    of 4 bytes. So missing, stale or foreign KV changes tokens.
    """

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._device = np.full((num_blocks, block_size), -1, np.int32)
        self._host = np.full((num_host_blocks, block_size), -1, np.int32)
        self._last_tokens = np.zeros(0, np.int32)

    def run(self, step: Step) -> bytes:
        """Runs a step; returns the new token of each sampling job, int32."""
        self._device[array("i", step.copy_to)] = self.copied(step)
        ids = np.array(np.frombuffer(step.token_ids, np.int32))
        rows = np.frombuffer(step.previous_rows, np.int32)
        assert len(rows) in (0, step.num_decodes)
        taken = np.flatnonzero(rows >= 0)
        ids[taken] = self._last_tokens[rows[taken]]
        counts, starts = array("i", step.query_lens), array("i", step.starts)
        blocks = np.frombuffer(step.block_ids, np.int32)
        tables = np.split(blocks, np.cumsum(array("i", step.block_counts))[:-1])
        tokens = array("i")
        num_sampling = len(counts) - step.num_partial
        end = 0
        for row, (count, start, table) in enumerate(zip(counts, starts, tables, strict=True)):
            begin, end = end, end + count
            kv = self._device[table].reshape(-1)
            kv[start : start + count] = ids[begin:end]
            self._device[table] = kv.reshape(len(table), -1)
            if row < num_sampling:
                tokens.append(_token(kv[: start + count], step.sampling, row))
        self._last_tokens = np.array(tokens, np.int32)
        return tokens.tobytes()

    def copied(self, step: Step) -> np.ndarray:
        """The contents of the blocks that the step copies."""
        return self._device[array("i", step.copy_from)]

    def copy(self, blocks: CopyBlocks) -> None:
        device, host = array("i", blocks.device_blocks), array("i", blocks.host_blocks)
        if blocks.is_out:
            self._host[host] = self._device[device]
        else:
            self._device[device] = self._host[host]


def _token(ids: np.ndarray, sampling: Sampling | None, row: int) -> int:
    value = zlib.crc32(ids.tobytes())
    if sampling is not None:
        if np.frombuffer(sampling.temperature, np.float32)[row] > 0:
            value = zlib.crc32(sampling.uniform[8 * row : 8 * row + 8], value)
        for penalties in sampling.penalties:
            if penalties.row == row:
                newest = ids[-1:].tobytes() if penalties.is_pending else b""
                value = zlib.crc32(penalties.prompt_ids + penalties.output_ids + newest, value)
        masks = dict(zip(array("i", sampling.masked_rows), array("i", sampling.masks), strict=True))
        if row in masks:
            value = zlib.crc32(masks[row].to_bytes(4, "little", signed=True), value)
    return FIRST_TOKEN + value % NUM_TOKENS
