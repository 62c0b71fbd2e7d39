"""Launches of attention for `ahead_of_time`, as a model step makes them."""

from __future__ import annotations

import torch
from fastserve_kernels.gpu import paged_decode, paged_prefill
from torch import Tensor

ROWS, JOBS, ITEMS = 256, 16, 64
LAYERS, BLOCKS, BLOCK_SIZE, MAX_BLOCKS = 40, 4000, 16, 128


def decode(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    query, kv, out = _tensors(dtype, heads, kv_heads, head_dim)
    paged_decode.paged_decode(
        query[:JOBS], kv, 3, _integers(JOBS, MAX_BLOCKS), _integers(JOBS),
        _integers(1 + JOBS + 2 * ITEMS), head_dim**-0.5, out[:JOBS],
        paged_decode.decode_scratch(ITEMS, heads, head_dim, query.device),
    )  # fmt: skip


def prefill(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    query, kv, out = _tensors(dtype, heads, kv_heads, head_dim)
    paged_prefill.paged_prefill(
        query, kv, 3, _integers(JOBS, MAX_BLOCKS), _integers(JOBS), _integers(JOBS + 1),
        _integers(ITEMS, 2), head_dim**-0.5, out,
    )  # fmt: skip


def step(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, num_decodes: int, width: int
) -> None:
    """Decodes and prefills, the second behind the first in the same tensors; ``width`` blocks of
    the longest job."""
    query, kv, out = _tensors(dtype, heads, kv_heads, head_dim)
    tables, context_lens = _integers(JOBS, width), _integers(JOBS)
    n, scale = num_decodes, head_dim**-0.5
    scratch = paged_decode.decode_scratch(ITEMS, heads, head_dim, query.device)
    paged_decode.paged_decode(
        query[:n], kv, 3, tables[:n], context_lens[:n], _integers(1 + n + 2 * (n + 1)), scale,
        out[:n], scratch,
    )  # fmt: skip
    paged_prefill.paged_prefill(
        query[n:], kv, 3, tables[n:], context_lens[n:], _integers(JOBS - n + 1),
        _integers(ITEMS, 2), scale, out[n:],
    )  # fmt: skip


def _tensors(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, a view of a fused projection; cache; result."""
    fused = torch.empty(ROWS, heads + 2 * kv_heads, head_dim, dtype=dtype, device="meta")
    shape = (BLOCKS, LAYERS, 2, kv_heads, BLOCK_SIZE, head_dim)
    kv = torch.empty(shape, dtype=dtype, device="meta")
    return fused[:, :heads], kv, torch.empty(ROWS, heads, head_dim, dtype=dtype, device="meta")


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
