"""Cases of the row-wise, cache and INT8 kernels: inputs, the launcher, what must come out.

For tests without a GPU, where the launchers run in Triton's interpreter, and for the check on one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from fastserve_kernels import kv_quantization, reference
from fastserve_kernels.gpu import activations, cache_writes, kv_int8, norms, pinned_copies
from torch import Tensor

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
"""Largest error, relative to the largest value expected."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAN = float("nan")


@dataclass(frozen=True)
class Comparison:
    """A result and its expectation, both on the CPU."""

    what: str
    actual: Tensor
    expected: Tensor
    limit: float = 0.0
    """Of `error`; 0: the same values."""

    @property
    def error(self) -> float:
        """The largest error, relative to the largest value expected; infinite for another shape, or
        where only one of both has a NaN."""
        if self.actual.shape != self.expected.shape:
            return float("inf")
        actual, expected = self.actual.double(), self.expected.double()
        if not torch.equal(actual.isnan(), expected.isnan()):
            return float("inf")
        actual, expected = actual.nan_to_num(0.0), expected.nan_to_num(0.0)
        error = (actual - expected).abs().amax() if actual.numel() else torch.zeros(())
        return float(error / expected.abs().amax()) if error else 0.0


@dataclass(frozen=True)
class Case:
    operation: str
    name: str
    compare: Callable[[torch.device], Iterator[Comparison]]
    """Runs the kernel on a device."""

    def __str__(self) -> str:
        return f"{self.operation}-{self.name}"

    def run(self, device: torch.device) -> Iterator[Comparison]:
        """Of the same inputs on every device."""
        torch.manual_seed(zlib.crc32(str(self).encode()))
        return self.compare(device)


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield from _kv_write_cases(dtype)
        yield from _rope_cases(dtype)
        yield from _norm_cases(dtype)
        yield from _activation_cases(dtype)
        yield from _int8_cases(dtype)
    yield from _pinned_copy_cases()


def _name(*parts: object) -> str:
    return "-".join(str(part).removeprefix("torch.") for part in parts)


def _rounding_limit(dtype: torch.dtype, device: torch.device) -> float:
    """Of results that differ from what is expected only if they are rounded otherwise."""
    # Triton's interpreter cuts off what bfloat16 does not hold, a GPU rounds it.
    return LIMITS[dtype] if device.type == "cpu" and dtype == torch.bfloat16 else 0.0


def _strided(rows: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random rows with a gap between them, as parts of a wider matrix have; NaN in the gap."""
    wide = torch.full((rows, size + 16), NAN, dtype=dtype)
    wide[:, :size] = torch.randn(rows, size)
    return wide.to(device)[:, :size]


def _qkv(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one fused projection, as the model makes them."""
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype).to(device)
    return (
        fused[:, :heads],
        fused[:, heads : heads + kv_heads],
        fused[:, heads + kv_heads :],
    )


def _slots(tokens: int, num_slots: int) -> Tensor:
    """Shuffled; every third token has none, as padded rows."""
    slots = torch.randperm(num_slots)[:tokens]
    slots[::3] = -1
    return slots


