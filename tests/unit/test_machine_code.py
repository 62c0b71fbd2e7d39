"""Costs that are read from machine code."""

from __future__ import annotations

import pytest
from machine_code import costs, loops
from warp_time import program_cycles

NO_BARRIER = 7 << 5 | 7 << 8


def code(*instructions: str | tuple[int, str]) -> str:
    """Instructions, 16 bytes each, with control bits if they have some."""
    lines = []
    for number, one in enumerate(instructions):
        control, text = one if isinstance(one, tuple) else (NO_BARRIER | 1, one)
        lines.append(f"{16 * number:x} {control:x} {text}\n")
    return "".join(lines)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    text = code(
        "MOV R0, 0x1",
        "FFMA R1, R2, R3, R1",  # 0x10: the outer loop
        "LOP3.LUT R4, R4, R5, RZ, 0xc0, !PT",  # 0x20: the inner loop
        "@P0 BRA 0x20",
        "@P1 BRA 0x10",
        "EXIT",
        "BRA 0x60",
    )
    assert [(one.first, one.last) for one in loops(text)] == [(0x10, 0x40), (0x20, 0x30)]
    cost = costs(text, 90, num_warps=4, trips=(3, 5))
    # Four warps on four schedulers: a cycle for each instruction that is issued.
    assert cost.cycles["schedulers"] == 1 + 3 * (2 + 5 * 2) + 2
    assert cost.cycles["fp32"] == 4 * 3 * 32 / 128
    assert cost.cycles["alu"] == 4 * (1 + 3 * 5) * 32 / 64


def test_another_number_of_loops_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"1 loops, of \[2\] instructions"):
        costs(code("IADD3 R0, R0, R1, RZ", "@P0 BRA 0x0", "EXIT"), 90, 1, ())


def test_functions_and_branches_to_them_do_not_count() -> None:
    text = code(
        "FCHK P0, R0, R1",
        "@!P0 BRA 0x40",
        "MOV R2, 0x40",
        "CALL.REL.NOINC 0x60",
        "EXIT",  # 0x40
        "BRA 0x50",
        "MUFU.RCP R3, R1",  # 0x60: the slow way of a division
        "RET.REL.NODEC R2 0x0",
    )
    cost = costs(text, 90, num_warps=4, trips=())
    assert "special" not in cost.cycles
    assert cost.cycles["schedulers"] == 4  # FCHK, BRA, EXIT, BRA


def test_bytes_and_products() -> None:
    text = code(
        "LDGSTS.E.BYPASS.128 [R0], [R2.64]",
        "STG.E.U16 [R2.64], R4",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24",
        "HMMA.16816.F32.BF16 R8, R4, R6, R8",
        "EXIT",
    )
    cost = costs(text, 80, num_warps=1, trips=())
    assert cost.global_bytes == 32 * (16 + 2)
    assert cost.cycles["lsu"] == 32 * 16 / 128 + 1
    # A warp has a quarter of the 64 rows.
    assert cost.tensor == (16 * 128 * 16 + 16 * 8 * 16) / 1024


def test_a_warp_waits_for_results_and_for_the_pipeline() -> None:
    sets_barrier_0, waits_for_it = 0 << 5 | 7 << 8 | 1, NO_BARRIER | 1 << 11 | 1
    text = code(
        (NO_BARRIER | 4, "FFMA R0, R1, R2, R0"),  # the next instruction waits for 4 cycles
        (sets_barrier_0, "LDS R3, [R4]"),
        (waits_for_it, "FADD R0, R0, R3"),
        "EXIT",
    )
    assert program_cycles(text, 90, ()) == 4 + 29 + 1 + 1


def test_a_loop_that_loads_ahead_waits_less() -> None:
    """The second iteration's wait is for what the first one has loaded."""
    sets_barrier_0, waits_for_it = 0 << 5 | 7 << 8 | 1, NO_BARRIER | 1 << 11 | 1
    text = code(
        (waits_for_it, "FADD R0, R0, R3"),
        (sets_barrier_0, "LDS R3, [R4]"),
        (NO_BARRIER | 15, "FFMA R5, R5, R5, R5"),
        "@P0 BRA 0x0",
        "EXIT",
    )
    assert program_cycles(text, 90, (10,)) == 10 * (29 + 1) + 1
