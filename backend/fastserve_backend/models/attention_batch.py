"""What each token of a step attends to, and how that is computed on the step's device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from fastserve_kernels import ops
from torch import Tensor


class AttentionBatch(Protocol):
    """The T tokens of a step: where they live in the KV cache and what they attend to."""

    @property
    def slots(self) -> Tensor:
        """int64 [T], `block_id * block_size + offset` to write a token's key and value to, -1 for
        padding."""
        ...

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, scale: float
    ) -> Tensor:
        """Causal attention of one layer, whose keys and values are in the cache `kv` already.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim] of the step's tokens ->
        [T, heads, head_dim], contiguous.
        """
        ...


@dataclass(frozen=True)
class RowwiseBatch:
    """Each row by itself, for a CPU: no row waits for the shape of another.

    slots: see `AttentionBatch`.
    block_tables: int32 [S, max_blocks], one row a job. table_rows: int32 [T], a token's row in it.
    context_lens: int32 [T], a token attends to positions [0, context_lens[t]); 0 for padding.
    fresh_prefills: ascending (start, end) row ranges, each the beginning of a prompt, with nothing
    in the cache yet.
    """

    slots: Tensor
    block_tables: Tensor
    table_rows: Tensor
    context_lens: Tensor
    fresh_prefills: Sequence[tuple[int, int]] = ()
    paged_ranges: tuple[tuple[int, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        """Derive the row ranges between the fresh prefills: they attend to the cache."""
        ranges: list[tuple[int, int]] = []
        start = 0
        for fresh_start, fresh_end in (*self.fresh_prefills, (len(self.slots), len(self.slots))):
            if fresh_start > start:
                ranges.append((start, fresh_start))
            start = fresh_end
        object.__setattr__(self, "paged_ranges", tuple(ranges))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, scale: float
    ) -> Tensor:
        """See `AttentionBatch.attend`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for start, end in self.paged_ranges:
            ops.paged_attention(
                query[start:end],
                kv,
                layer,
                self.block_tables,
                self.table_rows[start:end],
                self.context_lens[start:end],
                scale,
                out=out[start:end],
            )
        if self.fresh_prefills:
            ops.prefill_attention(query, key, value, self.fresh_prefills, scale, out=out)
        return out


@dataclass(frozen=True)
class WorkListBatch:
    """Work lists that the host has made, for a GPU: its kernels never wait for the host. They are
    imported when they are called, as they need Triton, which only a GPU needs.

    num_decodes: D, the first so many jobs decode, with one token each.
    slots: see `AttentionBatch`.
    block_tables: int32 [S, max_blocks], one row a job.
    context_lens: int32 [S], a job's tokens in the cache after this step; 0 for padding.
    decode_work, prefill_work: int32, of the D jobs and of the others, made by
    `fastserve_kernels.gpu.work_lists`.
    query_starts: int32 [S - D + 1], the first row of each job that does not decode, counted from
    row D, and the number of such rows.
    decode_scratch: float32, see `gpu.paged_decode`.
    """

    num_decodes: int
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    decode_work: Tensor
    prefill_work: Tensor
    query_starts: Tensor
    decode_scratch: Tensor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, scale: float
    ) -> Tensor:
        """See `AttentionBatch.attend`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        n = self.num_decodes
        if n:
            self._decode(query[:n], kv, layer, scale, out[:n])
        if n < len(query):
            self._prefill(query[n:], kv, layer, scale, out[n:])
        return out

    def _decode(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        from fastserve_kernels.gpu.paged_decode import paged_decode

        n = self.num_decodes
        paged_decode(
            query,
            kv,
            layer,
            self.block_tables[:n],
            self.context_lens[:n],
            self.decode_work,
            scale,
            out,
            self.decode_scratch,
        )

    def _prefill(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        from fastserve_kernels.gpu.paged_prefill import paged_prefill

        n = self.num_decodes
        paged_prefill(
            query,
            kv,
            layer,
            self.block_tables[n:],
            self.context_lens[n:],
            self.query_starts,
            self.prefill_work,
            scale,
            out,
        )
