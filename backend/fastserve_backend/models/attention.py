"""Causal attention over the paged KV cache.

`Attention` is a layer of a model. `AttentionBatch` says where a step's tokens are in the cache and
what they attend to. It has a `GroupBatch` for each group of layers; its subclasses call the kernels
of a CPU and of a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastserve_kernels import ops
from fastserve_kernels.ops import AttentionRule
from torch import Tensor

from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.models.model_part import ModelPart

if TYPE_CHECKING:
    from fastserve_kernels.gpu.paged_decode import DecodeScratch


@dataclass(frozen=True)
class Attention:
    """Causal attention of one layer over the paged cache.

    group: the group of layers with which it shares blocks (`checkpoints.layer_groups`).
    layer: its number in the blocks of its group, from 0.
    heads, kv_heads: those of this rank; kv_heads < heads is grouped-query attention.
    """

    group: int
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rule: AttentionRule

    @classmethod
    def of(
        cls, config: ModelConfig, layer: int, part: ModelPart, rule: AttentionRule | None = None
    ) -> Attention:
        """Attention of this rank's heads in layer `part.layers[layer]`.

        Args:
            rule: None: the usual scale and nothing else.
        """
        size = part.tensor.size
        heads, kv_heads = config.num_heads // size, config.num_kv_heads // size
        usual = AttentionRule(config.head_dim**-0.5)
        group, number = config.layer_groups.places(part.layers)[layer]
        return cls(group, number, heads, kv_heads, config.head_dim, rule or usual)

    def __call__(
        self, qkv: Tensor, batch: AttentionBatch, kv: Tensor, cos_sin: Tensor | None = None
    ) -> Tensor:
        """qkv [T, (heads + 2 * kv_heads) * head_dim] -> [T, heads * head_dim].

        Writes the step's keys and values to the cache `kv` first. With cos_sin, float32 [T, dim],
        queries and keys are rotated first (`ops.rotate`); that changes qkv.
        """
        in_group = batch.groups[self.group]
        by_head = qkv.view(len(qkv), -1, self.head_dim)
        query = by_head[:, : self.heads]
        if cos_sin is None:
            key = by_head[:, self.heads : self.heads + self.kv_heads]
            value = by_head[:, self.heads + self.kv_heads :]
            out = in_group.write_and_attend(query, key, value, kv, self.layer, self.rule)
        else:
            ops.rope_kv_write(by_head, self.heads, cos_sin, kv, self.layer, in_group.slots)
            out = in_group.attend(query, kv, self.layer, self.rule)
        return out.view(len(qkv), -1)


@dataclass(frozen=True)
class AttentionBatch:
    """The tokens of a step, as each group of layers sees them."""

    groups: Sequence[GroupBatch]


@dataclass(frozen=True)
class GroupBatch(ABC):
    """The T tokens of a step of S jobs in one group of layers: where they are in the cache and what
    they attend to.

    num_decodes: D; the first D jobs decode, with one token each.
    slots: int64 [T], `block_id * block_size + offset` where a token's key and value go; -1 for
        padding.
    block_tables, table_starts: int32 [N] and [S], see `fastserve_kernels.ops`. The blocks before a
        window have no entries: there table_starts points to where a whole table would begin.
    context_lens: int32 [S], a job's tokens in the cache after this step; 0 for padding.
    query_starts: int32 [S - D + 1], where the rows of each job in prefill begin, counted from row
        D, and then the number of such rows.
    """

    num_decodes: int
    slots: Tensor
    block_tables: Tensor
    table_starts: Tensor
    context_lens: Tensor
    query_starts: Tensor

    def attend(self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule) -> Tensor:
        """Causal attention of one layer: query [T, heads, head_dim] -> the same shape, contiguous.

        The step's keys and values must be in the cache `kv` already.
        """
        out = ops.empty(query.shape, query)
        n = self.num_decodes
        if n:
            self._decode(query[:n], kv, layer, rule, out[:n])
        if n < len(query):
            self._prefill(query[n:], kv, layer, rule, out[n:])
        return out

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, rule: AttentionRule
    ) -> Tensor:
        """The same, once the step's keys and values, [T, kv_heads, head_dim], are written to the
        cache."""
        ops.kv_write(kv, layer, key, value, self.slots)
        return self.attend(query, kv, layer, rule)

    def _contexts_of(self, jobs: slice) -> tuple[Tensor, Tensor, Tensor]:
        """For these jobs: the block tables, where each job's begins, and its context length."""
        return self.block_tables, self.table_starts[jobs], self.context_lens[jobs]

    @abstractmethod
    def _decode(
        self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule, out: Tensor
    ) -> None:
        """Fill `out` for the jobs that decode."""

    @abstractmethod
    def _prefill(
        self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule, out: Tensor
    ) -> None:
        """Fill `out` for the jobs in prefill."""


class CPUBatch(GroupBatch):
    """For a CPU, whose kernels take the arrays as they are."""

    def _decode(
        self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule, out: Tensor
    ) -> None:
        n = self.num_decodes
        ops.paged_decode(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n)),
            rule,
            out,
        )

    def _prefill(
        self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule, out: Tensor
    ) -> None:
        n = self.num_decodes
        ops.paged_prefill(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n, None)),
            self.query_starts,
            rule,
            out,
        )


@dataclass(frozen=True)
class WorkListBatch(GroupBatch):
    """For a GPU, whose kernels also take work lists that the host has made.

    The kernels are imported on use: they need Triton, which only a GPU needs.

    decode_work, prefill_work: int32, the work of decodes and of prefills in layers with the group's
        window, made by `fastserve_kernels.gpu.work_lists`.
    decode_scratch: see `gpu.paged_decode`.
    """

    decode_work: Tensor
    prefill_work: Tensor
    decode_scratch: DecodeScratch

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, rule: AttentionRule
    ) -> Tensor:
        if self.num_decodes < len(query):
            return super().write_and_attend(query, key, value, kv, layer, rule)
        # Of decodes alone, the kernel of attention writes the tokens: one launch less.
        out = ops.empty(query.shape, query)
        self._decode(query, kv, layer, rule, out, (key, value))
        return out

    def _decode(
        self,
        query: Tensor,
        kv: Tensor,
        layer: int,
        rule: AttentionRule,
        out: Tensor,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        from fastserve_kernels.gpu.paged_decode import paged_decode

        n = self.num_decodes
        paged_decode(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n)),
            self.decode_work,
            rule,
            out,
            self.decode_scratch,
            new,
        )

    def _prefill(
        self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule, out: Tensor
    ) -> None:
        from fastserve_kernels.gpu.paged_prefill import paged_prefill

        n = self.num_decodes
        paged_prefill(
            query,
            kv,
            layer,
            *self._contexts_of(slice(n, None)),
            self.query_starts,
            self.prefill_work,
            rule,
            out,
        )
