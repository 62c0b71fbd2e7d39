"""Writes of new keys and values to the paged cache, with or without rotary embedding.

Cache: one contiguous tensor [num_blocks, layers, 2, kv_heads, block_size, head_dim]; its offsets
pass 2^31, so they are computed in 64 bits. Slots are int64, so that all that is computed from them
is.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import cdiv, next_power_of_2

# Elements that a program moves at once: 16 bytes of a 16-bit type for each of its threads. Small
# programs, since a decode step has few tokens to spread over the multiprocessors.
_ELEMENTS_OF_A_WARP = 32 * 8
_NUM_WARPS = 2


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `ops.kv_write`. Grid: (T, tiles of kv_heads)."""
    num_tokens, kv_heads, head_dim = key.shape
    heads_tile = _heads_of_a_tile(head_dim)
    if num_tokens:
        _kv_write[(num_tokens, cdiv(kv_heads, heads_tile))](
            kv, layer, key, value, slots,
            kv.shape[1], kv_heads,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            BLOCK_SIZE=kv.shape[4], HEAD_DIM=head_dim,
            HEADS_TILE=heads_tile, DIM_TILE=next_power_of_2(head_dim),
            num_warps=_NUM_WARPS,
        )  # fmt: skip


def rope_kv_write(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, kv: Tensor, layer: int,
    slots: Tensor,
) -> None:  # fmt: skip
    """Rotary position embedding of query, in place, and of key, together with the cache write.

    query: [T, heads, head_dim], key, value: [T, kv_heads, head_dim], of the cache's dtype, only
    the last dimension need be contiguous. The rotated key and the value go to the cache; key keeps
    what it holds. cos_sin: as in `ops.rotate`. slots: as in `ops.kv_write`; query is rotated also
    where a slot is -1.
    Grid: (T, tiles of heads, then tiles of kv_heads).
    """
    num_tokens, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    rotary_dim = cos_sin.shape[1]
    half_tile = next_power_of_2(rotary_dim // 2)
    heads_tile = _heads_of_a_tile(head_dim // 2)  # a pair's two elements are in two tiles
    query_tiles = cdiv(heads, heads_tile)
    if num_tokens:
        _rope_kv_write[(num_tokens, query_tiles + cdiv(kv_heads, heads_tile))](
            query, key, value, cos_sin, kv, layer, slots,
            kv.shape[1], heads, kv_heads, query_tiles,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1),
            value.stride(0), value.stride(1),
            BLOCK_SIZE=kv.shape[4], HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
            HEADS_TILE=heads_tile, DIM_TILE=next_power_of_2(head_dim), HALF_TILE=half_tile,
            REST_TILE=next_power_of_2(max(head_dim - rotary_dim, 1)),
            num_warps=_NUM_WARPS,
        )  # fmt: skip


def _heads_of_a_tile(elements_of_a_head: int) -> int:
    return max(1, _NUM_WARPS * _ELEMENTS_OF_A_WARP // next_power_of_2(elements_of_a_head))


@triton.jit
def _cache_rows(
    kv, layer, slot, layers, kv_heads, head, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Addresses of the keys of some heads in a slot; the values lie kv_heads blocks further."""
    block = slot // BLOCK_SIZE
    first_head = (block * layers + layer) * 2 * kv_heads
    return kv + ((first_head + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM


@triton.jit(do_not_specialize=["layer"])
def _kv_write(
    kv, layer, key, value, slots, layers, kv_heads,
    key_token, key_head, value_token, value_head,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    dim = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < kv_heads) & (dim < HEAD_DIM)
    keys = tl.load(key + token * key_token + head * key_head + dim, inside)
    values = tl.load(value + token * value_token + head * value_head + dim, inside)
    rows = _cache_rows(kv, layer, slot, layers, kv_heads, head, BLOCK_SIZE, HEAD_DIM) + dim
    tl.store(rows, keys, inside)
    tl.store(rows + kv_heads * BLOCK_SIZE * HEAD_DIM, values, inside)


@triton.jit(do_not_specialize=["layer", "query_tiles"])
def _rope_kv_write(
    query, key, value, cos_sin, kv, layer, slots,
    layers, heads, kv_heads, query_tiles,
    query_token, query_head, key_token, key_head, value_token, value_head,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
):  # fmt: skip
    # A thread has both elements of its pairs: rotating in place needs no barrier.
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    pair = tl.arange(0, HALF_TILE)[None, :]
    cosine = tl.load(cos_sin + token * ROTARY_DIM + pair, pair < HALF)
    sine = tl.load(cos_sin + token * ROTARY_DIM + HALF + pair, pair < HALF)
    if tile < query_tiles:
        head = tile * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
        inside = (head < heads) & (pair < HALF)
        rows = query + token * query_token + head * query_head + pair
        first, second = _rotated(rows, inside, cosine, sine, HALF)
        tl.store(rows, first, inside)
        tl.store(rows + HALF, second, inside)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = (tile - query_tiles) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    cached = _cache_rows(kv, layer, slot, layers, kv_heads, head, BLOCK_SIZE, HEAD_DIM)
    rows = key + token * key_token + head * key_head
    inside = (head < kv_heads) & (pair < HALF)
    first, second = _rotated(rows + pair, inside, cosine, sine, HALF)
    tl.store(cached + pair, first, inside)
    tl.store(cached + HALF + pair, second, inside)
    if ROTARY_DIM < HEAD_DIM:
        rest = ROTARY_DIM + tl.arange(0, REST_TILE)[None, :]
        inside = (head < kv_heads) & (rest < HEAD_DIM)
        tl.store(cached + rest, tl.load(rows + rest, inside), inside)
    dim = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < kv_heads) & (dim < HEAD_DIM)
    values = tl.load(value + token * value_token + head * value_head + dim, inside)
    tl.store(cached + kv_heads * BLOCK_SIZE * HEAD_DIM + dim, values, inside)


@triton.jit
def _rotated(rows, inside, cosine, sine, HALF: tl.constexpr):
    first = tl.load(rows, inside).to(tl.float32)
    second = tl.load(rows + HALF, inside).to(tl.float32)
    return first * cosine - second * sine, second * cosine + first * sine
