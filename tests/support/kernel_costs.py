"""What bounds each kernel: cycles of instructions, of the tensor cores and of memory, counted from
the machine code of `cost_cases`, and the time that they predict.

``python -m kernel_costs`` in tests/support prints them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ahead_of_time import MULTIPROCESSORS, CompiledKernel, Launch, compile_launches
from cost_cases import CASES, Case, Work
from machine_code import Costs, costs


@dataclass(frozen=True)
class GPU:
    """clock_hz: an assumption, the boost clock of an H100. Rates are of bytes a second: that of
    reading device memory as measured, and that of reading the L2 cache as others published it."""

    architecture: int
    memory_rate: float
    clock_hz: float = 1.755e9
    cache_rate: float = 5.5e12

    @property
    def cycles(self) -> float:
        """Of all multiprocessors, in a second."""
        return MULTIPROCESSORS[self.architecture] * self.clock_hz


GPUS = {"H100": GPU(90, 3.06e12), "H200": GPU(90, 4.3e12)}


@dataclass(frozen=True)
class Counted:
    """A case's kernels on one architecture: what they do, and what a program of each costs."""

    case: Case
    kernels: Sequence[CompiledKernel]
    works: Sequence[Work]
    costs: Sequence[Costs]

    def microseconds(self, gpu: GPU) -> dict[str, float]:
        """How long each resource works for the whole launch."""
        parts = list(zip(self.works, self.costs, strict=True))
        issue = sum(work.programs * cost.issue for work, cost in parts) / gpu.cycles
        tensor = sum(work.programs * cost.tensor for work, cost in parts) / gpu.cycles
        memory = sum(work.memory_bytes for work in self.works) / gpu.memory_rate
        cache = sum(work.cache_bytes for work in self.works) / gpu.cache_rate
        seconds = {"issue": issue, "tensor": tensor, "L2": cache, "memory": memory}
        return {name: 1e6 * value for name, value in seconds.items()}

    def predicted(self, gpu: GPU) -> float:
        """Microseconds, if all resources work at the same time and never wait."""
        return max(self.microseconds(gpu).values())


def count(cases: Sequence[Case], architecture: int) -> list[Counted]:
    """Compiles the launches, and counts."""
    launches = [Launch(case.function, architecture, case.arguments) for case in cases]
    counted = []
    for case, kernels in zip(cases, compile_launches(launches), strict=True):
        works = case.works(kernels)
        each = [
            costs(kernel.code, architecture, kernel.num_warps, work.trips)
            for kernel, work in zip(kernels, works, strict=True)
        ]
        counted.append(Counted(case, kernels, works, each))
    return counted


def main() -> None:
    for counted in count(CASES, 90):
        print(counted.case)
        for kernel, work, cost in zip(counted.kernels, counted.works, counted.costs, strict=True):
            pipes = ", ".join(f"{pipe} {cycles:.0f}" for pipe, cycles in cost.cycles.items())
            print(
                f"    {kernel.name}: {kernel.registers} registers, {kernel.stack_bytes} bytes of "
                f"stack, {kernel.shared_bytes} shared, {kernel.resident_programs} resident, "
                f"{work.programs:.0f} programs; cycles of one: {pipes}"
            )
        for name, gpu in GPUS.items():
            each = ", ".join(f"{key} {us:.1f}" for key, us in counted.microseconds(gpu).items())
            measured = counted.case.measured.get(name, "not")
            print(
                f"    {name}, µs: {each}; predicted {counted.predicted(gpu):.1f}, "
                f"measured {measured}"
            )


if __name__ == "__main__":
    main()
