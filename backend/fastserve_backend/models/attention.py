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
from fastserve_kernels.gpu.work_lists import prefill_capacity
from fastserve_kernels.ops import AttentionRule, CommonBeginnings
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
    they attend to. The first D jobs decode, with one token each.

    slots: int64 [T], `block_id * block_size + offset` where a token's key and value go; -1 for
        padding.
    block_tables, table_starts: int32 [N] and [S], see `fastserve_kernels.ops`. The blocks before a
        window have no entries: there table_starts points to where a whole table would begin.
    context_lens: int32 [S], a job's tokens in the cache after this step; 0 for padding.
    """

    slots: Tensor
    block_tables: Tensor
    table_starts: Tensor
    context_lens: Tensor

    @abstractmethod
    def attend(self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule) -> Tensor:
        """Causal attention of one layer: query [T, heads, head_dim] -> the same shape, contiguous.

        The step's keys and values must be in the cache `kv` already. Rows that belong to no job get
        any values.
        """

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, rule: AttentionRule
    ) -> Tensor:
        """The same, once the step's keys and values, [T, kv_heads, head_dim], are written to the
        cache."""
        ops.kv_write(kv, layer, key, value, self.slots)
        return self.attend(query, kv, layer, rule)


@dataclass(frozen=True)
class CPUBatch(GroupBatch):
    """For a CPU, whose kernels take the arrays as they are.

    num_decodes: D.
    query_starts: int32 [S - D + 1], where the rows of each job in prefill begin, counted from row
        D, and then the number of such rows.
    beginnings: of the D jobs that decode.
    """

    num_decodes: int
    query_starts: Tensor
    beginnings: CommonBeginnings

    def attend(self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule) -> Tensor:
        out = ops.empty(query.shape, query)
        n = self.num_decodes
        if n:
            ops.paged_decode(
                query[:n],
                kv,
                layer,
                self.block_tables,
                self.table_starts[:n],
                self.context_lens[:n],
                rule,
                out[:n],
                self.beginnings,
            )
        if n < len(query):
            ops.paged_prefill(
                query[n:],
                kv,
                layer,
                self.block_tables,
                self.table_starts[n:],
                self.context_lens[n:],
                self.query_starts,
                rule,
                out[n:],
            )
        return out


@dataclass(frozen=True)
class WorkListBatch(GroupBatch):
    """For a GPU, whose kernels also take work lists that the host has made.

    The kernels are imported on use: they need Triton, which only a GPU needs.

    decode_contexts: int32 [R], the context lengths of the first R rows, of which the first D
        decode; 0 for the others.
    query_starts: int32 [S + 1], where the rows of each job begin, and then the number of rows.
    decode_work, prefill_work: int32, the work of decodes and of prefills in layers with the group's
        window, made by `fastserve_kernels.gpu.work_lists`.
    decode_scratch: see `gpu.paged_decode`.
    """

    decode_contexts: Tensor
    query_starts: Tensor
    decode_work: Tensor
    prefill_work: Tensor
    decode_scratch: DecodeScratch

    @property
    def has_prompts(self) -> bool:
        """Whether there may be rows of prompts. If not, all rows decode or are padding."""
        return prefill_capacity(self.prefill_work.numel()) > 0

    def attend(self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule) -> Tensor:
        out = ops.empty(query.shape, query)
        self._decode(query, kv, layer, rule, out)
        self._prefill(query, kv, layer, rule, out)
        return out

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, rule: AttentionRule
    ) -> Tensor:
        if self.has_prompts:
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
        """Fill the first R rows of `out`, with zeros where a row does not decode.

        new: the rows' keys and values, if they are not in the cache yet.
        """
        from fastserve_kernels.gpu.paged_decode import paged_decode

        rows = len(self.decode_contexts)
        paged_decode(
            query[:rows],
            kv,
            layer,
            self.block_tables,
            self.table_starts,
            self.decode_contexts,
            self.decode_work,
            rule,
            out[:rows],
            self.decode_scratch,
            new,
        )

    def _prefill(
        self, query: Tensor, kv: Tensor, layer: int, rule: AttentionRule, out: Tensor
    ) -> None:
        """Fill the rows of prompts, if any. Some may be among the first R: decodes come first."""
        from fastserve_kernels.gpu.paged_prefill import paged_prefill

        paged_prefill(
            query,
            kv,
            layer,
            self.block_tables,
            self.table_starts,
            self.context_lens,
            self.query_starts,
            self.prefill_work,
            rule,
            out,
        )
