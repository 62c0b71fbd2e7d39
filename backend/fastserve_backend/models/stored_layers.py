"""The forms in which checkpoints store a decoder's layers, brought to one.

`DecoderModel` wants ``self_attn.q_proj``, ``k_proj`` and ``v_proj``, with matrices [out, in].
Others have one matrix for all three, whose rows are in one of the orders of `FusedQKV`, or matrices
[in, out].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

from fastserve_backend.checkpoints.decoder_config import DecoderConfig
from fastserve_backend.models.weights import (
    Shard,
    StoredTensor,
    StoredWeight,
    check_tensor,
    reordered,
)


def qkv_rows(config: DecoderConfig) -> Mapping[str, list[int]]:
    """Which rows of a fused matrix are those of queries, keys and values."""
    dim, kv_heads = config.head_dim, config.num_kv_heads
    shared_by = config.num_heads // kv_heads
    rows = torch.arange((config.num_heads + 2 * kv_heads) * dim)
    if config.fused_qkv == "by_kv_head":
        query, key, value = rows.view(kv_heads, -1, dim).split((shared_by, 1, 1), dim=1)
    elif config.fused_qkv == "in_quarters":
        query, value, key = rows.view(4, 3, -1).unbind(dim=1)
    else:
        query, key, value = rows.split((config.num_heads * dim, kv_heads * dim, kv_heads * dim))
    parts = {"q_proj": query, "k_proj": key, "v_proj": value}
    return {name: part.flatten().tolist() for name, part in parts.items()}


def rows_apart(stored: StoredTensor, parts: Mapping[str, list[int]]) -> Iterator[StoredTensor]:
    """Divide a tensor into parts, name -> rows in any order.

    Raises:
        ModelError: the tensor has another number of rows.
    """
    check_tensor(stored, (sum(map(len, parts.values())), *stored.shape[1:]))
    for name, rows in parts.items():
        read = partial(_read_rows, stored, rows)
        yield replace(stored, name=name, shape=(len(rows), *stored.shape[1:]), read=read)


def _read_rows(stored: StoredTensor, rows: list[int], shard: Shard) -> StoredWeight:
    """The part ``shard`` of these rows. All rows between the first and the last are read."""
    own = rows[shard[0]] if shard else rows
    first = min(own)
    stretch = stored.read((slice(first, max(own) + 1), *shard[1:]))
    if own == list(range(first, first + len(own))):
        return stretch
    return reordered(stretch, torch.tensor(own) - first)


def transposed(stored: StoredTensor) -> StoredTensor:
    """A matrix [in, out] as [out, in]; a vector stays."""
    if len(stored.shape) != 2:
        return stored
    return replace(stored, shape=stored.shape[::-1], read=partial(_read_transposed, stored))


def _read_transposed(stored: StoredTensor, shard: Shard) -> StoredWeight:
    rows, columns = (*shard, slice(None), slice(None))[:2]
    return stored.read_dequantized((columns, rows)).T
