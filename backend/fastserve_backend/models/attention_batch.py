"""What each token of a step attends to, and how that is computed on the step's device."""

from __future__ import annotations

from dataclasses import dataclass
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

    def attend(self, query: Tensor, kv: Tensor, layer: int, scale: float) -> Tensor:
        """Causal attention of one layer, whose keys and values are in the cache `kv` already.

        query [T, heads, head_dim] of the step's tokens -> the same shape, contiguous.
        """
        ...


@dataclass(frozen=True)
class CPUBatch:
    """Each job by itself, for a CPU.

    num_decodes: D, the first so many jobs decode, with one token each.
    slots: see `AttentionBatch`.
    block_tables: int32 [S, max_blocks], one row a job.
    context_lens: int32 [S], a job's tokens in the cache after this step; 0 for a padding decode.
    query_starts: int32 [S - D + 1], the first row of each job that does not decode, counted from
    row D, and the number of such rows.
    """

    num_decodes: int
    slots: Tensor
    block_tables: Tensor
    context_lens: Tensor
    query_starts: Tensor

    def attend(self, query: Tensor, kv: Tensor, layer: int, scale: float) -> Tensor:
        """See `AttentionBatch.attend`."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        n, tables, lengths = self.num_decodes, self.block_tables, self.context_lens
        if n:
            ops.paged_decode(query[:n], kv, layer, tables[:n], lengths[:n], scale, out[:n])
        if n < len(query):
            starts = self.query_starts
            ops.paged_prefill(query[n:], kv, layer, tables[n:], lengths[n:], starts, scale, out[n:])
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

    def attend(self, query: Tensor, kv: Tensor, layer: int, scale: float) -> Tensor:
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
