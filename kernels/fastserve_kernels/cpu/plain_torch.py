"""The operations in plain torch, for any device and dtype: slower, never wrong.

It gathers each job's K and V, which the compiled kernels avoid.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `ops.kv_write`."""
    block_size = kv.shape[4]
    written = (slots >= 0).nonzero().squeeze(1)
    slots = slots[written]
    blocks, offsets = slots // block_size, slots % block_size
    kv[blocks, layer, 0, :, offsets] = key[written]
    kv[blocks, layer, 1, :, offsets] = value[written]


def paged_attention(
    query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_rows: Tensor,
    context_lens: Tensor, scale: float, out: Tensor,
) -> None:  # fmt: skip
    """See `ops.paged_attention`."""
    block_size = kv.shape[4]
    lengths = context_lens.tolist()
    start = 0
    for table_row, run in groupby(table_rows.tolist()):
        end = start + len(list(run))
        longest = max(lengths[start:end])
        blocks = block_tables[table_row, : -(-longest // block_size)].long()
        # [2, kv_heads, blocks * block_size, head_dim], cut to what some query may see
        context = kv[blocks, layer].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :longest]
        limits = context_lens[start:end]
        visible = torch.arange(longest, device=query.device) < limits[:, None]
        out[start:end] = _attend(query[start:end], context[0], context[1], visible, scale)
        start = end


def prefill_attention(
    query: Tensor, key: Tensor, value: Tensor, ranges: Sequence[tuple[int, int]], scale: float,
    out: Tensor,
) -> None:  # fmt: skip
    """See `ops.prefill_attention`."""
    grouped = query.shape[1] != key.shape[1]
    for start, end in ranges:
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        out[start:end] = y[0].transpose(0, 1)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `ops.add_layer_norm`. torch accumulates low-precision layer norms in fp32 itself."""
    total = x + residual
    return total, F.layer_norm(total, total.shape[-1:], weight, bias, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `ops.add_rms_norm`."""
    total = x + residual
    values = total.float()
    inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return total, (values * inverse * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos_sin: Tensor) -> None:
    """See `ops.rotate`."""
    half = cos_sin.shape[1] // 2
    cosine, sine = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    x[..., : 2 * half] = turned


def silu_mul(x: Tensor) -> Tensor:
    """See `ops.silu_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float) -> Tensor:
    """query [n, heads, d], key/value [kv_heads, m, d], visible [n, m] -> [n, heads, d] in fp32.

    A row that sees nothing gives zeros.
    """
    n, heads, head_dim = query.shape
    kv_heads = key.shape[0]
    q = query.float().view(n, kv_heads, heads // kv_heads, head_dim)
    scores = torch.einsum("nhgd,hmd->nhgm", q, key.float()) * scale
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    weights = torch.softmax(scores, -1).masked_fill(~visible[:, None, None, :], 0.0)
    return torch.einsum("nhgm,hmd->nhgd", weights, value.float()).reshape(n, heads, head_dim)
