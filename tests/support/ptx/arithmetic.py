"""Instructions between registers of one thread."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import numpy as np

from ptx.errors import UnknownCode
from ptx.formats import (
    SIZES,
    TYPES,
    Array,
    approximate,
    decoded,
    encoded,
    flushed,
    halves,
    with_one_nan,
)
from ptx.machine import Machine, Mask
from ptx.program import Instruction, vector

_HALF_TYPES = ("f16", "bf16", "f16x2", "bf16x2")
_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
# Errors of approximations in units of 2^-24 of the result, at least as large as documented.
_DIV_FULL, _EX2, _RSQRT = 4.0, 4.0, 4.0


def _elementwise(
    function: Callable[..., Any], machine: Machine, i: Instruction, mask: Mask
) -> None:
    """An operation on operands of one type. Floats of 16 bits are computed in float64 and rounded
    by way of float32."""
    if i.type in _HALF_TYPES:
        half = i.type.removesuffix("x2")
        values = [_halves_of(machine, operand, i.type) for operand in i.operands[1:]]
        bits = encoded(function(*(one.astype(np.float64) for one in values)), half)
        machine.write(i.operands[0], bits.view(TYPES[i.type])[:, 0], mask)
        return
    values = [machine.read(operand, i.type) for operand in i.operands[1:]]
    if "ftz" in i.parts:
        values = [flushed(one) for one in values]
    result = np.asarray(function(*values)).astype(TYPES[i.type], copy=False)
    if "ftz" in i.parts:
        result = flushed(result)
    if i.type == "f32":
        result = with_one_nan(result)
    machine.write(i.operands[0], result, mask)


def _halves_of(machine: Machine, operand: str, type_name: str) -> Array:
    """float32 [threads, 1 or 2]."""
    words = machine.read(operand, type_name)
    if type_name.endswith("x2"):
        return halves(words, type_name.removesuffix("x2"))
    return decoded(words.view(np.uint16), type_name)[:, None]


def _least_or_most(machine: Machine, i: Instruction, mask: Mask) -> None:
    """The minimum or maximum of two or three. Numbers win over NaN, unless the name says
    otherwise. With ``relu`` the result is at least 0."""
    is_least = i.parts[0] == "min"
    if "NaN" in i.parts:
        choose = np.minimum if is_least else np.maximum
    else:
        choose = np.fmin if is_least else np.fmax

    def of_two(x: Array, y: Array) -> Array:
        if x.dtype.kind != "f":
            return choose(x, y)
        # -0 is less than 0.
        of_zeros = -(-x - y) if is_least else x + y
        return np.where((x == 0) & (y == 0), of_zeros, choose(x, y))

    def of_all(*values: Array) -> Array:
        result = reduce(of_two, values)
        return np.maximum(result, 0) if "relu" in i.parts else result

    _elementwise(of_all, machine, i, mask)


def _multiply(machine: Machine, i: Instruction, mask: Mask) -> None:
    """``mul`` and ``mad``, with the whole product or its lower or upper half."""
    if i.parts[1] not in ("wide", "hi", "lo"):
        _elementwise(np.multiply, machine, i, mask)
        return
    dtype = np.dtype(TYPES[i.type])
    x, y = (machine.read(operand, i.type) for operand in i.operands[1:3])
    if i.parts[1] == "lo":
        product = x * y
    elif i.parts[1:] == ("hi", "u64"):
        # numpy has no wider type.
        words = [int(a) * int(b) >> 64 for a, b in zip(x, y, strict=True)]
        product = np.array(words, np.uint64)
    else:
        wide = np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")
        product = x.astype(wide) * y.astype(wide)
        if i.parts[1] == "hi":
            product = (product >> wide.type(8 * dtype.itemsize)).astype(dtype)
    if i.parts[0] == "mad":
        bits = 8 * product.dtype.itemsize
        product = product + machine.read(i.operands[3], f"{i.type[0]}{bits}")
    machine.write(i.operands[0], product, mask)


def _fused(machine: Machine, i: Instruction, mask: Mask) -> None:
    def function(x: Array, y: Array, z: Array) -> Array:
        return x.astype(np.float64) * y + z

    _elementwise(function, machine, i, mask)


def _divide(machine: Machine, i: Instruction, mask: Mask) -> None:
    if i.type in ("s64", "u32"):
        _elementwise(_divided_toward_zero, machine, i, mask)
        return
    if i.parts[1] not in ("full", "rn"):
        raise UnknownCode(i.text)
    _elementwise(np.divide if i.parts[1] == "rn" else _divided_about, machine, i, mask)


def _divided_toward_zero(x: Array, y: Array) -> Array:
    quotient = np.abs(x) // np.abs(np.where(y == 0, 1, y))
    return np.where((x < 0) != (y < 0), -quotient, quotient)


def _divided_about(x: Array, y: Array) -> Array:
    return approximate(x / y, _DIV_FULL)


def _approximation(
    function: Callable[[Array], Array], ulps: float, machine: Machine, i: Instruction, mask: Mask
) -> None:
    _elementwise(lambda x: approximate(function(x.astype(np.float64)), ulps), machine, i, mask)


def _shift(machine: Machine, i: Instruction, mask: Mask) -> None:
    """Shifts by more bits than the width give the result of shifting out all bits."""
    bits = 8 * SIZES[i.type]
    x, count = machine.read(i.operands[1], i.type), machine.read(i.operands[2], "u32")
    operation = np.left_shift if i.parts[0] == "shl" else np.right_shift
    if i.operands[2].isdigit() and int(i.operands[2]) < bits:
        machine.write(i.operands[0], operation(x, count.astype(x.dtype)), mask)
        return
    for part in (bits // 2, bits // 2):
        x = operation(x, np.minimum(count, part).astype(x.dtype))
        count = np.maximum(count, part) - part
    machine.write(i.operands[0], x, mask)


def _funnel_shift(machine: Machine, i: Instruction, mask: Mask) -> None:
    """32 of the 64 bits of two words, the lower word first: the upper ones after a shift to the
    left, or the lower ones after one to the right."""
    low, high, count = (machine.read(operand, "u32") for operand in i.operands[1:4])
    if i.parts[2] != "wrap":
        raise UnknownCode(i.text)
    both = high.astype(np.uint64) << np.uint64(32) | low
    count = (count & np.uint32(31)).astype(np.uint64)
    shifted = both << count >> np.uint64(32) if i.parts[1] == "l" else both >> count
    machine.write(i.operands[0], shifted.astype(np.uint32), mask)


def _bit_field(machine: Machine, i: Instruction, mask: Mask) -> None:
    first, length = int(i.operands[2]), int(i.operands[3])
    x = machine.read(i.operands[1], i.type).astype(np.int64)
    field = (x >> first) & ((1 << length) - 1)
    if i.type.startswith("s"):
        field -= (field >> (length - 1)) << length
    machine.write(i.operands[0], field.astype(TYPES[i.type]), mask)


def _count_bits(machine: Machine, i: Instruction, mask: Mask) -> None:
    words = np.ascontiguousarray(machine.read(i.operands[1], i.type))
    bits = np.unpackbits(words.view(np.uint8)).reshape(machine.threads, -1)
    machine.write(i.operands[0], bits.sum(axis=1, dtype=np.uint32), mask)


def _permute(machine: Machine, i: Instruction, mask: Mask) -> None:
    """Four of the eight bytes of two words; or the sign of a byte, eight times."""
    x, y, selectors = (machine.read(operand, "u32") for operand in i.operands[1:4])
    both = np.stack([x, y], axis=1).view(np.uint8)
    chosen = (selectors[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    result = np.take_along_axis(both, (chosen & 7).astype(np.int64), axis=1)
    result = np.where(chosen & 8, np.where(result & 128, 255, 0), result).astype(np.uint8)
    machine.write(i.operands[0], result.view(np.uint32)[:, 0], mask)


def _logic_of_three(machine: Machine, i: Instruction, mask: Mask) -> None:
    """Any function of three bits; its table is a number, by the bits from the first's down."""
    x, y, z = (machine.read(operand, i.type) for operand in i.operands[1:4])
    table = int(i.operands[4], 0)
    result = np.zeros_like(x)
    for number in range(8):
        if table >> number & 1:
            bits = [one if number & place else ~one for one, place in ((x, 4), (y, 2), (z, 1))]
            result |= bits[0] & bits[1] & bits[2]
    machine.write(i.operands[0], result, mask)


