"""Machine code of linears with weights in INT8 or for groups of rows, for sm_80 (A100) and sm_90
(H100, H200)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from ahead_of_time import CompiledKernel, Launch, but_architecture
from fastserve_kernels.gpu.int8_linear import MOST_ROWS

ROWS = (1, 16, 17, 64, 65, MOST_ROWS)
"""The fewest and the most of each variant."""


def linear(architecture: int, dtype: str, rows: int, sizes: tuple[int, int]) -> Launch:
    return Launch(
        "linear",
        architecture,
        {"dtype": dtype, "rows": rows, "out_features": sizes[0], "in_features": sizes[1]},
    )


LAUNCHES = [
    linear(*case)
    for case in product(
        (80, 90), ("bfloat16", "float16", "float32"), ROWS, ((5120, 20480), (768, 768))
    )
]
GROUPED_CASES = list(
    product((80, 90), ("bfloat16", "float32"), (8, 17 * 64, 65 * 64), (False, True))
)
GROUPED_LAUNCHES = [
    Launch(
        "grouped_linear",
        architecture,
        {
            "dtype": dtype,
            "rows": rows,
            "groups": 64,
            "out_features": 2048,
            "in_features": 1024,
            "int8": int8,
        },
    )
    for architecture, dtype, rows, int8 in GROUPED_CASES
]
# Shared memory of a program in bytes. The parameters for 8.0 also serve cards with less than an
# A100.
MOST_SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}


def variant(launch: Launch) -> str:
    """A key for ``one_of``: the fewest and the most rows have the same machine code."""
    size = ROWS.index(int(launch.arguments["rows"])) // 2
    return but_architecture(replace(launch, arguments={**launch.arguments, "rows": size}))


@pytest.mark.compiles(lambda launch: [launch])
@pytest.mark.one_of("launch", key=variant)
@pytest.mark.parametrize("launch", LAUNCHES, ids=map(str, LAUNCHES))
def test_machine_code(kernels: list[CompiledKernel], launch: Launch) -> None:
    kernel, *_ = kernels
    what = f"{kernel.registers} registers, {kernel.shared_bytes} bytes, {dict(kernel.instructions)}"
    rows, is_narrow = int(launch.arguments["rows"]), launch.arguments["dtype"] != "float32"
    assert kernel.stack_bytes == 0, what
    assert kernel.count("LDL", "STL") == 0, what
    # Asynchronous copies bring x and codes; only scale and bias are loaded.
    assert kernel.count("LDGSTS.128") > 0, what
    assert kernel.copies_ahead >= 2, what
    assert (kernel.count("HMMA", "HGMMA") > 0) == is_narrow, what
    if launch.architecture == 90 and rows > 64 and is_narrow:
        assert kernel.count("HGMMA") > 0, what
    assert kernel.shared_bytes <= MOST_SHARED_BYTES[launch.architecture], what


@pytest.mark.compiles(lambda launch: [launch])
@pytest.mark.one_of("launch", key=but_architecture)
@pytest.mark.parametrize("launch", GROUPED_LAUNCHES, ids=map(str, GROUPED_LAUNCHES))
def test_machine_code_of_groups(kernels: list[CompiledKernel], launch: Launch) -> None:
    (kernel,) = kernels
    what = f"{kernel.registers} registers, {kernel.shared_bytes} bytes, {dict(kernel.instructions)}"
    assert kernel.stack_bytes == 0, what
    assert kernel.count("LDL", "STL") == 0, what
    assert kernel.count("LDGSTS.128") > 0, what
    assert kernel.copies_ahead >= 2, what
    assert (kernel.count("HMMA", "HGMMA") > 0) == (launch.arguments["dtype"] != "float32"), what
    assert kernel.shared_bytes <= MOST_SHARED_BYTES[launch.architecture], what


@pytest.mark.compiles(
    lambda architecture: [linear(architecture, "bfloat16", rows, (5120, 20480)) for rows in ROWS]
)
@pytest.mark.parametrize("architecture", [80, 90])
def test_steps_of_all_sizes_take_what_was_compiled_at_the_start(
    kernels: list[CompiledKernel], architecture: int
) -> None:
    """Each layer and architecture has one variant for each choice of parameters, and no more."""
    kernels_of_each = len(kernels) // len(ROWS)
    variants = [kernel.variant for kernel in kernels[::kernels_of_each]]
    assert variants[::2] == variants[1::2]
    assert len(set(variants)) == 3
