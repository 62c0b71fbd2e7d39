"""What a kernel's machine code costs a multiprocessor, in cycles of its pipes.

`costs` counts the instructions that one program executes: each once, and those of a loop as often
as the loop runs, which the caller says. A multiprocessor has four schedulers. Each starts one
instruction of a warp in a cycle, and each pipe takes a number of lanes in a cycle.

`LANES` has NVIDIA's numbers: "Throughput of Native Arithmetic Instructions" in the CUDA C++ Best
Practices Guide, for compute capability 8.0 and 9.0. These are assumptions of ours beside them:

- Packed conversions of two float32 to 16 bits (F2FP) and of integers that fit (I2FP) run at the
  rate of logic, 64. All other conversions run at 16, where the guide has them.
- Integer products (IMAD, also as a move or a shift) take the float32 pipe as well: on 9.0 one half
  of it.
- Shared memory moves 128 bytes in a cycle, and a copy to it from global memory is a store.
- On 9.0 `mma` (HMMA) gets 0.63 of the rate of `wgmma` (HGMMA), as microbenchmarks found.
- Branches execute what they could jump over, except calls of functions, which are the slow ways
  of divisions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

SCHEDULERS = 4
LANES = {
    80: {"fp32": 64, "imad": 64, "half": 128, "alu": 64, "special": 16},
    90: {"fp32": 128, "imad": 64, "half": 128, "alu": 64, "special": 16},
}
"""Lanes that a pipe of a multiprocessor takes in a cycle, by architecture. "special" is for
transcendental functions and conversions."""
SHARED_BYTES_A_CYCLE = 128
PRODUCTS = {80: 1024, 90: 2048}
"""Products of 16-bit numbers that a multiprocessor's tensor cores add up in a cycle."""
MMA_SHARE = {80: 1.0, 90: 0.63}
"""Share of that rate which HMMA gets."""

_PIPES = {
    "fp32": "FFMA FMUL FADD FSWZADD",
    "imad": "IMAD IMUL",
    "half": "HFMA2 HADD2 HMUL2 HMNMX2 HSET2 HSETP2",
    "alu": "LOP3 LOP SHF SHL SHR IADD3 IADD VIADD VIADDMNMX VIMNMX IMNMX LEA ISETP SEL FSEL FMNMX "
    "FSET FSETP FCHK PRMT MOV I2FP F2FP PLOP3 SGXT BMSK IABS VABSDIFF P2R R2P CS2R IDP LOP32I",
    "special": "MUFU I2F F2I F2F I2I FRND POPC FLO BREV R2UR S2R",
    "lsu": "LDS STS LDSM STSM LDGSTS LDG STG LDL STL LD ST ATOM ATOMS ATOMG RED SHFL REDUX LDC "
    "UTMALDG",
    "tensor": "HMMA HGMMA QGMMA IGMMA IMMA",
}
_PIPE_OF = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}
_GLOBAL = frozenset({"LDG", "STG", "LDGSTS"})
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}  # bytes of a lane
_TENSOR_SHAPES = {"16816": (16, 8, 16), "1688": (16, 8, 8), "16832": (16, 8, 32)}


