"""Phase "correctness": every kernel over its list of cases, against the float64 references."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

import kernel_cases
import rowwise_cases
import torch
from check_device import find_device
from phase_context import CheckFailed, Context, one_line
from rowwise_cases import Case

# Compiling a kernel for each case keeps one core busy and the device idle.
NUM_PROCESSES = 6
MOST_FAILURES_SHOWN = 5
DRY_RUN_CASE = 2  # of each operation's: neither an empty one nor a large one


@dataclass(frozen=True)
class Outcome:
    """Of one comparison of one case."""

    operation: str
    text: str
    error: float
    limit: float
    reason: str = ""
    """Of a case that raised."""

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit  # False for NaN


def run(context: Context) -> None:
    outcomes = _outcomes(context)
    by_operation: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_operation[outcome.operation].append(outcome)
    for operation, some in sorted(by_operation.items()):
        used = [one.error / one.limit for one in some if one.is_right and one.limit]
        context.recorder.row(
            "correctness",
            {"operation": operation},
            {
                "comparisons": len(some),
                "wrong": sum(not one.is_right for one in some),
                "largest error over its limit": max(used, default=0.0),
            },
        )
    wrong = [one for one in outcomes if not one.is_right]
    for one in wrong[:MOST_FAILURES_SHOWN]:
        print(f"  wrong: {one.text}: {one.reason or f'{one.error:.2e} > {one.limit:g}'}")
    if not outcomes:
        raise CheckFailed("no case was compared")
    if wrong:
        counts = Counter(one.operation for one in wrong)
        raise CheckFailed(
            f"{len(wrong)} of {len(outcomes)} comparisons are wrong: "
            + ", ".join(f"{count} of {operation}" for operation, count in counts.items())
            + f"; the first: {wrong[0].text}: {wrong[0].reason or f'error {wrong[0].error:.2e}'}"
        )


def _outcomes(context: Context) -> list[Outcome]:
    """Of all cases; in a dry run of one an operation."""
    indices = _dry_run_indices() if context.tiny else list(range(len(_cases())))
    processes = 1 if context.tiny else NUM_PROCESSES
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = [
            pool.submit(check, indices[first::processes], tiny=context.tiny)
            for first in range(processes)
        ]
        for part in as_completed(parts, timeout=context.left_s()):
            outcomes += part.result()
    return outcomes


def _dry_run_indices() -> list[int]:
    """In float32, which the interpreter computes rightly."""
    indices: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(_cases()):
        if "-float32-" in str(case):
            indices[case.operation].append(index)
    return [some[DRY_RUN_CASE] for some in indices.values()]


def check(indices: Sequence[int], *, tiny: bool) -> list[Outcome]:
    """Runs the cases of these indices; one that raises has failed, and the others go on."""
    device = find_device(tiny=tiny)
    cases = _cases()
    outcomes = []
    for index in indices:
        case = cases[index]
        try:
            with torch.inference_mode():
                outcomes += [
                    Outcome(case.operation, f"{case}, {one.what}", one.error, one.limit)
                    for one in case.run(device.torch_device)
                ]
        except Exception as error:
            reason = one_line(error)
            outcomes.append(Outcome(case.operation, str(case), math.inf, 0.0, reason))
    return outcomes


def _cases() -> list[Case]:
    return [*kernel_cases.cases(), *rowwise_cases.cases()]
