"""How long a program takes when each of its warps has a scheduler to itself.

No number of multiprocessors makes a program faster than that. It bounds kernels with few programs,
or with so few warps on a multiprocessor that its schedulers wait for results.

A warp issues in order. The compiler writes into each instruction how many cycles the next one has
to wait, and for what else it must wait: a barrier, one of six, is busy until the result of the
instruction that set it is there. So only latencies have to be assumed. `LATENCIES` are about what
microbenchmarks of Hopper found (Luo et al., "Dissecting the NVIDIA Hopper Architecture"). Data that
asynchronous copies bring is there when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

from machine_code import SCHEDULERS, Instruction, parts, pipe_cycles

LATENCIES = {
    "LDG": 480, "ATOMG": 700, "LDS": 29, "LDSM": 33, "SHFL": 24, "MUFU": 24, "LDC": 40, "S2R": 25,
    "S2UR": 25,
}  # fmt: skip
"""Cycles from an instruction to its result, of those that set a barrier."""
OTHER_LATENCY = 20
BARRIER_CYCLES = 25
"""Of a barrier of all warps, if they arrive together."""
OPERANDS_READ = 12
"""Cycles until a store or a copy has read its registers."""
PRODUCT_LATENCY = 30
"""Cycles from the end of a `wgmma` to what waits for it."""


def program_cycles(code: str, architecture: int, trips: Sequence[float]) -> float:
    """trips and errors: see `machine_code.costs`."""
    return sum(
        runs * _cycles(part, architecture, is_loop=runs > 1) for part, runs in parts(code, trips)
    )


def _cycles(part: Sequence[Instruction], architecture: int, is_loop: bool) -> float:
    """Of a loop, the time of the second of two iterations, when the first's results are on their
    way."""
    now = product_done = first = 0.0
    free = [0.0] * 6
    for _ in range(2 if is_loop else 1):
        first = now
        for one in part:
            busy = [free[number] for number in range(6) if one.control >> 11 + number & 1]
            now = max([now, *busy])
            if one.operation == "HGMMA":
                # All four tensor cores work for it, one for each warp of the group.
                took = SCHEDULERS * dict(pipe_cycles(one.name, architecture))["tensor"]
                product_done = max(now, product_done) + took
            elif one.name.startswith("WARPGROUP.DEPBAR"):
                now = max(now, product_done + PRODUCT_LATENCY)
            elif one.operation == "BAR":
                now += BARRIER_CYCLES
            result, operands = one.control >> 5 & 7, one.control >> 8 & 7
            if result < 6:
                free[result] = now + LATENCIES.get(one.operation, OTHER_LATENCY)
            if operands < 6:
                free[operands] = now + OPERANDS_READ
            now += max(1, one.control & 15)
    return now - first
