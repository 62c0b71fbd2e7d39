"""PTX's types in numpy, floats of 16 bits, and results that hardware only approximates."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

TYPES: dict[str, type[np.generic]] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8,
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "f16": np.float16, "bf16": np.uint16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "f16x2": np.uint32, "bf16x2": np.uint32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "pred": np.bool_,
}  # fmt: skip
SIZES = {name: np.dtype(one).itemsize for name, one in TYPES.items()}
"""Bytes."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By bytes."""
SMALLEST_NORMAL = np.float32(2.0**-126)
CANONICAL_NAN = np.array(0x7FFFFFFF, np.uint32).view(np.float32)[()]


def decoded(bits: Array, type_name: str) -> Array:
    """float32 of uint16 bits of f16 or bf16."""
    if type_name == "f16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encoded(values: Array, type_name: str) -> Array:
    """uint16 bits of f16 or bf16, rounded to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type_name == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def halves(words: Array, type_name: str) -> Array:
    """float32 [..., 2] of uint32 words of two f16 or bf16, the lower half first."""
    return decoded(np.ascontiguousarray(words)[..., None].view(np.uint16), type_name)


def approximate(exact: Array, ulps: float) -> Array:
    """float32 values near the exact results. As in hardware, the error is arbitrary up to a limit,
    but the same for equal results."""
    values = np.ascontiguousarray(exact, dtype=np.float32)
    spread = (values.view(np.uint32) * np.uint32(2654435761)).astype(np.float64) / 2**31 - 1
    shifted = values.astype(np.float64) * (1 + spread * ulps * 2.0**-24)
    return np.where(np.isfinite(values) & (values != 0), shifted, values).astype(np.float32)


def with_one_nan(values: Array) -> Array:
    """float32 whose NaN are all the same, as those of a GPU's results are."""
    is_nan = np.isnan(values)
    return np.where(is_nan, CANONICAL_NAN, values) if is_nan.any() else values


def flushed(values: Array) -> Array:
    """Without denormal numbers."""
    small = np.abs(values) < SMALLEST_NORMAL
    return np.where(small, np.copysign(np.float32(0), values), values).astype(
        np.float32, copy=False
    )
