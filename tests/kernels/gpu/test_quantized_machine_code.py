"""Machine code of linears with weights of few bits, for sm_80 (A100) and sm_90 (H100, H200)."""

from __future__ import annotations

from itertools import product

import pytest
from ahead_of_time import CompiledKernel, Launch, but_architecture

PACKINGS = ("Q4_1", "Q4_0", "Q4_K", "Q6_K", "FP8")
CASES = [
    *product((80, 90), ("bfloat16",), PACKINGS, (1, 64), (20480,)),
    *product((80, 90), ("float16",), ("Q4_1",), (16, 65), (5120,)),
    *product((80, 90), ("float32",), ("Q6_K",), (16, 65), (5120,)),
    # Columns that are not all of a block; and so few rows that a second kernel adds up splits.
    *product((80, 90), ("bfloat16",), ("Q4_K",), (16,), (128,)),
]
LAUNCHES = [
    Launch(
        "quantized",
        architecture,
        {
            "dtype": dtype,
            "packing": packing,
            "rows": rows,
            "out_features": out_features,
            "in_features": 5120 if out_features > 128 else 1600,
        },
    )
    for architecture, dtype, packing, rows, out_features in CASES
]
ROW_LAUNCHES = [
    Launch(
        "dequantize_rows",
        architecture,
        {
            "dtype": "bfloat16",
            "packing": packing,
            "out_features": 5120,
            "in_features": 5120,
            "by_ids": by_ids,
        },
    )
    for architecture, packing, by_ids in product((80, 90), ("Q4_K", "FP8"), (False, True))
]
GROUPED_LAUNCHES = [
    Launch(
        "grouped_quantized",
        architecture,
        {
            "dtype": "bfloat16",
            "packing": packing,
            "rows": rows,
            "groups": 64,
            "out_features": 1536,
            "in_features": 2048,
        },
    )
    for architecture, packing, rows in product((80, 90), ("Q4_1", "Q4_K", "FP8"), (8, 64 * 64))
]
# Shared memory of a program in bytes. The parameters for 8.0 also serve cards with less than an
# A100.
MOST_SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}


@pytest.mark.compiles(lambda launch: [launch])
@pytest.mark.one_of("launch", key=but_architecture)
@pytest.mark.parametrize(
    "launch", [*LAUNCHES, *GROUPED_LAUNCHES], ids=map(str, [*LAUNCHES, *GROUPED_LAUNCHES])
)
def test_machine_code(kernels: list[CompiledKernel], launch: Launch) -> None:
    kernel, *others = kernels
    what = f"{kernel.registers} registers, {kernel.shared_bytes} bytes, {dict(kernel.instructions)}"
    is_narrow = launch.arguments["dtype"] != "float32"
    assert kernel.stack_bytes == 0, what
    assert kernel.count("LDL", "STL") == 0, what
    # Asynchronous copies bring x, codes and numbers; only the bias is loaded.
    assert kernel.count("LDGSTS.128") > 0, what
    assert kernel.copies_ahead >= 2, what
    assert (kernel.count("HMMA", "HGMMA") > 0) == is_narrow, what
    if is_narrow:  # the weight goes from registers to the product
        assert kernel.count("STS", "STSM") == 0, what
    assert kernel.shared_bytes <= MOST_SHARED_BYTES[launch.architecture], what
    for other in others:
        assert other.stack_bytes == 0
        assert other.count("LDG.128") > 0


@pytest.mark.compiles(lambda launch: [launch])
@pytest.mark.one_of("launch", key=but_architecture)
@pytest.mark.parametrize("launch", ROW_LAUNCHES, ids=map(str, ROW_LAUNCHES))
def test_machine_code_of_rows(kernels: list[CompiledKernel], launch: Launch) -> None:
    (kernel,) = kernels
    what = f"{kernel.registers} registers, {dict(kernel.instructions)}"
    assert kernel.stack_bytes == 0, what
    assert kernel.count("LDG.128") > 0, what
    assert kernel.count("STG.128") > 0, what
    assert kernel.registers <= 64, what
