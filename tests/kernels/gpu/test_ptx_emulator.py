"""The emulator of machine code reports errors that a GPU would make silently."""

from __future__ import annotations

import numpy as np
import pytest
from ptx.arithmetic import ARITHMETIC
from ptx.data_movement import DATA_MOVEMENT
from ptx.earlier_launches import EarlierLaunches
from ptx.errors import MachineError, UnknownCode
from ptx.global_order import GlobalOrder
from ptx.machine import Machine
from ptx.memory import SHARED_START, GlobalMemory
from ptx.program import Program
from ptx.tensor_cores import TENSOR_CORES

THREADS = 64  # two warps
WARP_GROUP = 128
NAN = 0xFFFFFFFF


def run(code: str, values: np.ndarray, threads: int = THREADS, shared_bytes: int = 256) -> None:
    """Runs one program whose parameter is the address of ``values``. %r1 is the thread, %rd1 the
    address of its value, %r2 that of its word in shared memory. %r3 is the address of
    the word of the thread 32 further, in the other warp."""
    text = f""".visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {threads}
{{
	.reg .b32 	%r<9>;
	ld.param.b64 	%rd0, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd1, %r1, 4, %rd0;
	shl.b32 	%r0, %r1, 2;
	add.s32 	%r2, %r0, global_smem;
	xor.b32 	%r3, %r2, 128;
	{code}
	ret;
}}
"""
    address = values.ctypes.data
    memory = GlobalMemory([(address, values.nbytes)])
    machine = Machine(
        Program.parse(text), {"kernel_param_0": address}, (1, 1, 1), range(1), memory, shared_bytes
    )
    machine.run(ARITHMETIC | DATA_MOVEMENT | TENSOR_CORES)


PUBLISH = "mov.b32 %r7, 1; setp.eq.s32 %p2, %r1, 0; @%p2 atom.global.gpu.acq_rel.add.u32 %r6,"
"""Thread 0 adds 1 to the word behind the threads' values; what follows is its address."""


def run_two(code: str) -> np.ndarray:
    """Runs two programs, the second one after the first, with the order of their accesses. %p1 is
    true in the second. %r1 is the thread, %rd1 the address of its value, which both share, and %rd0
    that of a word. Returns the values."""
    text = f""".visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid {THREADS}
{{
	ld.param.b64 	%rd0, [kernel_param_0];
	mov.u32 	%r1, %tid.x;
	mov.u32 	%r2, %ctaid.x;
	setp.eq.s32 	%p1, %r2, 1;
	mad.wide.u32 	%rd1, %r1, 4, %rd0;
	add.s64 	%rd1, %rd1, 4;
	{code}
	ret;
}}
"""
    values = np.zeros(THREADS + 1, np.uint32)
    address, program = values.ctypes.data, Program.parse(text)
    memory = GlobalMemory([(address, values.nbytes)])
    order = GlobalOrder(memory.ranges, 2)
    for index in range(2):
        machine = Machine(
            program, {"kernel_param_0": address}, (2, 1, 1), [index], memory, 0, order
        )
        machine.run(ARITHMETIC | DATA_MOVEMENT)
    return values


def run_dependent(code: str) -> None:
    """Runs a program that starts while earlier launches run, which write the word of %rd1."""
    values = numbers()
    earlier = EarlierLaunches()
    earlier.note(values.ctypes.data + 4, 4)
    text = f""".visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0
)
.reqntid 32
{{
	ld.param.b64 	%rd0, [kernel_param_0];
	add.s64 	%rd1, %rd0, 4;
	{code}
	ret;
}}
"""
    address = values.ctypes.data
    memory = GlobalMemory([(address, values.nbytes)])
    machine = Machine(
        Program.parse(text), {"kernel_param_0": address}, (1, 1, 1), [0], memory, 64, None, earlier
    )
    machine.run(ARITHMETIC | DATA_MOVEMENT)


def test_a_dependent_launch_loads_parameters_before_it_waits() -> None:
    run_dependent(
        """ld.global.b32 %r1, [%rd0]; griddepcontrol.wait; griddepcontrol.launch_dependents;
        ld.global.b32 %r2, [%rd1]; st.global.b32 [%rd1], %r1;"""
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("ld.global.b32 %r1, [%rd1]; griddepcontrol.wait;", "load what an earlier launch writes"),
        (
            "cp.async.ca.shared.global [global_smem], [%rd1], 0x4; griddepcontrol.wait;",
            "load what an earlier launch writes",
        ),
        ("mov.b32 %r1, 0; st.global.b32 [%rd0], %r1; griddepcontrol.wait;", "a store before"),
        ("ld.global.b32 %r1, [%rd0];", "threads end without"),
        (
            "mov.u32 %r1, %tid.x; setp.lt.s32 %p1, %r1, 9; @%p1 griddepcontrol.wait;",
            "threads end without",
        ),
    ],
)  # fmt: skip
def test_what_a_dependent_launch_must_not_do(code: str, error: str) -> None:
    with pytest.raises(MachineError, match=error):
        run_dependent(code)