def _cache(num_blocks: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Of 3 layers and blocks of 16; NaN, so that a write to a wrong place shows, as a read does."""
    return torch.full((num_blocks, 3, 2, kv_heads, 16, head_dim), NAN, dtype=dtype)


def _kv_write_cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, kv_heads, head_dim in [
        (1, 12, 64), (17, 5, 80), (5, 40, 128), (3, 1, 256), (40, 3, 96), (0, 2, 64)
    ]:  # fmt: skip

        def compare(
            device: torch.device, tokens: int = tokens, heads: int = kv_heads, dim: int = head_dim
        ) -> Iterator[Comparison]:
            kv = _cache(5, heads, dim, dtype)
            _, key, value = _qkv(tokens, 1, heads, dim, dtype, device)
            slots = _slots(tokens, 5 * 16) if tokens > 1 else torch.full((tokens,), 37)
            expected = reference.kv_write(kv, 2, key.cpu(), value.cpu(), slots)
            written = kv.to(device)
            cache_writes.kv_write(written, 2, key, value, slots.to(device))
            yield Comparison("cache", written.cpu(), expected)

        yield Case("kv_write", _name(dtype, tokens, kv_heads, head_dim), compare)


def _rope_cases(dtype: torch.dtype) -> Iterator[Case]:
    for tokens, heads, kv_heads, head_dim, rotary_dim in [
        (5, 32, 8, 128, 128), (1, 4, 4, 64, 16), (18, 9, 3, 64, 64), (4, 5, 5, 80, 32),
        (3, 3, 1, 96, 24), (2, 2, 2, 256, 64), (0, 2, 2, 64, 64),
    ]:  # fmt: skip

        def compare(
            device: torch.device, tokens: int = tokens, heads: int = heads,
            kv_heads: int = kv_heads, head_dim: int = head_dim, rotary_dim: int = rotary_dim,
        ) -> Iterator[Comparison]:  # fmt: skip
            kv = _cache(5, kv_heads, head_dim, dtype)
            query, key, value = _qkv(tokens, heads, kv_heads, head_dim, dtype, device)
            angles = torch.randn(tokens, rotary_dim // 2) * 100
            cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
            slots = _slots(tokens, 5 * 16) if tokens > 1 else torch.full((tokens,), 37)
            expected_query, rotated_key, expected = reference.rope_kv_write(
                query.cpu(), key.cpu(), value.cpu(), cos_sin, kv, 1, slots
            )
            key_before, value_before = key.cpu(), value.cpu()
            written = kv.to(device)
            cache_writes.rope_kv_write(
                query, key, value, cos_sin.to(device), written, 1, slots.to(device)
            )
            yield Comparison("query", query.cpu(), expected_query, LIMITS[dtype])
            yield Comparison("key", key.cpu(), key_before)
            yield Comparison("value", value.cpu(), value_before)
            # Rotated keys are near, everything else in the cache is the same.
            cached = written.cpu()
            blocks, offsets = slots.clamp(min=0) // 16, slots.clamp(min=0) % 16
            with_slot = slots >= 0
            keys = cached[blocks, 1, 0, :, offsets]
            yield Comparison("cached keys", keys[with_slot], rotated_key[with_slot], LIMITS[dtype])
            rest = expected.clone()
            rest[blocks[with_slot], 1, 0, :, offsets[with_slot]] = keys[with_slot]
            yield Comparison("cache", cached, rest)

        yield Case(
            "rope_kv_write", _name(dtype, tokens, heads, kv_heads, head_dim, rotary_dim), compare
        )


def _norm_cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, size in [(1, 768), (3, 16), (5, 100), (33, 1024), (2, 5120), (2, 16384), (0, 64)]:
        for affine in ("both", "weight", "bias", "none") if size == 100 else ("both",):

            def layer_norm(
                device: torch.device, rows: int = rows, size: int = size, affine: str = affine
            ) -> Iterator[Comparison]:
                x = _strided(rows, size, dtype, device)
                x += 3  # far from zero: the variance must not cancel
                residual = _strided(rows, size, dtype, device)
                weight = torch.randn(size).to(dtype) if affine in ("both", "weight") else None
                bias = torch.randn(size).to(dtype) if affine in ("both", "bias") else None
                results = norms.add_layer_norm(
                    x, residual,
                    None if weight is None else weight.to(device),
                    None if bias is None else bias.to(device),
                    1e-5,
                )  # fmt: skip
                total, normed = (result.cpu() for result in results)
                rounding_limit = _rounding_limit(dtype, device)
                yield Comparison("sum", total, x.cpu() + residual.cpu(), rounding_limit)
                nothing = torch.zeros_like(total)
                _, expected = reference.add_layer_norm(total, nothing, weight, bias, 1e-5)
                yield Comparison("normed", normed, expected, LIMITS[dtype])

            yield Case("add_layer_norm", _name(dtype, rows, size, affine), layer_norm)

        def rms_norm(
            device: torch.device, rows: int = rows, size: int = size
        ) -> Iterator[Comparison]:
            x, residual = _strided(rows, size, dtype, device), _strided(rows, size, dtype, device)
            weight = torch.randn(size).to(dtype)
            results = norms.add_rms_norm(x, residual, weight.to(device), 1e-5)
            total, normed = (result.cpu() for result in results)
            rounding_limit = _rounding_limit(dtype, device)
            yield Comparison("sum", total, x.cpu() + residual.cpu(), rounding_limit)
            _, expected = reference.add_rms_norm(total, torch.zeros_like(total), weight, 1e-5)
            yield Comparison("normed", normed, expected, LIMITS[dtype])

        yield Case("add_rms_norm", _name(dtype, rows, size), rms_norm)


def _activation_cases(dtype: torch.dtype) -> Iterator[Case]:
    for rows, size in [(1, 3072), (3, 7), (17, 1024), (2, 2500), (0, 8)]:
        for has_bias in (True, False):

            def bias_relu(
                device: torch.device, rows: int = rows, size: int = size, has_bias: bool = has_bias
            ) -> Iterator[Comparison]:
                x = _strided(rows, size, dtype, device)
                bias = torch.randn(size).to(dtype) if has_bias else None
                expected = reference.bias_relu(x.cpu(), bias)
                whole = x.as_strided((rows, x.stride(0)), (x.stride(0), 1))
                activations.bias_relu(x, None if bias is None else bias.to(device))
                yield Comparison("result", x.cpu(), expected, LIMITS[dtype])
                gap = whole[:, size:].cpu()
                yield Comparison("between the rows", gap, torch.full_like(gap, NAN))

            yield Case("bias_relu", _name(dtype, rows, size, has_bias), bias_relu)

        def silu_mul(
            device: torch.device, rows: int = rows, size: int = size
        ) -> Iterator[Comparison]:
            x = _strided(rows, 2 * size, dtype, device)
            expected = reference.silu_mul(x.cpu())
            yield Comparison("result", activations.silu_mul(x).cpu(), expected, LIMITS[dtype])

        yield Case("silu_mul", _name(dtype, rows, size), silu_mul)


def _int8_cases(dtype: torch.dtype) -> Iterator[Case]:
    for count, kv_heads, block_size, head_dim, num_last_tokens in [
        (3, 2, 16, 64, 1), (2, 1, 16, 80, 15), (1, 2, 16, 128, 16), (2, 1, 32, 96, 7),
        (1, 1, 64, 256, 40), (0, 2, 16, 64, 16),
    ]:  # fmt: skip

        def compare(
            device: torch.device, count: int = count, kv_heads: int = kv_heads,
            block_size: int = block_size, dim: int = head_dim, used: int = num_last_tokens,
        ) -> Iterator[Comparison]:  # fmt: skip
            # Channels of many means and spreads, as keys have.
            spread = torch.rand(6, 2, 2, kv_heads, 1, dim) * 4
            mean = torch.randn(6, 2, 2, kv_heads, 1, dim) * 5
            kv = torch.randn(6, 2, 2, kv_heads, block_size, dim) * spread + mean
            kv = kv.to(dtype)
            block_ids = torch.randperm(6)[:count]
            for last in block_ids[-1:]:
                kv[last, ..., used:, :] = NAN
            cache = kv.to(device)
            codes, parameters = kv_int8.quantize_blocks(
                cache, block_ids.to(torch.int32).to(device), used
            )
            expected_codes, expected_parameters = kv_quantization.quantize(kv[block_ids], used)
            yield Comparison("parameters", parameters.cpu(), expected_parameters)
            yield Comparison("codes", codes.cpu(), expected_codes)

            targets = torch.randperm(6)[:count]
            kv_int8.dequantize_blocks(codes, parameters, cache, targets.to(device))
            kv[targets] = kv_quantization.dequantize(expected_codes, expected_parameters, dtype)
            yield Comparison("cache", cache.cpu(), kv, _rounding_limit(dtype, device))

        name = _name(dtype, count, kv_heads, block_size, head_dim, num_last_tokens)
        yield Case("kv_int8", name, compare)


def _pinned_copy_cases() -> Iterator[Case]:
    for dtype in (torch.int32, torch.int64, torch.float32):
        for size in (0, 1, 1023, 1025, 50_000):

            def compare(
                device: torch.device, dtype: torch.dtype = dtype, size: int = size
            ) -> Iterator[Comparison]:
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

            yield Case("pinned_copy", _name(dtype, size), compare)
