"""A step's tensors: what the model's forward pass is given, made for the device that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from fastserve_kernels.gpu import work_lists
from torch import Tensor

from fastserve_backend.models.attention_batch import AttentionBatch, CPUBatch, WorkListBatch
from fastserve_backend.worker.staging import Array, Places, Staging
from fastserve_backend.worker.step_layout import StepLayout

# What a step of decodes alone has of the others.
_NO_TILES = np.zeros((0, 2), dtype=np.int32)
_NO_STARTS = np.zeros(1, dtype=np.int32)
_NO_SAMPLED = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class StepLimits:
    """No step exceeds them."""

    max_jobs: int
    max_tokens: int
    max_model_len: int

    def max_blocks(self, block_size: int) -> int:
        """Blocks of the longest job."""
        return -(-self.max_model_len // block_size)


@dataclass(frozen=True)
class StepTensors:
    """token_ids, positions: int64 [T]. sampled: int64 [R], the rows that get a token."""

    token_ids: Tensor
    positions: Tensor
    sampled: Tensor
    batch: AttentionBatch


class StepInputs(Protocol):
    def bring(self, layout: StepLayout) -> StepTensors:
        """The tensors of a step; good until the next call."""
        ...


class CPUInputs:
    """On a CPU the arrays are where they are needed."""

    def bring(self, layout: StepLayout) -> StepTensors:
        n = layout.num_decodes
        batch = CPUBatch(
            num_decodes=n,
            slots=torch.from_numpy(layout.slots),
            # A copy, because torch warns of arrays that cannot be written.
            block_tables=torch.from_numpy(layout.block_tables.copy()),
            table_starts=torch.from_numpy(layout.table_starts),
            context_lens=torch.from_numpy(layout.context_lens),
            query_starts=torch.from_numpy(layout.query_starts[n:] - n),
        )
        return StepTensors(
            torch.from_numpy(layout.token_ids),
            torch.from_numpy(layout.positions),
            torch.from_numpy(layout.sampled),
            batch,
        )


class WorkListInputs:
    """For the GPU's attention kernels: work lists, and all arrays by one copy.

    Args:
        kv: the rank's cache. heads: the rank's query heads, of ``head_dim`` elements and ``dtype``.
    """

    def __init__(
        self, kv: Tensor, heads: int, head_dim: int, dtype: torch.dtype, limits: StepLimits
    ) -> None:
        # They need Triton, which only a GPU needs.
        from fastserve_kernels.gpu.paged_decode import decode_scratch
        from fastserve_kernels.gpu.paged_prefill import query_tile

        num_blocks, block_size = len(kv), kv.shape[4]
        # A block is one job's, so that all jobs together have no more than the cache; but the
        # largest step is tried on a cache of one block.
        most_blocks = max(num_blocks, limits.max_blocks(block_size))
        self._most_tables = np.zeros(most_blocks, dtype=np.int32)
        # The items of decode work: no more than the longest jobs make, and no more than the cache
        # has tokens for, but for one a job that begins a split.
        self._splits_a_job = int(work_lists.num_splits(limits.max_model_len))
        self._splits_in_cache = int(work_lists.num_splits(num_blocks * block_size))
        self._tile = query_tile(head_dim, dtype, kv.device)
        self._scratch = decode_scratch(self._capacity(limits.max_jobs), heads, head_dim, kv.device)
        self._staging = Staging(self._most_bytes(limits), kv.device)
        self._places: dict[int, Places] = {}  # of padded steps, by their number of jobs

    def bring(self, layout: StepLayout) -> StepTensors:
        n = layout.num_decodes
        capacity = int(work_lists.num_splits(layout.context_lens[:n]).sum())
        decode_work = work_lists.decode_work(layout.context_lens[:n], capacity)
        prefill_work = work_lists.prefill_work(
            layout.query_lens[n:], self._tile, layout.context_lens[n:]
        )
        arrays = _arrays(
            layout, decode_work, prefill_work, layout.query_starts[n:] - n, layout.sampled
        )
        return self._tensors(n, arrays, self._staging.places(arrays))

    def bring_padded(self, layout: StepLayout, num_jobs: int) -> StepTensors:
        """The tensors of a step of decodes alone, in the shapes and at the addresses that all steps
        padded to so many jobs have. All rows are sampled, so ``sampled`` is empty."""
        padded = layout.padded(num_jobs)
        decode_work = work_lists.decode_work(padded.context_lens, self._capacity(num_jobs))
        arrays = _arrays(padded, decode_work, _NO_TILES, _NO_STARTS, _NO_SAMPLED)
        if num_jobs not in self._places:
            self._places[num_jobs] = self._staging.places([*arrays[:-1], self._most_tables])
        return self._tensors(num_jobs, arrays, self._places[num_jobs])

    def _tensors(self, num_decodes: int, arrays: list[Array], places: Places) -> StepTensors:
        token_ids, positions, sampled, *of_batch = self._staging.bring(arrays, places)
        slots, starts, context_lens, decode_work, prefill_work, query_starts, tables = of_batch
        batch = WorkListBatch(
            num_decodes=num_decodes,
            slots=slots,
            block_tables=tables,
            table_starts=starts,
            context_lens=context_lens,
            decode_work=decode_work,
            prefill_work=prefill_work,
            query_starts=query_starts,
            decode_scratch=self._scratch,
        )
        return StepTensors(token_ids, positions, sampled, batch)

    def _capacity(self, num_jobs: int) -> int:
        return min(num_jobs * self._splits_a_job, num_jobs + self._splits_in_cache)

    def _most_bytes(self, limits: StepLimits) -> int:
        jobs, tokens = limits.max_jobs, limits.max_tokens
        decode_work = work_lists.decode_work(np.zeros(jobs), self._capacity(jobs))
        tiles = np.zeros((jobs + tokens // self._tile, 2), dtype=np.int32)
        by_token = [np.zeros(tokens, dtype=np.int64)] * 3
        by_job = [np.zeros(jobs, dtype=np.int64)] * 3 + [np.zeros(jobs + 1, dtype=np.int32)]
        return Staging.size_of([*by_token, *by_job, decode_work, tiles, self._most_tables])


def _arrays(
    layout: StepLayout, decode_work: Array, prefill_work: Array, query_starts: Array, sampled: Array
) -> list[Array]:
    """The block tables last, whose number of entries differs from step to step."""
    return [
        layout.token_ids,
        layout.positions,
        sampled,
        layout.slots,
        layout.table_starts,
        layout.context_lens,
        decode_work,
        prefill_work,
        query_starts,
        layout.block_tables,
    ]
