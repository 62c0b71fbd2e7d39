"""Cases of the row-wise, cache and INT8 kernels: inputs, calls and expected results.

They run on a CPU's implementations, on the GPU's in Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import kernel_reference as reference
import torch
from fastserve_kernels import kv_quantization, ops
from fastserve_kernels.gpu import activations, kv_int8, pinned_copies
from fastserve_kernels.int8_cache import MOST, codes_and_scales
from kernel_cases import DTYPES, LIMITS, NAN, Case, Comparison, in_int8, near
from torch import Tensor

LAYER = 1

# Tokens, KV heads, dimension of keys, of values
KV_WRITE = [
    (1, 12, 64, 64), (17, 5, 80, 80), (5, 40, 128, 128), (3, 1, 256, 256), (40, 3, 96, 96),
    (90, 3, 80, 80), (0, 2, 64, 64), (5, 3, 192, 128), (17, 2, 64, 80),
]  # fmt: skip
# Tokens, heads, KV heads, head dimension, rotated of it
ROPE_KV_WRITE = [
    (5, 32, 8, 128, 128), (1, 4, 4, 64, 16), (18, 9, 3, 64, 64), (4, 5, 5, 80, 32),
    (40, 8, 1, 96, 24), (2, 2, 2, 256, 64), (4, 2, 2, 40, 10), (2, 3, 1, 16, 2), (0, 2, 2, 64, 64),
]  # fmt: skip
# Rows, and their elements
NORMS = [
    (1, 768), (3, 16), (5, 100), (70, 1024), (2, 576), (2, 5120), (2, 16384), (0, 64)
]  # fmt: skip
# Tokens, heads, head dimension
HEAD_NORMS = [(1, 14, 64), (5, 3, 80), (70, 8, 128), (3, 1, 256), (4, 5, 40), (0, 2, 64)]
# Rows of a table, and their elements
TABLES = [(1, 64), (40, 128), (7, 3), (301, 100)]
ACTIVATIONS = [(1, 3072), (3, 7), (17, 1024), (40, 1536), (2, 2500), (0, 8)]
# Blocks, KV heads, block size, head dimension, tokens of the last block
KV_INT8 = [
    (3, 2, 16, 64, 1), (2, 1, 16, 80, 15), (1, 2, 16, 128, 16), (2, 1, 32, 96, 7),
    (1, 1, 64, 256, 40), (0, 2, 16, 64, 16),
]  # fmt: skip


def cases() -> Iterator[Case]:
    yield from cases_of_ops()
    yield from _cases_of_a_gpu()


def cases_of_ops() -> Iterator[Case]:
    """Cases that a CPU has, too, for any implementation that `ops` chooses."""
    for dtype in DTYPES:
        for shape in KV_WRITE:
            yield Case("kv_write", (dtype, *shape), _kv_write)
            yield Case("kv_write", (dtype, *shape), _int8_kv_write, "int8 cache")
        for rotation in ROPE_KV_WRITE:
            yield Case("rope_kv_write", (dtype, *rotation), _rope_kv_write)
            yield Case("rope_kv_write", (dtype, *rotation), _int8_rope_kv_write, "int8 cache")
        for rows in NORMS:
            for affine in ("both", "weight", "bias", "none") if rows[1] < 1000 else ("both",):
                yield Case("add_layer_norm", (dtype, *rows, affine), _add_layer_norm)
            yield Case("add_rms_norm", (dtype, *rows), _add_rms_norm)
        for rows in ACTIVATIONS:
            yield Case("silu_mul", (dtype, *rows), _silu_mul)
            yield Case("gelu_tanh_mul", (dtype, *rows), _gelu_tanh_mul)
            for activation in reference.ACTIVATIONS:
                yield Case("activate", (dtype, *rows, activation), _activate)
                yield Case("activate_mul", (dtype, *rows, activation), _activate_mul)
            yield Case("add", (dtype, *rows), _add)
            yield Case("in place", (dtype, *rows), _in_place)
        for table in TABLES:
            yield Case("lookup_rows", (dtype, *table), _lookup_rows)
            yield Case("lookup_part", (dtype, *table), _lookup_part)
        for heads in HEAD_NORMS:
            yield Case("rms_norm_heads", (dtype, *heads), _rms_norm_heads)
    yield Case("add_layer_norm", (), _norm_of_constant_rows, "constant rows")
    yield Case("silu_mul", (), _silu_mul_of_extremes, "extremes")
    yield Case("gelu_tanh_mul", (), _gelu_tanh_mul_of_extremes, "extremes")


def _cases_of_a_gpu() -> Iterator[Case]:
    for dtype in DTYPES:
        for rows in ACTIVATIONS:
            for has_bias in (True, False):
                yield Case("bias_relu", (dtype, *rows, has_bias), _bias_relu)
        for blocks in KV_INT8:
            yield Case("kv_int8", (dtype, *blocks), _kv_int8)
    for dtype in (torch.int32, torch.int64, torch.float32):
        for size in (0, 1, 1023, 1025, 50_000):
            yield Case("pinned_copy", (dtype, size), _pinned_copy)


def _rounding_limit(dtype: torch.dtype, device: torch.device) -> float:
    """Limit for results that differ from the expectation by rounding alone."""
    # Triton's interpreter truncates to bfloat16, all others round.
    is_interpreted = device.type == "cpu" and ops.uses_triton(device)
    return LIMITS[dtype] if is_interpreted and dtype == torch.bfloat16 else 0.0


def _strided(
    rows: int, size: int, dtype: torch.dtype, device: torch.device, gap: int = 16
) -> Tensor:
    """Random rows with a gap between them, as parts of a wider matrix have; NaN in the gap."""
    wide = torch.full((rows, size + gap), NAN, dtype=dtype)
    wide[:, :size] = torch.randn(rows, size)
    return wide.to(device)[:, :size]


def _moved(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _slots(tokens: int, kv: Tensor) -> Tensor:
    """Shuffled slots. Every third token has none, like padding, unless there is only one token."""
    slots = torch.randperm(len(kv) * kv.shape[4])[:tokens]
    if tokens > 1:
        slots[::3] = -1
    return slots


def _cache(tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A cache of 3 layers and blocks of 16 slots, larger than needed. It holds NaN, so that wrong
    reads and writes show."""
    return torch.full((5 + tokens // 16, 3, 2, kv_heads, 16, head_dim), NAN, dtype=dtype)


def _kv_write(
    dtype: torch.dtype, tokens: int, kv_heads: int, key_dim: int, value_dim: int,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    kv = _cache(tokens, kv_heads, max(key_dim, value_dim), dtype)
    # Views of one fused projection, as the model makes them.
    sizes = [2 * key_dim, kv_heads * key_dim, kv_heads * value_dim]
    fused = torch.randn(tokens, sum(sizes)).to(dtype)
    _, *parts = fused.split(sizes, dim=1)
    key, value = (part.unflatten(1, (kv_heads, -1)) for part in parts)
    slots = _slots(tokens, kv)
    expected = reference.kv_write(kv, LAYER, key, value, slots)
    written = kv.to(device)
    _, *parts = fused.to(device).split(sizes, dim=1)
    key, value = (part.unflatten(1, (kv_heads, -1)) for part in parts)
    ops.kv_write(written, LAYER, key, value, slots.to(device))
    yield Comparison("cache", written.cpu(), expected)


def _rope_kv_write(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    kv = _cache(tokens, kv_heads, head_dim, dtype)
    parts = [heads, kv_heads, kv_heads]
    fused = torch.randn(tokens, sum(parts), head_dim).to(dtype)
    query_before, key_before, value_before = fused.split(parts, dim=1)
    angles = torch.randn(tokens, rotary_dim // 2) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = _slots(tokens, kv)
    rotated_query, rotated_key, expected = reference.rope_kv_write(
        query_before, key_before, value_before, cos_sin, kv, LAYER, slots
    )
    qkv, written = fused.to(device, copy=True), kv.to(device)
    ops.rope_kv_write(qkv, heads, cos_sin.to(device), written, LAYER, slots.to(device))
    query, key, value = qkv.cpu().split(parts, dim=1)
    yield near("query", query, rotated_query, dtype)
    rest = slice(rotary_dim, None)
    yield Comparison("rest of the query", query[..., rest], query_before[..., rest])
    if ops.uses_triton(device):
        yield Comparison("key", key, key_before)
    yield Comparison("value", value, value_before)
    # Rotated keys are near the expectation; everything else in the cache is equal.
    cached = written.cpu()
    with_slot = slots >= 0
    blocks, offsets = slots[with_slot] // 16, slots[with_slot] % 16
    keys = cached[blocks, LAYER, 0, :, offsets]
    yield near("cached keys", keys, rotated_key[with_slot], dtype)
    yield Comparison("rest of them", keys[..., rest], key_before[with_slot][..., rest])
    expected[blocks, LAYER, 0, :, offsets] = keys
    yield Comparison("cache", cached, expected)


def _int8_kv_write(
    dtype: torch.dtype, tokens: int, kv_heads: int, key_dim: int, value_dim: int,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    kv = _int8_cache(tokens, kv_heads, max(key_dim, value_dim))
    key = torch.randn(tokens, kv_heads, key_dim).to(dtype)
    value = torch.randn(tokens, kv_heads, value_dim).to(dtype)
    # A head of zeros, a NaN, and a value whose scale float32 does not hold exactly.
    key[:1, 0] = 0
    value[1:2, 0, 3], value[2:3, 0] = NAN, 1e-44
    slots = _slots(tokens, kv)
    expected = reference.kv_write(kv, LAYER, key, value, slots)
    written = kv.to(device)
    ops.kv_write(written, LAYER, key.to(device), value.to(device), slots.to(device))
    for what, actual, part in zip(
        ("codes", "scales"),
        codes_and_scales(written.cpu()),
        codes_and_scales(expected),
        strict=True,
    ):
        yield Comparison(what, actual, part)


def _int8_rope_kv_write(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    kv = _int8_cache(tokens, kv_heads, head_dim)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    key, value = qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    angles = torch.randn(tokens, rotary_dim // 2) * 100
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    slots = _slots(tokens, kv)
    rotated = reference.rotate(key, cos_sin)
    expected = reference.kv_write(kv, LAYER, rotated.to(dtype), value, slots)
    written = kv.to(device)
    ops.rope_kv_write(qkv.to(device), heads, cos_sin.to(device), written, LAYER, slots.to(device))
    cached = written.cpu()
    with_slot = slots >= 0
    blocks, offsets = slots[with_slot] // 16, slots[with_slot] % 16
    keys = reference.widened(cached)[blocks, LAYER, 0, :, offsets]
    limit = LIMITS[dtype] + 0.5 / MOST  # half a step of the codes
    yield Comparison("cached keys", keys, rotated[with_slot], limit)
    # Everything except the keys is equal.
    for actual, part in zip(codes_and_scales(cached), codes_and_scales(expected), strict=True):
        part[blocks, LAYER, 0, :, offsets] = actual[blocks, LAYER, 0, :, offsets]
        yield Comparison("cache", actual, part)


def _int8_cache(tokens: int, kv_heads: int, head_dim: int) -> Tensor:
    """Like `_cache`, in INT8."""
    return in_int8(_cache(tokens, kv_heads, head_dim, torch.float32))


def _add_layer_norm(
    dtype: torch.dtype, rows: int, size: int, affine: str, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, size, dtype, device)
    x += 3  # far from zero: the variance must not cancel
    residual = _strided(rows, size, dtype, device, gap=48)
    weight = torch.randn(size).to(dtype) if affine in ("both", "weight") else None
    bias = torch.randn(size).to(dtype) if affine in ("both", "bias") else None
    results = ops.add_layer_norm(x, residual, _moved(weight, device), _moved(bias, device), 1e-5)
    total, normed = (result.cpu() for result in results)
    yield Comparison("sum", total, x.cpu() + residual.cpu(), _rounding_limit(dtype, device))
    _, expected = reference.add_layer_norm(total, torch.zeros_like(total), weight, bias, 1e-5)
    yield near("normed", normed, expected, dtype)


def _norm_of_constant_rows(device: torch.device) -> Iterator[Comparison]:
    """Constant rows normalise to the bias."""
    x = torch.full((2, 100), 5.0, device=device)
    # A parameter: a kernel that may start early must not depend on the kernel before it for it.
    bias = torch.full((100,), 0.5).to(device)
    _, normed = ops.add_layer_norm(x, x, None, bias, 1e-5)
    yield near("normed", normed.cpu(), torch.full((2, 100), 0.5), torch.float32)


def _add_rms_norm(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, size, dtype, device)
    residual = _strided(rows, size, dtype, device, gap=48)
    weight = torch.randn(size).to(dtype)
    for shift in (0.0, 1.0):
        results = ops.add_rms_norm(x, residual, weight.to(device), 1e-5, shift)
        total, normed = (result.cpu() for result in results)
        yield Comparison("sum", total, x.cpu() + residual.cpu(), _rounding_limit(dtype, device))
        _, expected = reference.add_rms_norm(total, torch.zeros_like(total), weight, 1e-5, shift)
        yield near("normed", normed, expected, dtype)


def _rms_norm_heads(
    dtype: torch.dtype, tokens: int, heads: int, head_dim: int, device: torch.device
) -> Iterator[Comparison]:
    """The heads are a part of a fused projection; the others stay."""
    fused = torch.randn(tokens, heads + 2, head_dim).to(dtype)
    weight = torch.randn(head_dim).to(dtype)
    for shift in (0.0, 1.0):
        normed = fused.to(device, copy=True)
        ops.rms_norm_heads(normed[:, 1:-1], weight.to(device), 1e-5, shift)
        result = normed.cpu()
        expected = reference.rms_norm_heads(fused[:, 1:-1], weight, 1e-5, shift)
        yield near("normed", result[:, 1:-1], expected, dtype)
        yield Comparison("other heads", result[:, [0, -1]], fused[:, [0, -1]])


def _silu_mul(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, 2 * size, dtype, device)
    x *= 4  # as far as where the curve is nearly straight
    expected = reference.silu_mul(x.cpu())
    yield near("result", ops.silu_mul(x).cpu(), expected, dtype)


def _silu_mul_of_extremes(device: torch.device) -> Iterator[Comparison]:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    out = ops.silu_mul(torch.cat([gate, torch.ones(1, 6)], dim=1).to(device)).cpu()
    # Compared separately, as errors are relative to the largest value.
    yield near("up to 200", out[:, :5], gate[:, :5].relu(), torch.float32)
    yield near("1e30", out[:, 5:], gate[:, 5:], torch.float32)


def _gelu_tanh_mul(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, 2 * size, dtype, device)
    expected = reference.gelu_tanh_mul(x.cpu())
    yield near("result", ops.gelu_tanh_mul(x).cpu(), expected, dtype)


def _gelu_tanh_mul_of_extremes(device: torch.device) -> Iterator[Comparison]:
    gate = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    out = ops.gelu_tanh_mul(torch.cat([gate, torch.ones(1, 6)], dim=1).to(device)).cpu()
    yield near("up to 200", out[:, :5], gate[:, :5].relu(), torch.float32)
    yield near("1e30", out[:, 5:], gate[:, 5:], torch.float32)


def _activate(
    dtype: torch.dtype, rows: int, size: int, activation: ops.Activation, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, size, dtype, device)
    x *= 4
    expected = reference.activate(x.cpu(), activation)
    yield near("result", ops.activate(x, activation).cpu(), expected, dtype)


def _activate_mul(
    dtype: torch.dtype, rows: int, size: int, activation: ops.Activation, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, 2 * size, dtype, device)
    gate, up = x.cpu().double().chunk(2, dim=-1)
    expected = reference.activate(gate, activation) * up
    yield near("result", ops.activate_mul(x, activation).cpu(), expected, dtype)


def _add(dtype: torch.dtype, rows: int, size: int, device: torch.device) -> Iterator[Comparison]:
    x, y = _strided(rows, size, dtype, device), _strided(rows, size, dtype, device, gap=8)
    yield near("sum", ops.add(x, y).cpu(), x.cpu().double() + y.cpu().double(), dtype)
    columns = torch.randint(size, (2 * size,)) if size else torch.zeros(0, dtype=torch.int64)
    taken = ops.take_columns(x, columns.to(device)).cpu()
    yield Comparison("columns", taken, x.cpu()[:, columns])
    yield Comparison("zeros", ops.zeros_like(x).cpu(), torch.zeros(rows, size))


def _in_place(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    """What is beside the rows stays."""
    factors = torch.rand(rows, 1)
    gates = torch.randn(rows, 3).to(dtype)[:, 1:2]
    changes: list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        ("scale_", lambda x: ops.scale_(x, 0.22), lambda x: x * 0.22),
        ("scale_rows_", lambda x: ops.scale_rows_(x, factors.to(device)), lambda x: x * factors),
        (
            "scale_by_sigmoid_",
            lambda x: ops.scale_by_sigmoid_(x, gates.to(device)),
            lambda x: x * gates.double().sigmoid(),
        ),
        ("clamp_", lambda x: ops.clamp_(x, 0.75), lambda x: x.clamp(-0.75, 0.75)),
        ("soft_cap_", lambda x: ops.soft_cap_(x, 1.5), lambda x: (x / 1.5).tanh() * 1.5),
    ]
    for what, change, expected in changes:
        wide = torch.randn(rows, size + 5).to(dtype)
        changed = wide.to(device, copy=True)
        inner = changed[:, 2 : size + 2]
        assert change(inner) is inner
        found = changed.cpu()
        yield near(what, found[:, 2 : size + 2], expected(wide[:, 2 : size + 2].double()), dtype)
        yield Comparison("left of it", found[:, :2], wide[:, :2])
        yield Comparison("right of it", found[:, size + 2 :], wide[:, size + 2 :])


def _lookup_rows(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    table = torch.randn(rows, size).to(dtype)
    ids = torch.randint(-rows, rows, (33,))
    found = ops.lookup_rows(table.to(device), ids.to(device)).cpu()
    yield Comparison("rows", found, torch.stack([table[one] for one in ids.tolist()]))


def _lookup_part(
    dtype: torch.dtype, rows: int, size: int, device: torch.device
) -> Iterator[Comparison]:
    table = torch.randn(3 * rows, size).to(dtype)
    ids = torch.arange(3 * rows)
    found = ops.lookup_part(table[rows : 2 * rows].to(device), ids.to(device), rows).cpu()
    is_here = (ids >= rows) & (ids < 2 * rows)
    yield Comparison("rows", found, torch.where(is_here[:, None], table, 0))


def _bias_relu(
    dtype: torch.dtype, rows: int, size: int, has_bias: bool, device: torch.device
) -> Iterator[Comparison]:
    x = _strided(rows, size, dtype, device)
    bias = torch.randn(size).to(dtype) if has_bias else None
    expected = reference.bias_relu(x.cpu(), bias)
    whole = x.as_strided((rows, x.stride(0)), (x.stride(0), 1))
    activations.bias_relu(x, _moved(bias, device))
    yield near("result", x.cpu(), expected, dtype)
    gap = whole[:, size:].cpu()
    yield Comparison("between the rows", gap, torch.full_like(gap, NAN))


def _kv_int8(
    dtype: torch.dtype, count: int, kv_heads: int, block_size: int, head_dim: int,
    num_last_tokens: int, device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    # Channels have many means and spreads, as those of keys.
    spread = torch.rand(6, 2, 2, kv_heads, 1, head_dim) * 4
    mean = torch.randn(6, 2, 2, kv_heads, 1, head_dim) * 5
    kv = torch.randn(6, 2, 2, kv_heads, block_size, head_dim) * spread + mean
    kv = kv.to(dtype)
    block_ids = torch.randperm(6)[:count]
    for last in block_ids[-1:]:
        kv[last, ..., num_last_tokens:, :] = NAN
    cache = kv.to(device)
    codes, parameters = kv_int8.quantize_blocks(
        cache, block_ids.to(torch.int32).to(device), num_last_tokens
    )
    expected_codes, expected_parameters = kv_quantization.quantize(kv[block_ids], num_last_tokens)
    yield Comparison("parameters", parameters.cpu(), expected_parameters)
    yield Comparison("codes", codes.cpu(), expected_codes)

    targets = torch.randperm(6)[:count]
    kv_int8.dequantize_blocks(codes, parameters, cache, targets.to(device))
    kv[targets] = kv_quantization.dequantize(expected_codes, expected_parameters, dtype)
    yield Comparison("cache", cache.cpu(), kv, _rounding_limit(dtype, device))


def _pinned_copy(dtype: torch.dtype, size: int, device: torch.device) -> Iterator[Comparison]:
    values = torch.randint(-(2**20), 2**20, (size,)).to(dtype)
    there, back = torch.full((2, size + 64), 7, dtype=dtype)
    there = there.to(device)
    if device.type == "cuda":
        values, back = values.pin_memory(), back.pin_memory()
    pinned_copies.copy_words(values, there[:size])
    pinned_copies.copy_words(there[:size], back[:size])
    rest = torch.full((64,), 7, dtype=dtype)
    yield Comparison("there", there.cpu(), torch.cat([values, rest]))
    yield Comparison("back", back, torch.cat([values, rest]))
