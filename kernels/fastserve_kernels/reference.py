"""Float64 oracles of `ops`, written for reading: one token and one head at a time.

Results are float64 unless said; inputs may be of any float dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> Tensor:
    """The cache after `ops.kv_write`: a new tensor of kv's dtype."""
    kv = kv.clone()
    block_size = kv.shape[4]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            kv[block, layer, 0, :, offset] = key[token]
            kv[block, layer, 1, :, offset] = value[token]
    return kv


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One query head over its whole context: query [d], key, value [n, d] -> [d]."""
    scores = key.double() @ query.double() * scale
    return torch.softmax(scores, 0) @ value.double()


def paged_attention(
    query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_rows: Tensor,
    context_lens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """See `ops.paged_attention`."""
    tokens, heads, _ = query.shape
    kv_heads, block_size = kv.shape[3:5]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for t in range(tokens):
        table = block_tables[int(table_rows[t])].tolist()
        slots = [
            (table[position // block_size], position % block_size)
            for position in range(int(context_lens[t]))
        ]
        if not slots:
            continue
        blocks, offsets = (torch.tensor(column) for column in zip(*slots, strict=True))
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            key = kv[blocks, layer, 0, kv_head, offsets]
            value = kv[blocks, layer, 1, kv_head, offsets]
            out[t, head] = attend(query[t, head], key, value, scale)
    return out


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, ranges: Sequence[tuple[int, int]], scale: float
) -> Tensor:
    """See `ops.prefill_attention`."""
    heads, kv_heads = query.shape[1], key.shape[1]
    out = torch.zeros(query.shape, dtype=torch.float64)
    for start, end in ranges:
        for t in range(start, end):
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                out[t, head] = attend(
                    query[t, head],
                    key[start : t + 1, kv_head],
                    value[start : t + 1, kv_head],
                    scale,
                )
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_layer_norm`; the sum has x's dtype, as there."""
    total = x + residual
    wide = total.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.double()
    if bias is not None:
        normed = normed + bias.double()
    return total, normed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, relu: bool) -> Tensor:
    """See `ops.PackedLinear`."""
    y = x.double() @ weight.double().T
    if bias is not None:
        y = y + bias.double()
    return y.clamp_min(0.0) if relu else y


def argmax_rows(logits: Tensor) -> Tensor:
    """See `ops.argmax_rows`."""
    return torch.tensor([int(torch.argmax(row.double())) for row in logits], dtype=torch.int64)
