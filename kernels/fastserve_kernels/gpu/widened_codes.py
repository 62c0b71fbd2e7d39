"""Codes of a weight as factors of the tensor cores' products, two with every instruction.

A 16-bit float of 2^n has a mantissa of zeros. With a code in the mantissa it is 2^n plus the code.
So a shift and one logical instruction make exact factors of two codes. Scales and offsets do not
multiply each code, but sums of products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Triton's interpreter does not run instructions. It computes the same numbers in another way.
_IS_INTERPRETED = tl.constexpr(knobs.runtime.interpret)

# What a power of two must be so that a code of 4 bits, from the mantissa's bit 3 on, is added to
# it; and one of 8 bits, from bit 0 on.
_POWER_OF_4_BITS = {"bf16": 16, "fp16": 128}
_POWER_OF_8_BITS = {"bf16": 128, "fp16": 1024}


@triton.constexpr_function
def scales_codes(rows, is_float, dtype):
    """Whether a tile of so many rows has more sums to scale than codes, of an integer format."""
    return rows > 16 and not is_float and dtype.name != "fp32"


@triton.constexpr_function
def base(dtype, bits, is_full, is_float, center, has_offsets, scales_codes):
    """What is added to a code, or to a float, in its factor of a dtype."""
    if scales_codes:
        return 16 if bits == 4 else 256
    if is_float:
        return 0
    if is_full:
        return -128
    if not has_offsets:
        return -center
    powers = _POWER_OF_4_BITS if bits == 4 else _POWER_OF_8_BITS
    return powers.get(dtype.name, 0)


@triton.jit
def widened_codes(
    packed, dtype: tl.constexpr, PLACE: tl.constexpr, BITS: tl.constexpr, IS_FULL: tl.constexpr,
    IS_FLOAT: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """The codes at a place, plus `BASE`, exactly.

    packed: int16 ``[rows, columns]``, two columns of a thread side by side.
    """
    if _IS_INTERPRETED or dtype == tl.float32:
        factors = (exact_codes(packed, PLACE, BITS, IS_FLOAT) + BASE).to(dtype)
    else:
        ASSEMBLY: tl.constexpr = _assembly(dtype, PLACE, BITS, IS_FULL, IS_FLOAT, BASE)
        if dtype == tl.bfloat16:
            factors = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [packed], tl.bfloat16, True, 2)
        else:
            factors = tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [packed], tl.float16, True, 2)
    return factors


@triton.jit
def widened_bytes(weight, dtype: tl.constexpr):
    """int8 numbers as a dtype, exactly. Of a thread, four columns are side by side. A weight that
    has the dtype stays as it is."""
    if _IS_INTERPRETED or weight.dtype != tl.int8 or dtype == tl.float32:
        factors = weight.to(dtype)
    elif dtype == tl.bfloat16:
        BFLOATS: tl.constexpr = _of_signed_bytes(dtype)
        factors = tl.inline_asm_elementwise(BFLOATS, "=r,=r,r", [weight], tl.bfloat16, True, 4)
    else:
        HALVES: tl.constexpr = _of_signed_bytes(dtype)
        factors = tl.inline_asm_elementwise(HALVES, "=r,=r,r", [weight], tl.float16, True, 4)
    return factors


@triton.jit
def after_product(sums):
    """The float32 sums, once their product has ended.

    The compiler lets a product (``wgmma``) of factors in registers run into the next iteration of a
    loop, which writes the next factors to the same registers. PTX does not allow that. To use the
    sums, if only by no instruction, the compiler must wait.
    """
    if not _IS_INTERPRETED:
        sums = tl.inline_asm_elementwise("", "=f,0", [sums], tl.float32, True, 1)
    return sums


@triton.jit
def scalable_codes(packed, PLACE: tl.constexpr, BITS: tl.constexpr, BASE: tl.constexpr):
    """float32 values of integer codes at a place, plus `BASE`, exactly."""
    if _IS_INTERPRETED:
        codes = exact_codes(packed, PLACE, BITS, False) + BASE
    else:
        ASSEMBLY: tl.constexpr = _of_singles(PLACE, BITS)
        bits = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [packed], tl.int32, True, 2)
        codes = bits.to(tl.float32, bitcast=True)
    return codes


@triton.jit
def exact_codes(packed, PLACE: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """float32 values of the codes at a place."""
    packed = packed.to(tl.int32)
    if IS_FLOAT:
        # The sign, then copies of it that the mask removes, the exponent's 4 bits, which end where
        # those of a float32 do, and the mantissa's 3. The exponent's bias is 120 less.
        bits = ((packed << (24 - 8 * PLACE)) >> 4) & (0x87F00000 - 0x100000000)
        codes = bits.to(tl.float32, bitcast=True) * 2.0**120
    else:
        codes = ((packed >> BITS * PLACE) & ((1 << BITS) - 1)).to(tl.float32)
    return codes


@triton.constexpr_function
def _assembly(dtype, place, bits, is_full, is_float, base):
    """PTX that makes $0, two floats of 16 bits, of $1, two packed int16."""
    half = dtype.name
    if is_float:
        lines = _of_floats(half, 8 * place)
    elif is_full and half == "bf16":
        lines = _of_bytes(8 * place)
    else:
        lines = _of_integers(half, bits, bits * place, base)
    return "\n".join(("{", ".reg .b32 w<4>;", *lines, "}"))


@triton.constexpr_function
def _of_signed_bytes(dtype):
    """PTX that makes $0 and $1, two floats of 16 bits each, of $2, four int8."""
    half = dtype.name
    lines = []
    for pair, selector in enumerate((0x4140, 0x4342)):
        if half == "bf16":  # 128 and the lower 7 bits, less 128, or less 256 for a negative number
            lines += [
                "mov.b32 w2, 0;",
                f"prmt.b32 w0, $2, w2, {selector};",
                _masked("w1", "w0", 0x7F, _bits(half, 128)),
                _masked("w2", "w0", 0x80, _bits(half, -128)),
                *_fused(half, "w1", 1, "w2"),
            ]
        else:  # 1024 and the number plus 128, less the sum of both
            lines += [
                "xor.b32 w0, $2, 0x80808080;",
                f"mov.b32 w1, {_bits(half, 1024) * 0x10001};",
                f"prmt.b32 w1, w0, w1, {selector + 0x1010};",
                *_fused(half, "w1", 1, _bits(half, -1152)),
            ]
        lines[-1] = lines[-1].replace("$0", f"${pair}")
    return "\n".join(("{", ".reg .b32 w<4>;", *lines, "}"))


@triton.constexpr_function
def _of_singles(place, bits):
    """PTX that makes float32 $0 and $1 of $2, two packed int16. The code is the mantissa's highest
    bits, and the power of two such that a code's lowest bit counts 1."""
    at, mask, power = 23 - bits, (1 << bits) - 1, 0x41800000 if bits == 4 else 0x43800000
    lines = []
    for half in range(2):
        right = 16 * half + bits * place - at
        shift = f"shr.u32 $0, $2, {right};" if right >= 0 else f"shl.b32 $0, $2, {-right};"
        chosen = f"lop3.b32 $0, $0, {mask << at}, {power}, 0x6A;"
        lines += [line.replace("$0", f"w{half}") for line in (shift, chosen)]
    return "\n".join(("{", ".reg .b32 w<2>;", *lines, "mov.b32 $0, w0;", "mov.b32 $1, w1;", "}"))


