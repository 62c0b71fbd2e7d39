"""What the kernels of `cost_cases` cost, counted from their machine code.

``make costs`` runs this file. It counts them with the Triton that Python finds, and writes the
counts into ``COUNTS``, beside those of other versions. A test compares the machine code with them,
and `gpu_page` makes tables of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ahead_of_time import CompiledKernel, Launch, compile_launches
from cost_cases import CASES, Case, Work
from machine_code import costs
from warp_time import program_cycles

COUNTS = Path(__file__).parents[1] / "kernels" / "gpu" / "kernel_costs.json"
ARCHITECTURES = (80, 90)


@dataclass(frozen=True)
class Count:
    """One kernel of a case's launch.

    registers, stack_bytes: of a thread. shared_bytes: of a program.
    resident: programs that a multiprocessor holds at a time.
    programs, memory_bytes, cache_bytes: see `cost_cases.Work`.
    issue, tensor: cycles of a multiprocessor for one program. pipe: what takes the ``issue``.
    alone: cycles of one program whose warps have schedulers of their own (`warp_time`).
    moved_bytes: of one program, see `machine_code.Costs.global_bytes`.
    """

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    resident: int
    programs: int
    issue: int
    pipe: str
    tensor: int
    alone: int
    moved_bytes: int
    memory_bytes: int
    cache_bytes: int


def count(cases: Sequence[Case], architecture: int) -> dict[str, list[Count]]:
    """Compiles each launch, and counts its kernels: by the cases' names."""
    launches = [Launch(case.function, architecture, case.arguments) for case in cases]
    return {
        str(case): [
            _count(kernel, work) for kernel, work in zip(kernels, case.works(kernels), strict=True)
        ]
        for case, kernels in zip(cases, compile_launches(launches), strict=True)
    }


def _count(kernel: CompiledKernel, work: Work) -> Count:
    cost = costs(kernel.code, kernel.architecture, kernel.num_warps, work.trips)
    return Count(
        kernel=kernel.name,
        registers=kernel.registers,
        stack_bytes=kernel.stack_bytes,
        shared_bytes=kernel.shared_bytes,
        resident=kernel.resident_programs,
        programs=round(work.programs),
        issue=round(cost.issue),
        pipe=cost.instruction_pipe,
        tensor=round(cost.tensor),
        alone=round(program_cycles(kernel.code, kernel.architecture, work.trips)),
        moved_bytes=round(cost.global_bytes),
        memory_bytes=round(work.memory_bytes),
        cache_bytes=round(work.cache_bytes),
    )


def read_counts() -> dict[str, dict[int, dict[str, list[Count]]]]:
    """What was counted: by Triton's version, architecture and case."""
    return {
        version: {
            int(architecture): {
                case: [Count(**kernel) for kernel in kernels] for case, kernels in cases.items()
            }
            for architecture, cases in architectures.items()
        }
        for version, architectures in json.loads(COUNTS.read_text(encoding="utf-8")).items()
    }


def _write_counts(counts: dict[str, dict[int, dict[str, list[Count]]]]) -> None:
    """One kernel a line, so that changes are easy to see."""
    versions = []
    for version, architectures in sorted(counts.items()):
        written = []
        for architecture, cases in architectures.items():
            lines = [
                f"   {json.dumps(case, ensure_ascii=False)}: [\n    "
                + ",\n    ".join(json.dumps(asdict(kernel)) for kernel in kernels)
                + "]"
                for case, kernels in cases.items()
            ]
            written.append(f'  "{architecture}": {{\n' + ",\n".join(lines) + "}")
        versions.append(f' "{version}": {{\n' + ",\n".join(written) + "}")
    COUNTS.write_text("{\n" + ",\n".join(versions) + "}\n", encoding="utf-8")


def main() -> None:
    import triton

    counts = read_counts() if COUNTS.exists() else {}
    counts[triton.__version__] = {
        architecture: count(CASES, architecture) for architecture in ARCHITECTURES
    }
    _write_counts(counts)


if __name__ == "__main__":
    main()
