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
SDPA_BACKENDS = {
    "": None,
    ", FLASH": SDPBackend.FLASH_ATTENTION,
    ", cuDNN": SDPBackend.CUDNN_ATTENTION,
}
"""Backends of SDPA, by name; None: the one that torch chooses, which is not always the fastest."""
FLASHINFER_WORKSPACE = 128 * 2**20
"""Bytes: the size that FlashInfer recommends."""


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


def flashinfer_decode(
    query: Tensor, kv_heads: int, context: int, page: int, *, tensor_cores: bool
) -> Call:
    """FlashInfer's paged decode on a cache of one layer, in its own layout.

    Args:
        query: [B, heads, head_dim].
        page: tokens in a page; ``context`` is a multiple of it.
        tensor_cores: its kernel for prompts, which is faster with few KV heads.
    """
    import flashinfer

    rows, heads, head_dim = query.shape
    cache, starts, indices, last = _flashinfer_cache(query, rows, kv_heads, context, page)
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=tensor_cores
    )
    wrapper.plan(
        starts, indices, last, heads, kv_heads, head_dim, page,
        q_data_type=query.dtype, kv_data_type=query.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(query, cache)


def flashinfer_prefill(query: Tensor, kv_heads: int, page: int) -> Call:
    """FlashInfer's paged prefill of one prompt, query [T, heads, head_dim]."""
    import flashinfer

    tokens, heads, head_dim = query.shape
    cache, starts, indices, last = _flashinfer_cache(query, 1, kv_heads, tokens, page)
    workspace = torch.zeros(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        torch.tensor([0, tokens], dtype=torch.int32, device=query.device),
        starts, indices, last, heads, kv_heads, head_dim, page,
        causal=True, q_data_type=query.dtype, kv_data_type=query.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(query, cache)


def _flashinfer_cache(
    query: Tensor, rows: int, kv_heads: int, context: int, page: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A random cache [pages, 2, page, kv_heads, head_dim], where each job's pages begin, all their
    numbers in random order, and how many tokens are in each job's last page."""
    device, pages_of_job = query.device, -(-context // page)
    num_pages = rows * pages_of_job
    shape = (num_pages, 2, page, kv_heads, query.shape[-1])
    return (
        torch.randn(shape, dtype=query.dtype, device=device),
        torch.arange(rows + 1, dtype=torch.int32, device=device) * pages_of_job,
        torch.randperm(num_pages, device=device).to(torch.int32),
        torch.full((rows,), (context - 1) % page + 1, dtype=torch.int32, device=device),
    )


def _chosen(backend: SDPBackend | None) -> AbstractContextManager[object]:
    return nullcontext() if backend is None else sdpa_kernel(backend)


def _sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One query row a job."""
    is_grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=is_grouped)
