"""Machine code of the row-wise, cache and INT8 kernels, for sm_80 (A100) and sm_90 (H100, H200)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from ahead_of_time import Arguments, CompiledKernel, Launch, but_architecture


@dataclass(frozen=True)
class Expected:
    """Expectations of each kernel of a launch. Memory accesses are 16 bytes wide, except
    ``narrow_loads`` and ``narrow_stores``, which are of single numbers and short rows."""

    function: str
    arguments: Arguments
    registers: int
    """The most registers of a thread; more would reduce the number of programs that run at once."""
    narrow_loads: int = 0
    narrow_stores: int = 0
    has_wide: bool = True
    has_wide_stores: bool = True
    divides_exactly: bool = False
    """IEEE divisions where results need them: the exact mean of equal values, and a CPU's INT8
    codes."""


def rowwise() -> list[Expected]:
    rows = []
    for dtype in ("bfloat16", "float16", "float32"):
        # Full occupancy is 32 registers.
        rows += [
            Expected("bias_relu", {"dtype": dtype, "size": 20480}, 32),
            Expected("silu_mul", {"dtype": dtype, "size": 11008}, 32),
            Expected("gelu_tanh_mul", {"dtype": dtype, "size": 11008}, 32),
            Expected("clamped_swiglu", {"dtype": dtype, "size": 2880}, 32),
            # A place and a weight for each choice, and the number of rows.
            Expected("sum_choices", {"dtype": dtype, "size": 2048}, 64, narrow_loads=17),
        ]
    for dtype, size in [
        ("bfloat16", 768), ("bfloat16", 5120), ("bfloat16", 16384), ("float16", 5120)
    ]:  # fmt: skip
        # With 1024 threads, the widest rows', there are 64.
        arguments: Arguments = {"dtype": dtype, "size": size}
        rows += [
            Expected("add_layer_norm", arguments, 56, divides_exactly=True),
            Expected("add_rms_norm", arguments, 48),
        ]
    for dtype, head_dim in [("bfloat16", 128), ("bfloat16", 256), ("float16", 64)]:
        arguments = {"dtype": dtype, "heads": 16, "kv_heads": 8, "head_dim": head_dim}
        # The weight, which all heads of a tile share, is spread over more threads.
        rows.append(Expected("rms_norm_heads", arguments, 64, narrow_loads=1))
    return rows


def cache() -> list[Expected]:
    rows = []
    for dtype, kv_heads, head_dim in [
        ("bfloat16", 12, 64), ("float16", 32, 80), ("bfloat16", 8, 128), ("bfloat16", 40, 128),
        ("float32", 8, 128),
    ]:  # fmt: skip
        arguments: Arguments = {"dtype": dtype, "kv_heads": kv_heads, "head_dim": head_dim}
        # Narrow accesses: the slot, the block's number, and each channel's parameters.
        rows += [
            Expected("kv_write", arguments, 32, narrow_loads=1),
            # Codes are half as wide or less, and each head has a scale.
            Expected(
                "kv_write",
                {**arguments, "int8": True},
                64,
                narrow_loads=1,
                narrow_stores=4,
                has_wide_stores=False,
                divides_exactly=True,
            ),
            Expected(
                "quantize_blocks",
                arguments,
                128,
                narrow_loads=1,
                narrow_stores=2,
                divides_exactly=True,
            ),
            Expected("dequantize_blocks", arguments, 96, narrow_loads=3),
        ]
    for dtype, heads, kv_heads, head_dim, rotary_dim in [
        ("bfloat16", 40, 40, 128, 128), ("float16", 9, 3, 64, 64), ("bfloat16", 8, 8, 64, 16)
    ]:  # fmt: skip
        arguments = {
            "dtype": dtype, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
            "rotary_dim": rotary_dim,
        }  # fmt: skip
        # Narrow accesses: the slot, cosines and sines, and the pairs where they are few.
        few = rotary_dim < 32
        rows.append(
            Expected(
                "rope_kv_write",
                arguments,
                64,
                narrow_loads=7 if few else 3,
                narrow_stores=4 if few else 0,
            )
        )
        rows.append(
            Expected(
                "rope_kv_write",
                {**arguments, "int8": True},
                64,
                narrow_loads=7 if few else 3,
                narrow_stores=6 if few else 5,
                divides_exactly=True,
            )
        )
    return rows


# A thread starts eight loads before it waits for the first.
PINNED_COPY = Expected("copy_words", {}, 32, narrow_loads=8, narrow_stores=8, has_wide=False)
# Each thread has 16 pairs of an expert and a choice.
SORTS = [
    Expected(
        "sort_choices", {"experts": experts}, 168, narrow_loads=16, narrow_stores=16, has_wide=False
    )
    for experts in (8, 64, 128)
]
# Three launches for float32, as masks and penalties leave it, and for what a model computes. Narrow
# accesses: numbers of a row and of tiles, and what each lane of `_pass` reads and lists.
CHOICES = [
    Expected(
        "choose_tokens",
        {"dtype": dtype, "vocab": vocab},
        128,
        narrow_loads=26,
        narrow_stores=10,
        has_wide_stores=False,
    )
    for dtype, vocab in [("bfloat16", 50272), ("float16", 32000), ("float32", 128256)]
]
EXPECTED = [*rowwise(), *cache(), *SORTS, *CHOICES, PINNED_COPY]
CASES = list(product(EXPECTED, (80, 90)))
LAUNCHES = [
    Launch(expected.function, architecture, expected.arguments) for expected, architecture in CASES
]
ROW_COUNTS = (1, 2, 3, 64)


@pytest.mark.compiles(lambda launch: [launch])
@pytest.mark.one_of("launch", key=but_architecture)
@pytest.mark.parametrize(
    ("expected", "launch"),
    [(case[0], launch) for case, launch in zip(CASES, LAUNCHES, strict=True)],
    ids=map(str, LAUNCHES),
)
def test_machine_code(kernels: list[CompiledKernel], expected: Expected, launch: Launch) -> None:
    assert kernels
    for kernel in kernels:
        what = f"{kernel.name}: {kernel.registers} registers, {dict(kernel.instructions)}"
        assert kernel.stack_bytes == 0, what
        assert kernel.count("LDL", "STL") == 0, what
        assert kernel.registers <= expected.registers, what
        wide_loads, wide_stores = kernel.count("LDG.128"), kernel.count("STG.128")
        assert (wide_loads > 0) == expected.has_wide, what
        assert (wide_stores > 0) == (expected.has_wide and expected.has_wide_stores), what
        assert kernel.count("LDG") - wide_loads <= expected.narrow_loads, what
        assert kernel.count("STG") - wide_stores <= expected.narrow_stores, what
        assert (kernel.count("FCHK") > 0) == expected.divides_exactly, what


@pytest.mark.compiles(
    lambda: [
        Launch("choose_tokens", 90, {"dtype": "bfloat16", "vocab": 50272, "rows": rows})
        for rows in ROW_COUNTS
    ]
)
def test_one_variant_chooses_for_any_number_of_rows(kernels: list[CompiledKernel]) -> None:
    """Serving must not wait for a compiler. The vocabulary has an odd number of tiles."""
    kernels_of_each = len(kernels) // len(ROW_COUNTS)
    variants = [kernel.variant for kernel in kernels]
    assert variants == len(ROW_COUNTS) * variants[:kernels_of_each]
