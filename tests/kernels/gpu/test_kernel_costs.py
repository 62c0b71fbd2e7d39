"""What each kernel's machine code costs may not grow: registers, instructions and bytes.

Budgets are counts that were written down, for the same or for other versions of Triton, and a bit
more. If a change means to cost more, or costs less, ``make costs`` writes the new counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import triton
from cost_cases import CASES
from kernel_costs import ARCHITECTURES, Count, count, read_counts

TOLERANCE = 0.07
COUNTED = ("registers", "shared_bytes", "issue", "tensor", "alone", "moved_bytes")
HOW = "`make costs` writes new counts, if they are meant"


@cache
def counted(architecture: int) -> dict[str, list[Count]]:
    return count(CASES, architecture)


@cache
def written(architecture: int) -> dict[str, dict[str, list[Count]]]:
    """By Triton's version and case."""
    return {version: counts[architecture] for version, counts in read_counts().items()}


@pytest.mark.parametrize("case", list(map(str, CASES)))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_costs_stay_within_budgets(architecture: int, case: str) -> None:
    found = counted(architecture)[case]
    names = [kernel.kernel for kernel in found]
    versions = {
        version: counts[case]
        for version, counts in written(architecture).items()
        if [kernel.kernel for kernel in counts.get(case, [])] == names
    }
    assert versions, f"no counts of {names} are written down; {HOW}"
    changes = []
    for number, now in enumerate(found):
        changes += growth(now, [counts[number] for counts in versions.values()])
        if triton.__version__ in versions:
            changes += shrinkage(now, versions[triton.__version__][number])
    assert not changes, "\n".join([*changes, HOW])


def growth(now: Count, written_down: Sequence[Count]) -> list[str]:
    spilled = max(then.stack_bytes for then in written_down)
    lines = []
    if now.stack_bytes > spilled:
        lines.append(f"{now.kernel}: {now.stack_bytes} bytes are spilled, not {spilled}")
    for name in COUNTED:
        most = max(getattr(then, name) for then in written_down)
        if getattr(now, name) > most * (1 + TOLERANCE):
            lines.append(f"{now.kernel}: {name} grew from {most} to {getattr(now, name)}")
    fewest = min(then.resident for then in written_down)
    if now.resident < fewest:
        lines.append(f"{now.kernel}: {now.resident} programs are resident, not {fewest}")
    return lines


def shrinkage(now: Count, then: Count) -> list[str]:
    """If these stayed, what was gained could be lost again, and docs/gpu.md would be wrong."""
    return [
        f"{now.kernel}: {name} fell from {getattr(then, name)} to {getattr(now, name)}"
        for name in COUNTED
        if getattr(now, name) < getattr(then, name) * (1 - TOLERANCE)
    ]


def test_what_grew_is_named() -> None:
    then = next(iter(read_counts().values()))[90][str(CASES[0])][0]
    now = replace(then, stack_bytes=8, issue=2 * then.issue, resident=then.resident - 1)
    assert [line.split(": ")[1].split()[:2] for line in growth(now, [then])] == [
        ["8", "bytes"],
        ["issue", "grew"],
        [str(now.resident), "programs"],
    ]
    assert growth(then, [then]) == shrinkage(then, then) == []