def test_programs_meet_by_atomic_additions() -> None:
    """The second reads what the other warp of the first has stored, after both have counted."""
    values = run_two(
        f"""@!%p1 st.global.b32 [%rd1], %r1; bar.sync 0; {PUBLISH} [%rd0], %r7; bar.sync 0;
        xor.b32 %r4, %r1, 32; mad.wide.u32 %rd2, %r4, 4, %rd0;
        @%p1 ld.global.b32 %r5, [%rd2+4]; @%p1 st.global.b32 [%rd2+4], %r5;"""
    )
    assert values.tolist() == [2, *range(THREADS)]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("st.global.b32 [%rd1], %r1;", "of another program are stored in any order"),
        (
            "@!%p1 st.global.b32 [%rd1], %r1; @%p1 ld.global.b32 %r4, [%rd1];",
            "of another program are loaded in any order",
        ),
        (
            "@!%p1 ld.global.b32 %r4, [%rd1]; @%p1 st.global.b32 [%rd1], %r1;",
            "of another program are stored in any order",
        ),
        (
            f"@!%p1 st.global.b32 [%rd1], %r1; {PUBLISH} [%rd0], %r7; bar.sync 0;"
            "@%p1 ld.global.b32 %r4, [%rd1];",
            "of another program are loaded in any order",
        ),
        (
            f"@!%p1 st.global.b32 [%rd1], %r1; bar.sync 0; {PUBLISH} [%rd0], %r7;"
            "@%p1 ld.global.b32 %r4, [%rd1];",
            "of another program are loaded in any order",
        ),
        (
            "st.global.b32 [%rd1], %r1; xor.b32 %r4, %r1, 32; mad.wide.u32 %rd2, %r4, 4, %rd0;"
            "ld.global.b32 %r5, [%rd2+4];",
            "of another warp are loaded too early",
        ),
    ],
)  # fmt: skip
def test_an_order_that_is_chance(code: str, error: str) -> None:
    with pytest.raises(MachineError, match=error):
        run_two(code)


def numbers(count: int = THREADS) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def test_words_pass_from_warp_to_warp_by_a_barrier() -> None:
    values = numbers()
    run(
        """ld.global.b32 %r4, [%rd1]; st.shared.b32 [%r2], %r4; bar.sync 0;
        ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd1], %r4;""",
        values,
    )
    assert values.tolist() == np.roll(numbers(), THREADS // 2).tolist()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("st.shared.b32 [%r2], %r1; ld.shared.b32 %r4, [%r3];", "read before a barrier"),
        ("ld.shared.b32 %r4, [%r3]; st.shared.b32 [%r2], %r1;", "written while it is read"),
        ("st.shared.b32 [%r2], %r1; st.shared.b32 [%r3], %r1;", "written by two warps"),
        ("mov.b32 %r4, global_smem; st.shared.b32 [%r4], %r1;", "different values to one place"),
        ("cvt.u16.u32 %rs1, %r1; st.shared.b16 [%r2], %rs1; st.shared.b16 [%r3], %rs1;", "by two"),
        (
            "cp.async.ca.shared.global [%r2], [%rd1], 0x4; cp.async.commit_group;"
            "cp.async.wait_group 0; ld.shared.b32 %r4, [%r3];",
            "read before a barrier",
        ),
        ("setp.lt.s32 %p1, %r1, 40; @%p1 bar.sync 0;", "not all threads"),
        ("setp.lt.s32 %p1, %r1, 40; @%p1 shfl.sync.idx.b32 %r4, %r1, 0, 31, -1;", "not by all 32"),
        ("ld.global.b32 %r4, [%rd1+4];", "1 threads outside all tensors"),
        ("st.global.b32 [%rd1+-4], %r1;", "1 threads outside all tensors"),
        ("cp.async.ca.shared.global [%r2], [%rd1+4], 0x4;", "1 threads outside all tensors"),
        ("ld.global.b32 %r4, [%rd1+2];", "not a multiple of 4"),
        ("ld.shared.v2.b32 {%r4, %r5}, [%r2];", "not a multiple of 8"),
        ("ld.shared.b32 %r4, [%r2+4];", "outside the 256 bytes"),
    ],
)  # fmt: skip
def test_what_only_chance_makes_right(code: str, error: str) -> None:
    with pytest.raises(MachineError, match=error):
        run(code, numbers())