def _move(machine: Machine, i: Instruction, mask: Mask) -> None:
    """Moves a value, a word to its parts, or parts to a word."""
    target, source = i.operands
    of_target, of_source = vector(target), vector(source)
    part = f"b{8 * SIZES[i.type] // max(len(of_target), len(of_source))}"
    words = np.stack([machine.read(one, part if "{" in source else i.type) for one in of_source], 1)
    for place, register in enumerate(of_target):
        values = words.view(TYPES[part if "{" in target else i.type])[:, place]
        machine.write(register, values, mask)


def _select(machine: Machine, i: Instruction, mask: Mask) -> None:
    x, y = (machine.read(operand, i.type) for operand in i.operands[1:3])
    machine.write(i.operands[0], np.where(machine.read(i.operands[3], "pred"), x, y), mask)


def _compare(machine: Machine, i: Instruction, mask: Mask) -> None:
    _, comparison, _ = i.parts
    x, y = (machine.read(operand, i.type) for operand in i.operands[1:3])
    if i.type in _HALF_TYPES:
        raise UnknownCode(i.text)
    result = _COMPARISONS[comparison](x, y)
    if i.type == "f32":
        result &= ~(np.isnan(x) | np.isnan(y))
    machine.write(i.operands[0], result, mask)


def _convert(machine: Machine, i: Instruction, mask: Mask) -> None:
    to, of = i.parts[-2:]
    values = [machine.read(operand, of) for operand in i.operands[1:]]
    if to in _HALF_TYPES:
        # The first of two operands becomes the upper half.
        bits = np.stack([encoded(one, to.removesuffix("x2")) for one in reversed(values)], axis=1)
        result = bits.view(TYPES[to])[:, 0]
    elif of in _HALF_TYPES:
        result = decoded(values[0].view(np.uint16), of)
    elif of == "f32":
        if i.parts[1] != "rzi":
            raise UnknownCode(i.text)
        limits = np.iinfo(TYPES[to])
        limited = np.clip(np.trunc(values[0].astype(np.float64)), limits.min, limits.max)
        result = np.where(np.isnan(limited), 0, limited)
    else:
        result = values[0]
    machine.write(i.operands[0], result.astype(TYPES[to]), mask)


ARITHMETIC = {
    "add": partial(_elementwise, np.add),
    "sub": partial(_elementwise, np.subtract),
    "min": _least_or_most,
    "max": _least_or_most,
    "neg": partial(_elementwise, np.negative),
    "abs": partial(_elementwise, np.abs),
    "and": partial(_elementwise, np.bitwise_and),
    "or": partial(_elementwise, np.bitwise_or),
    "xor": partial(_elementwise, np.bitwise_xor),
    "not": partial(_elementwise, np.invert),
    "lop3": _logic_of_three,
    "mul": _multiply,
    "mad": _multiply,
    "fma": _fused,
    "div": _divide,
    "ex2": partial(_approximation, np.exp2, _EX2),
    "rsqrt": partial(_approximation, lambda x: 1 / np.sqrt(x), _RSQRT),
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel_shift,
    "bfe": _bit_field,
    "popc": _count_bits,
    "prmt": _permute,
    "mov": _move,
    "selp": _select,
    "setp": _compare,
    "cvt": _convert,
}
