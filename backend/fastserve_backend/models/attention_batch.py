"""What each token of a step attends to, and how that is computed on the step's device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from fastserve_kernels import ops
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch(ABC):
    """The T tokens of a step: where they live in the KV cache and what they attend to.

    num_decodes: D, the first so many jobs decode, with one token each.
    slots: int64 [T], `block_id * block_size + offset` to write a token's key and value to, -1 for
    padding.
    block_tables, table_starts: int32 [N] and [S], see `fastserve_kernels.ops`.
    context_lens: int32 [S], a job's tokens in the cache after this step; 0 for padding.
    query_starts: int32 [S - D + 1], the first row of each job that does not decode, counted from
    row D, and the number of such rows.
    """

    num_decodes: int
    slots: Tensor
    block_tables: Tensor
    table_starts: Tensor
    context_lens: Tensor
    query_starts: Tensor

    def attend(self, query: Tensor, kv: Tensor, layer: int, scale: float) -> Tensor:
        """Causal attention of one layer, whose keys and values are in the cache `kv` already.

        query [T, heads, head_dim] of the step's tokens -> the same shape, contiguous.
        """
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        n = self.num_decodes
        if n:
            self._decode(query[:n], kv, layer, scale, out[:n])
        if n < len(query):
            self._prefill(query[n:], kv, layer, scale, out[n:])
        return out

    def _contexts_of(self, jobs: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables, where those of the jobs begin in them, and how many tokens they hold."""
        return self.block_tables, self.table_starts[jobs], self.context_lens[jobs]

    @abstractmethod
    def _decode(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        """The rows of the jobs that decode."""

    @abstractmethod
    def _prefill(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        """The rows of the others."""


class CPUBatch(AttentionBatch):
    """Each job by itself, for a CPU."""

    def _decode(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        n = self.num_decodes
        ops.paged_decode(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n)),
            scale,
            out,
        )

    def _prefill(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        n = self.num_decodes
        ops.paged_prefill(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n, None)),
            self.query_starts,
            scale,
            out,
        )


@dataclass(frozen=True)
class WorkListBatch(AttentionBatch):
    """Work lists that the host has made, for a GPU: its kernels never wait for the host. They are
    imported when they are called, as they need Triton, which only a GPU needs.

    decode_work, prefill_work: int32, of the jobs that decode and of the others, made by
    `fastserve_kernels.gpu.work_lists`.
    decode_scratch: float32, see `gpu.paged_decode`.
    """

    decode_work: Tensor
    prefill_work: Tensor
    decode_scratch: Tensor

    def _decode(self, query: Tensor, kv: Tensor, layer: int, scale: float, out: Tensor) -> None:
        from fastserve_kernels.gpu.paged_decode import paged_decode

        n = self.num_decodes
        paged_decode(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n)),
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
            *self._contexts_of(slice(n, None)),
            self.query_starts,
            self.prefill_work,
            scale,
            out,
        )