def test_a_copy_is_there_when_it_was_waited_for() -> None:
    """Of two copies the first is there. Data is not visible at a barrier before the wait."""
    values, second = numbers(2 * THREADS), 4 * THREADS
    run(
        f"""setp.lt.s32 %p1, %r1, 32; mov.b32 %r4, 0; selp.b32 %r5, 4, 0, %p1;
        cp.async.ca.shared.global [%r2], [%rd1], 0x4, %r5; cp.async.commit_group;
        cp.async.ca.shared.global [%r2], [%rd1+{second}], 0x4; cp.async.commit_group;
        ld.shared.b32 %r6, [%r2]; cp.async.wait_group 1; ld.shared.b32 %r7, [%r2];
        st.global.b32 [%rd1], %r6; st.global.b32 [%rd1+{second}], %r7;""",
        values,
    )
    assert values[:THREADS].tolist() == [NAN] * THREADS
    assert values[THREADS:].tolist() == [*range(32), *[0] * 32]


# A product of %r8 to %r11 with the first 1024 bytes of shared memory, added to %r4 to %r7.
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
    " {%r4, %r5, %r6, %r7}, {%r8, %r9, %r10, %r11}, %rd2, %p1, 1, 1, 0;"
)
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"


def run_products(code: str) -> None:
    descriptor = 1 << 62 | SHARED_START >> 4
    operands = (
        f"mov.b64 %rd2, {descriptor}; setp.ge.s32 %p1, %r1, 0; mov.b32 %r8, 0; mov.b32 %r4, 0;"
    )
    run(operands + code, numbers(WARP_GROUP), WARP_GROUP, 1024)


def test_products_add_up_without_a_wait_and_are_there_after_it() -> None:
    touch_all = "mov.b32 %r12, %r4; mov.b32 %r8, 1; bar.sync 0; st.shared.b32 [%r2], %r1;"
    run_products(
        f"{FENCE} {PRODUCT} {COMMIT} {PRODUCT} {COMMIT} mov.b32 %r12, %r8;"
        f"wgmma.wait_group.sync.aligned 0; {touch_all}"
    )


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (f"{PRODUCT} {COMMIT} mov.b32 %r12, %r4;", "%r4 is the result of a product"),
        (f"{PRODUCT} {COMMIT} mov.b32 %r4, 0;", "%r4 is the result of a product"),
        (f"{PRODUCT} {COMMIT} mov.b32 %r8, 1;", "%r8 is an operand of a product"),
        (
            f"{PRODUCT} {COMMIT} bar.sync 0; st.shared.b32 [%r2], %r1;",
            "a product that was not waited for reads",
        ),
        (
            f"{PRODUCT} {COMMIT} wgmma.wait_group.sync.aligned 1; mov.b32 %r12, %r4;",
            "%r4 is the result of a product",
        ),
        (f"mov.b32 %r9, 1; {PRODUCT}", "%r9 was written after the last wgmma.fence"),
    ],
)
def test_products_under_way_are_not_disturbed(code: str, error: str) -> None:
    with pytest.raises(MachineError, match=error):
        run_products(FENCE + code)


def test_threads_that_part_meet_again() -> None:
    values = numbers()
    run(
        """mov.b32 %r4, 0;
LOOP:
        add.s32 %r4, %r4, 1; setp.le.s32 %p1, %r4, %r1; @%p1 bra LOOP;
        bar.sync 0; st.global.b32 [%rd1], %r4;""",
        values,
    )
    assert values.tolist() == list(range(1, THREADS + 1))


def test_zeros_have_an_order() -> None:
    values = numbers()
    run(
        """mov.b32 %r4, 0x80000000; mov.b32 %r5, 0; min.f32 %r6, %r4, %r5; max.f32 %r7, %r5, %r4;
        sub.s32 %r6, %r6, %r7; st.global.b32 [%rd1], %r6;""",
        values,
    )
    assert set(values.tolist()) == {0x80000000}


@pytest.mark.parametrize("code", ["sqrt.rn.f32 %r4, %r1", "add.sat.s32 %r4, %r1, %r1"])
def test_code_that_it_does_not_know(code: str) -> None:
    with pytest.raises(UnknownCode, match=code):
        run(f"{code};", numbers())