@triton.constexpr_function
def _of_integers(half: str, bits: int, at: int, base: int) -> list[str]:
    """Codes of up to 7 bits, or in float16 up to 8, as a power of two plus the code."""
    if bits == 4:
        power, left, mask = _POWER_OF_4_BITS[half], 3, 0x78
    else:
        power, left, mask = _POWER_OF_8_BITS[half], 0, 0x7F if half == "bf16" else 0xFF
    if base == power:
        return [_shift("w0", at - left), _masked("$0", "w0", mask, _bits(half, power))]
    return [
        _shift("w0", at - left),
        _masked("w1", "w0", mask, _bits(half, power)),
        *_fused(half, "w1", 1, _bits(half, base - power)),
    ]


@triton.constexpr_function
def _of_bytes(at: int) -> list[str]:
    """In bfloat16, a byte less 128: 128 and its lower 7 bits, less 128, or less 256 where its
    highest bit is 0."""
    return [
        _shift("w0", at),
        _masked("w1", "w0", 0x7F, _bits("bf16", 128)),
        _masked("w2", "w0", 0x80, _bits("bf16", -256)),
        *_fused("bf16", "w1", 1, "w2"),
    ]


@triton.constexpr_function
def _of_floats(half: str, at: int) -> list[str]:
    """float8_e4m3fn. The exponent ends where that of the half does, whose bias is larger. A product
    makes up for it, and finds denormal numbers their exponent."""
    right, bias = (4, 120) if half == "bf16" else (1, 8)
    return [
        _shift("w0", at - 8),
        f"shr.u32 w1, w0, {right};",
        _masked("w1", "w1", 0x7F00 >> right, 0),
        _masked("w1", "w0", 0x8000, "w1"),
        *_fused(half, "w1", 2.0**bias, 0x8000),
    ]


@triton.constexpr_function
def _shift(to: str, right: int) -> str:
    return f"shr.u32 {to}, $1, {right};" if right >= 0 else f"shl.b32 {to}, $1, {-right};"


@triton.constexpr_function
def _masked(to: str, of: str, mask: int, changed: int | str) -> str:
    """(of & mask) ^ changed, in both halves. changed: bits of a half, or a register."""
    return f"lop3.b32 {to}, {of}, {mask * 0x10001}, {_both(changed)}, 0x6A;"


@triton.constexpr_function
def _fused(half: str, of: str, factor: float, addend: int | str) -> list[str]:
    """$0 = of · factor + addend. addend: bits of a half, or a register."""
    kind = "bf16x2" if half == "bf16" else "f16x2"
    return [
        f"mov.b32 w3, {_bits(half, factor) * 0x10001};",
        *([] if isinstance(addend, str) else [f"mov.b32 w2, {_both(addend)};"]),
        f"fma.rn.{kind} $0, {of}, w3, w2;",
    ]


@triton.constexpr_function
def _both(of: int | str) -> str:
    return of if isinstance(of, str) else str(of * 0x10001)


@triton.constexpr_function
def _bits(half: str, number: float) -> int:
    """Of a number of at least 1 (or -1), which the half holds exactly."""
    mantissa, bias = (7, 127) if half == "bf16" else (10, 15)
    size, exponent = abs(number), 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    fraction = int((size - 1) * 2**mantissa)
    return (number < 0) << 15 | (exponent + bias) << mantissa | fraction