@dataclass(frozen=True)
class Instruction:
    address: int
    name: str
    """With its modifiers: "LDGSTS.E.BYPASS.128"."""
    target: int | None
    """Where a branch or a call goes."""
    control: int
    """What the compiler tells the scheduler: 4 bits with the cycles until the warp's next
    instruction, 1 bit that does not matter here, twice 3 bits with the barrier that the result or
    the reading of the operands sets (7: none), and 6 bits with the barriers that must be free."""

    @property
    def operation(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Loop:
    """Addresses of the first and of the last instruction."""

    first: int
    last: int

    def has(self, address: int) -> bool:
        return self.first <= address <= self.last


@dataclass(frozen=True)
class Costs:
    """What a program costs.

    cycles: of a multiprocessor, by pipe, the schedulers among them.
    global_bytes: that its loads, copies and stores of global memory move, from caches as well, and
        those of lanes that a mask switches off.
    """

    cycles: dict[str, float]
    global_bytes: float

    @property
    def instruction_pipe(self) -> str:
        """The busiest pipe, the tensor cores apart."""
        return max(sorted(self.cycles.keys() - {"tensor"}), key=lambda pipe: self.cycles[pipe])

    @property
    def issue(self) -> float:
        """Cycles of the busiest pipe, the tensor cores apart: no less can execute them."""
        return self.cycles[self.instruction_pipe]

    @property
    def tensor(self) -> float:
        return self.cycles.get("tensor", 0.0)


@cache
def executed(code: str) -> tuple[Instruction, ...]:
    """The instructions of a kernel, without functions that it may call and without the branches
    around such calls."""
    found = [_instruction(line) for line in code.splitlines()]
    # The kernel itself ends with a branch to itself. Behind it are functions, and padding.
    end = min(
        (one.address for one in found if one.operation == "BRA" and one.target == one.address),
        default=found[-1].address,
    )
    branches = [
        range(one.address + 1, one.target)
        for one in found
        if one.operation == "BRA" and one.target is not None and one.target > one.address
    ]
    # The innermost branch around each call of a function.
    rare = [
        min((span for span in branches if one.address in span), key=len, default=range(0))
        for one in found
        if one.operation == "CALL" and one.target is not None and one.target > end
    ]
    return tuple(
        one
        for one in found
        if one.address <= end
        and one.operation != "NOP"
        and not any(one.address in span for span in rare)
    )


def loops(code: str) -> list[Loop]:
    """The loops, in the order of their first instructions. A loop is what a backward branch jumps
    over; branches to one place are one loop."""
    lasts: dict[int, int] = {}
    for one in executed(code):
        if one.operation == "BRA" and one.target is not None and one.target < one.address:
            lasts[one.target] = max(one.address, lasts.get(one.target, 0))
    return [Loop(first, lasts[first]) for first in sorted(lasts)]


def costs(code: str, architecture: int, num_warps: int, trips: Sequence[float]) -> Costs:
    """What one program costs.

    trips: how often each of `loops` runs, each time that it is reached.

    Raises:
        ValueError: the code has another number of loops.
    """
    cycles: dict[str, float] = {"schedulers": 0.0}
    global_bytes = 0.0
    for part, runs in parts(code, trips):
        times = num_warps * runs
        for one in part:
            for pipe, number in pipe_cycles(one.name, architecture):
                cycles[pipe] = cycles.get(pipe, 0.0) + number * times
            if one.operation in _GLOBAL:
                global_bytes += 32 * _width(one.name) * times
    return Costs(cycles, global_bytes)


def parts(code: str, trips: Sequence[float]) -> list[tuple[list[Instruction], float]]:
    """The instructions outside of loops, and those of each loop without the loops in it; and how
    often they run. Arguments and errors as of `costs`."""
    found = loops(code)
    if len(found) != len(trips):
        lengths = [sum(loop.has(one.address) for one in executed(code)) for loop in found]
        raise ValueError(
            f"the code has {len(found)} loops, of {lengths} instructions; the case says how often "
            f"{len(trips)} run: {list(trips)}"
        )
    by_loops: dict[tuple[int, ...], list[Instruction]] = {}
    for one in executed(code):
        around = tuple(n for n, loop in enumerate(found) if loop.has(one.address))
        by_loops.setdefault(around, []).append(one)
    return [(part, prod(trips[n] for n in around)) for around, part in by_loops.items()]


@cache
def pipe_cycles(name: str, architecture: int) -> list[tuple[str, float]]:
    """Cycles of a multiprocessor's pipes for one instruction of one warp."""
    operation = name.partition(".")[0]
    lanes = LANES[architecture]
    taken = [("schedulers", 1 / SCHEDULERS)]
    pipe = _PIPE_OF.get(operation)
    if pipe in lanes:
        taken.append((pipe, 32 / lanes[pipe]))
    if pipe == "imad":
        taken.append(("fp32", 32 / lanes["fp32"]))
    if pipe == "lsu":
        taken.append((pipe, _lsu_cycles(operation, name)))
    if pipe == "tensor":
        taken.append((pipe, _tensor_cycles(operation, name, architecture)))
    return taken


def _lsu_cycles(operation: str, name: str) -> float:
    if operation in ("LDSM", "STSM"):  # matrices of 8 rows of 16 bytes
        return max([int(part) for part in name.split(".") if part in ("2", "4")], default=1)
    return max(1.0, 32 * _width(name) / SHARED_BYTES_A_CYCLE)


def _width(name: str) -> int:
    """Bytes that a lane moves."""
    return next((_WIDTHS[part] for part in name.split(".") if part in _WIDTHS), 4)


def _tensor_cycles(operation: str, name: str, architecture: int) -> float:
    wide = re.search(r"\.(\d+)x(\d+)x(\d+)", name)
    if wide:  # of a group of four warps, of which each has this instruction
        rows, columns, inner = map(int, wide.groups())
        rows //= 4
    else:
        named = [part for part in name.split(".") if part in _TENSOR_SHAPES]
        rows, columns, inner = _TENSOR_SHAPES[named[0]]
    bytes_of_inner = 1 if operation in ("QGMMA", "IGMMA", "IMMA") else 4 if "TF32" in name else 2
    share = 1.0 if wide else MMA_SHARE[architecture]
    return rows * columns * inner * bytes_of_inner / 2 / PRODUCTS[architecture] / share


def _instruction(line: str) -> Instruction:
    address, control, *words = line.split()
    if words[0].startswith("@"):
        words = words[1:]
    goes = words[0].startswith(("BRA", "CALL"))
    target = re.search(r"0x([0-9a-f]+)", line) if goes else None
    return Instruction(
        int(address, 16), words[0], int(target[1], 16) if target else None, int(control, 16)
    )
