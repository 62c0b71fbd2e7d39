"""Writes the tables of docs/gpu.md from what `kernel_costs` counted: what bounds each kernel.

``make docs`` runs it. A test fails if the page differs from its output. The text around the tables
is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from ahead_of_time import MULTIPROCESSORS
from cost_cases import CASES, Case
from kernel_costs import Count, read_counts

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
VERSION = "3.6.0"
"""Of Triton, as the GPUs had it that were measured."""
FAR = 1.5
"""A measured time that is so many times the least time is marked."""
# Each table is between a pair of these lines.
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class GPU:
    """Rates are of bytes a second: of reading device memory as measured, of reading the L2 cache as
    others published it. clock_hz is the usual boost clock."""

    memory_rate: float
    architecture: int = 90
    clock_hz: float = 1.755e9
    cache_rate: float = 5.5e12


GPUS = {"H200": GPU(4.3e12), "H100": GPU(3.06e12)}


@dataclass(frozen=True)
class Bounds:
    """Seconds that each takes for a launch."""

    issue: float
    tensor: float
    cache: float
    memory: float
    alone: float

    @property
    def least(self) -> float:
        """If all work at the same time."""
        return max(self.issue, self.tensor, self.cache, self.memory, self.alone)

    @property
    def in_turn(self) -> float:
        """If instructions, tensor cores and memory never work at the same time."""
        return max(self.issue, self.alone) + self.tensor + self.memory


def bounds(kernels: Sequence[Count], gpu: GPU) -> Bounds:
    """The busiest multiprocessor takes the time. Kernels of one launch run one after the other."""
    shares = [ceil(one.programs / MULTIPROCESSORS[gpu.architecture]) for one in kernels]
    parts = list(zip(shares, kernels, strict=True))
    return Bounds(
        sum(share * one.issue for share, one in parts) / gpu.clock_hz,
        sum(share * one.tensor for share, one in parts) / gpu.clock_hz,
        sum(one.cache_bytes for one in kernels) / gpu.cache_rate,
        sum(one.memory_bytes for one in kernels) / gpu.memory_rate,
        sum(ceil(share / one.resident) * one.alone for share, one in parts) / gpu.clock_hz,
    )


def with_tables(page: str) -> str:
    """Returns the page with new tables.

    Raises:
        ValueError: the page has no place for one of them, or for one more.
    """
    counts = read_counts()[VERSION][90]
    kernels = [(case, counts[str(case)]) for case in CASES]
    tables = {"costs": _costs_table(kernels), "times": _times_table(kernels)}
    found = [match[2] for match in _TABLE.finditer(page)]
    if sorted(found) != sorted(tables):
        raise ValueError(f"{PAGE}: the tables are {found}, not {list(tables)}")
    return _TABLE.sub(lambda match: match[1] + tables[match[2]] + match[3], page)


def _costs_table(kernels: Sequence[tuple[Case, Sequence[Count]]]) -> str:
    gpu, rows = GPUS["H200"], []
    for case, counts in kernels:
        found, main = bounds(counts, gpu), counts[0]
        times = [found.issue, found.tensor, found.memory, found.cache, found.alone]
        thousands = [_number(time * gpu.clock_hz / 1000) for time in times]
        megabytes = _number(sum(one.memory_bytes for one in counts) / 1e6)
        row = [case.name, case.shape, megabytes, str(main.registers), str(main.resident)]
        row += [f"{thousands[0]} ({main.pipe})", *thousands[1:]]
        rows.append([*row, f"{found.issue / found.memory:.2f}"])
    heads = [
        "kernel", "launch", "MB", "registers", "programs", "issue", "tensor", "memory", "L2",
        "alone", "issue / memory",
    ]  # fmt: skip
    return _markdown(heads, rows)


def _times_table(kernels: Sequence[tuple[Case, Sequence[Count]]]) -> str:
    rows = []
    for case, counts in kernels:
        if not case.measured:
            continue
        row = [case.name, case.shape]
        for name, gpu in GPUS.items():
            found, measured = bounds(counts, gpu), case.measured.get(name)
            row += [_number(1e6 * found.least), _number(1e6 * found.in_turn)]
            row += _against(1e6 * found.least, measured)
        rows.append(row)
    heads = [head for name in GPUS for head in (f"{name}, µs: least", "in turn", "measured", "×")]
    return _markdown(["kernel", "launch", *heads], rows)


def _against(least: float, measured: float | None) -> tuple[str, str]:
    if measured is None:
        return "", ""
    ratio = f"{measured / least:.2f}"
    return f"{measured:g}", f"**{ratio}**" if measured > FAR * least else ratio


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
