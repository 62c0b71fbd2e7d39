"""Phase "correctness": every kernel over its list of cases, against the float64 references."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import attention_cases
import choice_cases
import experts_cases
import linear_cases
import quantized_cases
import rowwise_cases
import torch
from fastserve_kernels import ops
from kernel_cases import Case

from benchmarks.gpu.case_runs import CaseRuns
from benchmarks.gpu.check_device import find_device
from benchmarks.gpu.phase_context import CheckFailed, Context, one_line

# Compiling a kernel for each case keeps one core busy and the device idle. Each process takes half
# a GiB of the device for its context.
MOST_PROCESSES = 14
CORES_OF_PARITY = 4  # which runs beside this phase
MOST_FAILURES_SHOWN = 5
DRY_RUN_CASE = 2  # of each operation's cases: neither empty nor large


@dataclass(frozen=True)
class Outcome:
    """Result of one comparison of one case."""

    operation: str
    text: str
    error: float
    limit: float
    reason: str = ""
    """What a case raised."""

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit  # NaN counts as wrong


def run(context: Context) -> None:
    cases = _cases()
    indices = _dry_run_indices(cases) if context.tiny else list(range(len(cases)))
    check = partial(outcomes_of, tiny=context.tiny)
    outcomes: list[Outcome] = []
    num_cores = len(os.sched_getaffinity(0))
    # At least half of the cores: a machine of few should not wait for parity's.
    num_processes = min(MOST_PROCESSES, max(num_cores - CORES_OF_PARITY, -(-num_cores // 2)))
    with CaseRuns(check, indices, 1 if context.tiny else num_processes) as runs:
        for some in runs.results(context.ends_s):
            outcomes += some
        # Reported before hanging cases are killed, which may take the rest of the process's time.
        _record(context, outcomes)
        missing = _missing(runs, cases)
    wrong = _wrong(outcomes)
    if wrong or missing:
        raise CheckFailed("; ".join(filter(None, (wrong, missing))))
    if not outcomes:
        raise CheckFailed("no case was compared")


def _record(context: Context, outcomes: Sequence[Outcome]) -> None:
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


def _wrong(outcomes: Sequence[Outcome]) -> str:
    """Summary of the wrong comparisons; empty if all are right."""
    wrong = [one for one in outcomes if not one.is_right]
    for one in wrong[:MOST_FAILURES_SHOWN]:
        print(f"  wrong: {one.text}: {one.reason or f'{one.error:.2e} > {one.limit:g}'}")
    if not wrong:
        return ""
    counts = Counter(one.operation for one in wrong)
    return (
        f"{len(wrong)} of {len(outcomes)} comparisons are wrong: "
        + ", ".join(f"{count} of {operation}" for operation, count in counts.items())
        + f"; the first: {wrong[0].text}: {wrong[0].reason or f'error {wrong[0].error:.2e}'}"
    )


def _missing(runs: CaseRuns[list[Outcome]], cases: Sequence[Case]) -> str:
    """Names the cases that did not end in time; empty if all did. It is the only sign of a kernel
    that hangs or has ended its process."""
    if runs.num_unfinished == 0:
        return ""
    under_way = ", ".join(str(cases[index]) for index in runs.under_way)
    return f"the time ended before {runs.num_unfinished} cases had; begun: {under_way or 'none'}"


def _dry_run_indices(cases: Sequence[Case]) -> list[int]:
    """One case for each operation, in float32, which the interpreter computes correctly."""
    indices: dict[str, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        if "-float32-" in str(case):
            indices[case.operation].append(index)
    return [some[DRY_RUN_CASE] for some in indices.values()]


def outcomes_of(index: int, *, tiny: bool) -> list[Outcome]:
    """Outcomes of the case with this index; a case that raises has failed.

    A kernel that faults ends this process, which has lost its device.
    """
    torch.set_num_threads(1)  # the references' too
    if tiny:
        ops.set_cpu_backend("triton")  # of this process alone
    case = _cases()[index]
    try:
        device = find_device(tiny=tiny)
        with torch.inference_mode():
            return [
                Outcome(case.operation, f"{case}, {one.what}", one.error, one.limit)
                for one in case.run(device.torch_device)
            ]
    except Exception as error:
        reason = one_line(error)
    try:
        find_device(tiny=tiny).synchronize()
    except RuntimeError:
        print(f"  the device is lost for the process of {case}: {reason}", flush=True)
        os._exit(1)
    return [Outcome(case.operation, str(case), math.inf, 0.0, reason)]


@cache
def _cases() -> list[Case]:
    modules = (
        attention_cases,
        choice_cases,
        experts_cases,
        linear_cases,
        quantized_cases,
        rowwise_cases,
    )
    return [case for module in modules for case in module.cases()]
