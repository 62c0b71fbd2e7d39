"""Quantizes blocks of the KV cache to INT8 and back, in place; see `kv_quantization`.

Codes, parameters and values are the same as there, bit for bit: divisions follow IEEE, and nothing
is fused into a multiply-add.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import next_power_of_2
from fastserve_kernels.kv_quantization import LARGEST, LEAST_SCALE, LEVELS, LOWEST_CODE

_LEVELS = tl.constexpr(float(LEVELS))
_LOWEST_CODE = tl.constexpr(float(LOWEST_CODE))
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_LARGEST = tl.constexpr(LARGEST)
_ROUNDING = tl.constexpr(1.5 * 2.0**23)

# A program has one head's keys or values in a block. With 16 tokens of 128 channels that is one
# warp's work, which then needs no shared memory for a channel's range.
_ELEMENTS_OF_A_WARP = 2048
_MOST_WARPS = 8


def quantize_blocks(
    kv: Tensor, block_ids: Tensor, num_last_tokens: int, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """`kv_quantization.quantize` of some of the cache's blocks.

    kv: [num_blocks, layers, 2, kv_heads, block_size, head_dim], contiguous.
    block_ids: int32 or int64 [n], contiguous.
    num_last_tokens: tokens in the last of these blocks.
    out: codes and parameters to write to; all but their first dimension contiguous.

    Returns out, or new tensors: codes int8 [n, layers, 2, kv_heads, block_size, head_dim] and
    parameters float16 [n, layers, 2, kv_heads, 2, head_dim].
    Grid: (layers * 2 * kv_heads, n).
    """
    num_blocks = len(block_ids)
    if out is None:
        shape = (num_blocks, *kv.shape[1:])
        codes = torch.empty(shape, dtype=torch.int8, device=kv.device)
        parameters = torch.empty((*shape[:4], 2, shape[5]), dtype=torch.float16, device=kv.device)
    else:
        codes, parameters = out
    if num_blocks:
        tiles = kv[0].numel() // (kv.shape[4] * kv.shape[5])
        _quantize_blocks[(tiles, num_blocks)](
            kv, block_ids, codes, parameters, kv.stride(0), codes.stride(0), parameters.stride(0),
            num_last_tokens, **_launch_parameters(kv),
        )  # fmt: skip
    return codes, parameters


def dequantize_blocks(codes: Tensor, parameters: Tensor, kv: Tensor, block_ids: Tensor) -> None:
    """Write blocks of the cache from the results of `quantize_blocks`, in place.

    codes, parameters: those of n blocks; all but their first dimension contiguous.
    block_ids: int32 or int64 [n], contiguous, without repetitions.
    Grid: (layers * 2 * kv_heads, n).
    """
    if len(block_ids):
        tiles = kv[0].numel() // (kv.shape[4] * kv.shape[5])
        _dequantize_blocks[(tiles, len(block_ids))](
            kv, block_ids, codes, parameters, kv.stride(0), codes.stride(0), parameters.stride(0),
            **_launch_parameters(kv), enable_fp_fusion=False,
        )  # fmt: skip


def _launch_parameters(kv: Tensor) -> dict[str, int]:
    block_size, head_dim = kv.shape[4:]
    dim_tile = next_power_of_2(head_dim)
    num_warps = min(max(block_size * dim_tile // _ELEMENTS_OF_A_WARP, 1), _MOST_WARPS)
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "DIM_TILE": dim_tile,
        "num_warps": num_warps,
    }


@triton.jit(do_not_specialize=["num_last_tokens"], do_not_specialize_on_alignment=["block_ids"])
def _quantize_blocks(
    kv, block_ids, codes, parameters, kv_stride, codes_stride, parameters_stride, num_last_tokens,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    tile, index = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    token = tl.arange(0, BLOCK_SIZE)[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    inside = dim < HEAD_DIM
    # Rows without a token repeat the first one, as in `kv_quantization`, and are not read.
    used = tl.where(index == tl.num_programs(1) - 1, num_last_tokens, BLOCK_SIZE)
    source = tl.where(token < used, token, 0)
    tile_start = kv + block * kv_stride + tile * (BLOCK_SIZE * HEAD_DIM)
    values = tl.load(tile_start + source * HEAD_DIM + dim, inside, other=0.0).to(tl.float32)
    low, high = tl.min(values, 0, keep_dims=True), tl.max(values, 0, keep_dims=True)
    scale = tl.maximum(tl.div_rn(high - low, _LEVELS), _LEAST_SCALE)
    scale = tl.minimum(scale, _LARGEST).to(tl.float16)
    minimum = tl.minimum(tl.maximum(low, -_LARGEST), _LARGEST).to(tl.float16)
    of_channels = parameters + index * parameters_stride + tile * (2 * HEAD_DIM) + dim
    tl.store(of_channels, scale, inside)
    tl.store(of_channels + HEAD_DIM, minimum, inside)
    steps = tl.div_rn(values - minimum.to(tl.float32), scale.to(tl.float32))
    steps = tl.minimum(tl.maximum(steps, 0.0), _LEVELS)
    # The sum has no fraction bits left: this rounds, with ties to even, as torch does.
    code = ((steps + _ROUNDING) - _ROUNDING + _LOWEST_CODE).to(tl.int8)
    code_tile = codes + index * codes_stride + tile * (BLOCK_SIZE * HEAD_DIM)
    tl.store(code_tile + token * HEAD_DIM + dim, code, inside)


@triton.jit(do_not_specialize_on_alignment=["block_ids"])
def _dequantize_blocks(
    kv, block_ids, codes, parameters, kv_stride, codes_stride, parameters_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    tile, index = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    block = tl.load(block_ids + index).to(tl.int64)
    dim = tl.arange(0, DIM_TILE)[None, :]
    offsets = tl.arange(0, BLOCK_SIZE)[:, None] * HEAD_DIM + dim
    inside = dim < HEAD_DIM
    of_channels = parameters + index * parameters_stride + tile * (2 * HEAD_DIM) + dim
    scale = tl.load(of_channels, inside).to(tl.float32)
    minimum = tl.load(of_channels + HEAD_DIM, inside).to(tl.float32)
    start = tile * (BLOCK_SIZE * HEAD_DIM)
    code = tl.load(codes + index * codes_stride + start + offsets, inside)
    values = (code.to(tl.float32) - _LOWEST_CODE) * scale + minimum
    tl.store(kv + block * kv_stride + start + offsets, values, inside)
