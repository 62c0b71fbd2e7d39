"""What the kernels' machine code needs of a GPU, for sm_80 (A100) and sm_90 (H100, H200)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
from ahead_of_time import Arguments, CompiledKernel, Launch, compile_launches

SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
"""What one program may have at most."""
MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA"}


@dataclass(frozen=True)
class Expected:
    """``registers``: the most that a thread may have for the occupancy that the launch parameters
    were chosen for. ``matrix``: whether tensor cores must be used, by the instruction that feeds
    them at full rate. ``load_bits``, ``store_bits``: widths of all accesses to memory that are
    allowed beside 128 bits."""

    function: str
    arguments: Arguments
    registers: int
    matrix: bool = False
    load_bits: Sequence[int] = field(default=())
    store_bits: Sequence[int] = field(default=())


def rowwise() -> list[Expected]:
    rows = []
    for dtype in ("bfloat16", "float16", "float32"):
        rows += [
            Expected("bias_relu", {"dtype": dtype, "size": 20480}, 32),
            Expected("silu_mul", {"dtype": dtype, "size": 11008}, 32),
        ]
    return rows


EXPECTED = rowwise()
CASES = list(product(EXPECTED, (80, 90)))
LAUNCHES = [
    Launch(f"kernel_launches:{expected.function}", architecture, expected.arguments)
    for expected, architecture in CASES
]


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[CompiledKernel]]:
    kernels = compile_launches(LAUNCHES)
    return {str(launch): found for launch, found in zip(LAUNCHES, kernels, strict=True)}


@pytest.mark.parametrize(
    ("expected", "launch"),
    [(case[0], launch) for case, launch in zip(CASES, LAUNCHES, strict=True)],
    ids=map(str, LAUNCHES),
)
def test_machine_code(
    compiled: dict[str, list[CompiledKernel]], expected: Expected, launch: Launch
) -> None:
    for kernel in compiled[str(launch)]:
        instructions = kernel.instructions
        assert kernel.stack_bytes == 0, f"{kernel.name}: spilled registers or a stack frame"
        assert not kernel.widths("LDL", "STL"), f"{kernel.name}: {instructions}"
        assert kernel.registers <= expected.registers, kernel.name
        assert kernel.shared_bytes <= SHARED_BYTES[launch.architecture], kernel.name
        loads = kernel.widths("LDG", "LDGSTS") - set(expected.load_bits)
        assert loads == {128}, f"{kernel.name}: {instructions}"
        stores = kernel.widths("STG") - set(expected.store_bits)
        assert stores == {128}, f"{kernel.name}: {instructions}"
        if expected.matrix:
            assert instructions[MATRIX_INSTRUCTION[launch.architecture]], f"{kernel.name}"
