"""Other ways to compute attention over a paged cache: the baselines of our kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

from benchmarks.gpu.check_device import Call

FLEX_PAGE = 128
"""Tokens in a page: FlexAttention's block size. With smaller pages it reads more than it uses."""
SDPA_BACKENDS = (None, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
"""Backends of SDPA; None: the one that torch chooses, which is not always the fastest."""


def gather_and_sdpa(query: Tensor, kv: Tensor, layer: int, block_tables: Tensor) -> Call:
    """Copies the jobs' blocks to contiguous keys and values, then SDPA. All jobs have one length,
    a whole number of blocks.

    query: [B, heads, head_dim]. kv: [num_blocks, layers, 2, kv_heads, block_size, head_dim].
    """
    kv_heads, block_size, head_dim = kv.shape[3:]
    rows, count = block_tables.shape
    tables = block_tables.long()

    def call() -> Tensor:
        gathered = kv[tables, layer]  # [B, count, 2, kv_heads, block_size, head_dim]
        both = gathered.permute(2, 0, 3, 1, 4, 5)
        key, value = both.reshape(2, rows, kv_heads, count * block_size, head_dim)
        return _sdpa(query, key, value)

    return call


def contiguous_sdpa(query: Tensor, kv_heads: int, context: int, backend: SDPBackend | None) -> Call:
    """SDPA on contiguous keys and values, job by job: shows what paging costs."""
    rows, _, head_dim = query.shape
    shape = (rows, kv_heads, context, head_dim)
    key, value = (torch.randn(shape, dtype=query.dtype, device=query.device) for _ in range(2))

    def call() -> Tensor:
        with _chosen(backend):
            return _sdpa(query, key, value)

    return call


def paged_flex(query: Tensor, kv_heads: int, context: int, *, compiled: bool) -> Call:
    """torch's paged FlexAttention, on pages in random order.

    Args:
        compiled: False runs its plain operations, for a dry run.
    """
    # Not public: with a torch release without it, only this comparison is missing.
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    rows, _, head_dim = query.shape
    device = query.device
    num_pages = rows * -(-context // FLEX_PAGE)
    pages = PagedAttention(num_pages, FLEX_PAGE, rows, device=str(device))
    pages.empty_pages = torch.randperm(num_pages).tolist()
    for row in range(rows):
        pages.reserve(torch.tensor(row, device=device), torch.tensor(context, device=device))
    lengths = torch.full((rows,), context, device=device)
    logical = create_block_mask(
        noop_mask, rows, None, 1, context, device=str(device), BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE)
    )
    mask = pages.convert_logical_block_mask(logical, kv_len=lengths)
    score_mod = pages.get_score_mod(None, kv_len=lengths)
    shape = (1, kv_heads, num_pages * FLEX_PAGE, head_dim)
    key, value = (torch.randn(shape, dtype=query.dtype, device=device) for _ in range(2))
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    is_grouped = query.shape[1] != kv_heads

    def call() -> object:
        return attend(
            query[:, :, None], key, value,
            score_mod=score_mod, block_mask=mask, enable_gqa=is_grouped,
        )  # fmt: skip

    return call


def causal_sdpa(query: Tensor, key: Tensor, value: Tensor, backend: SDPBackend | None) -> Call:
    """Attention of one prompt: query [T, heads, head_dim], the others [T, kv_heads, head_dim]."""
    q, k, v = (one.transpose(0, 1)[None].contiguous() for one in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]

    def call() -> Tensor:
        with _chosen(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

    return call


def _chosen(backend: SDPBackend | None) -> AbstractContextManager[object]:
    return nullcontext() if backend is None else sdpa_kernel(backend)


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query row a job."""
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=is_grouped)
