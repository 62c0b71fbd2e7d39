"""Writes of new keys and values to the paged cache, with or without rotary embedding.

For the cache see `ops`. Its offsets can exceed 2^31, so they are computed in 64 bits: slots are
int64, and so is everything computed from them. A cache in INT8 gets the codes and scales of
`int8_cache.quantize_tokens`, bit for bit, because divisions follow IEEE. (But rotated keys are not
rounded to the model's dtype before they are quantized.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.dependent_launch import (
    launch_dependents,
    launch_options,
    wait_for_earlier,
)
from fastserve_kernels.gpu.launch_parameters import cdiv, next_power_of_2
from fastserve_kernels.int8_cache import MOST, is_int8, token_width

# A warp moves so many elements at once: 16 bytes of a 16-bit type for each thread. Programs are
# small, because a decode step has few tokens to spread over the multiprocessors.
_ELEMENTS_OF_A_WARP = 32 * 8
_NUM_WARPS = 2
_MOST = tl.constexpr(float(MOST))
_ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Adding this to a number below 2^22 leaves no fraction bits: it rounds, with ties to even."""


def kv_write(kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """See `ops.kv_write`. Grid: (T, tiles of kv_heads)."""
    num_tokens, kv_heads, key_dim = key.shape
    value_dim = value.shape[2]
    heads_tile = _heads_of_a_tile(max(key_dim, value_dim))
    if num_tokens:
        _kv_write[(num_tokens, cdiv(kv_heads, heads_tile))](
            kv, layer, key, value, slots,
            kv.shape[1], kv_heads,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            BLOCK_SIZE=kv.shape[4], KEY_DIM=key_dim, VALUE_DIM=value_dim, ROW=token_width(kv),
            WIDTH=kv.shape[5], INT8=is_int8(kv), HEADS_TILE=heads_tile,
            KEY_TILE=next_power_of_2(key_dim), VALUE_TILE=next_power_of_2(value_dim),
            num_warps=_NUM_WARPS, **launch_options(kv.device),
        )  # fmt: skip


def rope_kv_write(
    query: Tensor, key: Tensor, value: Tensor, cos_sin: Tensor, kv: Tensor, layer: int,
    slots: Tensor,
) -> None:  # fmt: skip
    """Rotary position embedding of query, in place, and of key, together with the cache write.

    query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]; of the model's dtype. Only the
        last dimension must be contiguous.
    cos_sin: as in `ops.rotate`.
    slots: as in `ops.kv_write`. The query is rotated even if its slot is -1.

    The rotated key and the value go to the cache; `key` itself does not change.
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
            BLOCK_SIZE=kv.shape[4], HEAD_DIM=head_dim, WIDTH=kv.shape[5], INT8=is_int8(kv),
            ROTARY_DIM=rotary_dim,
            HEADS_TILE=heads_tile, DIM_TILE=next_power_of_2(head_dim), HALF_TILE=half_tile,
            REST_TILE=next_power_of_2(max(head_dim - rotary_dim, 1)),
            num_warps=_NUM_WARPS, **launch_options(kv.device),
        )  # fmt: skip


def _heads_of_a_tile(elements_of_a_head: int) -> int:
    return max(1, _NUM_WARPS * _ELEMENTS_OF_A_WARP // next_power_of_2(elements_of_a_head))


@triton.jit
def _cache_heads(
    kv, layer, slot, layers, kv_heads, head, BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Addresses of the keys of some heads in a slot's block. Values are kv_heads heads further.

    WIDTH: elements of the cache for one token of a head, with its scale. (ROW: without it.)
    """
    first_head = (slot // BLOCK_SIZE * layers + layer) * 2 * kv_heads
    return kv + (first_head + head) * (BLOCK_SIZE * WIDTH)


@triton.jit
def _largest(values):
    """The largest magnitude of each row, [rows, 1]; NaN if a value is infinite or NaN."""
    zero = tl.sum(values * 0.0, 1, keep_dims=True)
    return tl.max(tl.abs(values), 1, keep_dims=True) + zero


@triton.jit
def _larger(first, second):
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _codes(values, scale):
    is_usable = scale > 0
    steps = tl.div_rn(values, tl.where(is_usable, scale, 1.0))
    steps = tl.minimum(tl.maximum(steps, -_MOST), _MOST)
    return tl.where(is_usable, (steps + _ROUNDING) - _ROUNDING, 0.0).to(tl.int8)


@triton.jit
def _store_scale(heads, place, scale, is_head, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr):
    """heads, scale, is_head: [heads, 1]. place: the token's place in its block."""
    scales = (heads + BLOCK_SIZE * ROW).to(tl.pointer_type(tl.float32))
    tl.store(scales + place, scale, is_head)


@triton.jit
def store_tokens(
    heads, place, dim, values, inside, is_head,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Store one token for each of the heads."""
    if INT8:
        values = values.to(tl.float32)
        scale = tl.div_rn(_largest(values), _MOST)
        _store_scale(heads, place, scale, is_head, BLOCK_SIZE, ROW)
        values = _codes(values, scale)
    tl.store(heads + place * ROW + dim, values, inside)


@triton.jit(do_not_specialize=["layer"])
def _kv_write(
    kv, layer, key, value, slots, layers, kv_heads,
    key_token, key_head, value_token, value_head,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, INT8: tl.constexpr,
    HEADS_TILE: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS_TILE + tl.arange(0, HEADS_TILE)[:, None]
    key_dim, value_dim = tl.arange(0, KEY_TILE)[None, :], tl.arange(0, VALUE_TILE)[None, :]
    is_head = head < kv_heads
    is_key, is_value = is_head & (key_dim < KEY_DIM), is_head & (value_dim < VALUE_DIM)
    keys = tl.load(key + token * key_token + head * key_head + key_dim, is_key, other=0.0)
    values = tl.load(
        value + token * value_token + head * value_head + value_dim, is_value, other=0.0
    )
    heads = _cache_heads(kv, layer, slot, layers, kv_heads, head, BLOCK_SIZE, WIDTH)
    place = slot % BLOCK_SIZE
    store_tokens(heads, place, key_dim, keys, is_key, is_head, BLOCK_SIZE, ROW, INT8)
    heads += kv_heads * BLOCK_SIZE * WIDTH
    store_tokens(heads, place, value_dim, values, is_value, is_head, BLOCK_SIZE, ROW, INT8)


@triton.jit(do_not_specialize=["layer", "query_tiles"])
def _rope_kv_write(
    query, key, value, cos_sin, kv, layer, slots,
    layers, heads, kv_heads, query_tiles,
    query_token, query_head, key_token, key_head, value_token, value_head,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, INT8: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS_TILE: tl.constexpr, DIM_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    launch_dependents(PDL)
    # A thread has both elements of its pairs, so rotating in place needs no barrier.
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
    cached = _cache_heads(kv, layer, slot, layers, kv_heads, head, BLOCK_SIZE, WIDTH)
    place = slot % BLOCK_SIZE
    rows = key + token * key_token + head * key_head
    is_head = head < kv_heads
    inside = is_head & (pair < HALF)
    first, second = _rotated(rows + pair, inside, cosine, sine, HALF)
    rest_dim = ROTARY_DIM + tl.arange(0, REST_TILE)[None, :]
    inside_rest = is_head & (rest_dim < HEAD_DIM)
    if ROTARY_DIM < HEAD_DIM:
        rest = tl.load(rows + rest_dim, inside_rest, other=0.0)
    if INT8:
        largest = _larger(_largest(first), _largest(second))
        if ROTARY_DIM < HEAD_DIM:
            rest = rest.to(tl.float32)
            largest = _larger(largest, _largest(rest))
        scale = tl.div_rn(largest, _MOST)
        _store_scale(cached, place, scale, is_head, BLOCK_SIZE, HEAD_DIM)
        first, second = _codes(first, scale), _codes(second, scale)
        if ROTARY_DIM < HEAD_DIM:
            rest = _codes(rest, scale)
    keys = cached + place * HEAD_DIM
    tl.store(keys + pair, first, inside)
    tl.store(keys + HALF + pair, second, inside)
    if ROTARY_DIM < HEAD_DIM:
        tl.store(keys + rest_dim, rest, inside_rest)
    dim = tl.arange(0, DIM_TILE)[None, :]
    inside = is_head & (dim < HEAD_DIM)
    values = tl.load(value + token * value_token + head * value_head + dim, inside, other=0.0)
    cached += kv_heads * BLOCK_SIZE * WIDTH
    store_tokens(cached, place, dim, values, inside, is_head, BLOCK_SIZE, HEAD_DIM, INT8)


@triton.jit
def _rotated(rows, inside, cosine, sine, HALF: tl.constexpr):
    first = tl.load(rows, inside, other=0.0).to(tl.float32)
    second = tl.load(rows + HALF, inside, other=0.0).to(tl.float32)
    return first * cosine - second * sine, second * cosine + first * sine
