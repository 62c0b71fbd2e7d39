"""Machine code of linears with weights in INT8 or for groups of rows, for sm_80 (A100) and sm_90
(H100, H200)."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
from ahead_of_time import CompiledKernel, Launch, compile_launches
from fastserve_kernels.gpu.int8_linear import MOST_ROWS

ROWS = (1, 16, 17, 64, 65, MOST_ROWS)
CASES = list(
    product((80, 90), ("bfloat16", "float16", "float32"), ROWS, ((5120, 20480), (768, 768)))
)
LAUNCHES = [
    Launch(
        "linear",
        architecture,
        {"dtype": dtype, "rows": rows, "out_features": sizes[0], "in_features": sizes[1]},
    )
    for architecture, dtype, rows, sizes in CASES
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


@cache
def compiled(architecture: int) -> dict[str, list[CompiledKernel]]:
    launches = [one for one in (*LAUNCHES, *GROUPED_LAUNCHES) if one.architecture == architecture]
    return dict(zip(map(str, launches), compile_launches(launches), strict=True))


@pytest.mark.parametrize("launch", LAUNCHES, ids=map(str, LAUNCHES))
def test_machine_code(launch: Launch) -> None:
    kernel, *_ = compiled(launch.architecture)[str(launch)]
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


@pytest.mark.parametrize("launch", GROUPED_LAUNCHES, ids=map(str, GROUPED_LAUNCHES))
def test_machine_code_of_groups(launch: Launch) -> None:
    (kernel,) = compiled(launch.architecture)[str(launch)]
    what = f"{kernel.registers} registers, {kernel.shared_bytes} bytes, {dict(kernel.instructions)}"
    assert kernel.stack_bytes == 0, what
    assert kernel.count("LDL", "STL") == 0, what
    assert kernel.count("LDGSTS.128") > 0, what
    assert kernel.copies_ahead >= 2, what
    assert (kernel.count("HMMA", "HGMMA") > 0) == (launch.arguments["dtype"] != "float32"), what
    assert kernel.shared_bytes <= MOST_SHARED_BYTES[launch.architecture], what


def test_steps_of_all_sizes_take_what_was_compiled_at_the_start() -> None:
    """Each layer and architecture has one variant for each choice of parameters, and no more."""
    for architecture, dtype, sizes in product((80, 90), ("bfloat16",), ((5120, 20480),)):
        variants = {
            compiled(launch.architecture)[str(launch)][0].variant
            for launch, case in zip(LAUNCHES, CASES, strict=True)
            if case[0] == architecture and case[1] == dtype and case[3] == sizes
        }
        assert len(variants) == 3
