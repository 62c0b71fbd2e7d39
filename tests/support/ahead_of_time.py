"""Compiles the Triton-language kernels of launchers for absent GPUs, and reads what the machine
code needs.

A launch is a function of `kernel_launches` that calls a launcher with tensors on the "meta" device
in place of a GPU's. The JIT specialises the kernels as at a real launch, including divisibility by
16 and the launch parameters (an address on "meta" is 0). Nothing runs.
`torch.cuda.get_device_capability` returns the architecture, and launchers see the multiprocessors
of an A100 or an H100.

Each architecture has a process of its own, without the interpreter's environment variable.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

Arguments = dict[str, "str | int | bool"]

REGISTERS = 64 * 1024
REGISTER_UNIT = 8
"""Registers of a multiprocessor, and the multiple in which a thread gets them."""
SHARED_BYTES = {80: 164 * 1024, 90: 228 * 1024}
RESERVED_SHARED_BYTES = 1024
"""Shared memory of a multiprocessor in bytes, and the system's part of it for each program."""
MOST_WARPS, MOST_PROGRAMS = 64, 32
"""Of a multiprocessor."""
MULTIPROCESSORS = {80: 108, 90: 132}
"""Of an A100; of an H100 or an H200."""

_DEADLINE = 800  # seconds for all kernels of an architecture, on a slow machine


@dataclass(frozen=True)
class Launch:
    """``function`` is one of `kernel_launches`, ``architecture`` is 80 or 90. ``arguments`` go by
    keyword, dtypes by their names in torch."""

    function: str
    architecture: int
    arguments: Arguments

    def __str__(self) -> str:
        values = "-".join(str(value) for value in self.arguments.values())
        return f"{self.function}-{values}-sm_{self.architecture}"


def but_architecture(launch: Launch) -> str:
    """A key for ``one_of``: in `make test` each launch is compiled for one architecture."""
    return str(replace(launch, architecture=0))


@dataclass(frozen=True)
class CompiledKernel:
    """Machine code of one kernel of a launch.

    ``variant`` distinguishes the JIT's specialisations of one kernel. ``registers`` and
    ``stack_bytes``, which include spilled registers, are those of a thread. ``shared_bytes`` are
    those of a program. ``instructions`` counts those in the code, memory accesses with their width
    in bits: "LDG.128", "STG.64", "LDGSTS.128", "LDL.32" and "STL.32" (the stack), "HMMA", "HGMMA",
    and "FCHK", with which an IEEE division begins. ``copies_ahead`` is the most groups of LDGSTS
    that a wait leaves under way. A group is one load of a loop's iteration. ``grid`` and
    ``constants``, which are the kernel's own (tiles among them), are those of the launch. ``code``
    is what `machine_code` reads.
    """

    name: str
    variant: str
    architecture: int
    grid: tuple[int, ...]
    constants: dict[str, int]
    num_warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    instructions: Counter[str]
    copies_ahead: int
    code: str

    @property
    def resident_programs(self) -> int:
        """Programs that a multiprocessor holds at a time."""
        registers = -(-self.registers // REGISTER_UNIT) * REGISTER_UNIT
        shared = self.shared_bytes + RESERVED_SHARED_BYTES
        return min(
            REGISTERS // (registers * 32 * self.num_warps),
            SHARED_BYTES[self.architecture] // shared,
            MOST_WARPS // self.num_warps,
            MOST_PROGRAMS,
        )

    def count(self, *names: str) -> int:
        """The number of instructions with these names. A name without a width counts all widths."""
        return sum(
            number
            for instruction, number in self.instructions.items()
            if instruction in names or instruction.partition(".")[0] in names
        )


def compile_launches(launches: Sequence[Launch]) -> list[list[CompiledKernel]]:
    """For each launch, its kernels in the order in which it launches them.

    Raises:
        RuntimeError: a launch failed, with what its process wrote.
    """
    compiled: list[list[CompiledKernel]] = [[] for _ in launches]
    architectures = {launch.architecture for launch in launches}
    groups = [
        [index for index, launch in enumerate(launches) if launch.architecture == architecture]
        for architecture in architectures
    ]
    processes = [_start([launches[index] for index in group]) for group in groups]
    try:
        for group, process in zip(groups, processes, strict=True):
            answer, errors = process.communicate(timeout=_DEADLINE)
            if process.returncode != 0:
                raise RuntimeError(errors)
            for index, kernels in zip(group, json.loads(answer), strict=True):
                compiled[index] = [_kernel(described) for described in kernels]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return compiled


def _kernel(described: dict[str, Any]) -> CompiledKernel:
    """From what `_compile` returned, by way of JSON."""
    instructions, grid = Counter(described["instructions"]), tuple(described["grid"])
    return CompiledKernel(**{**described, "instructions": instructions, "grid": grid})


def _start(launches: Sequence[Launch]) -> subprocess.Popen[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRITON_")
    }
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    job = {
        "architecture": launches[0].architecture,
        "launches": [(launch.function, launch.arguments) for launch in launches],
    }
    # A file takes all of a process's output while the parent waits for another process.
    with tempfile.TemporaryFile("w+") as description:
        json.dump(job, description)
        description.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", "ahead_of_time"],
            stdin=description, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, text=True,
        )  # fmt: skip


class _AbsentDriver:
    """Answers what the JIT asks a GPU's driver before it compiles."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


def _compile(architecture: int, launches: Sequence[tuple[str, Arguments]]) -> list[list[dict]]:
    import kernel_launches
    import torch
    from fastserve_kernels.gpu import device
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_AbsentDriver(architecture))
    device.INTERPRETED_MULTIPROCESSORS = MULTIPROCESSORS[architecture]
    torch.cuda.get_device_capability = lambda device=None: divmod(architecture, 10)
    launched: list[tuple[Any, dict[str, Any]]] = []  # kernels, and what is the launch's own
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        compiled = run(kernel, *args, **{**options, "warmup": True})
        constants = {
            name: int(value)
            for name, value in options.items()
            if name in kernel.arg_names and name.isupper() and isinstance(value, int)
        }
        launched.append((compiled, {"grid": options["grid"], "constants": constants}))

    JITFunction.run = compile_only
    compiled: dict[str, Any] = {}  # by the hash of what was compiled
    groups = []
    for name, arguments in launches:
        values = {
            key: getattr(torch, value) if key == "dtype" else value
            for key, value in arguments.items()
        }
        launched.clear()
        getattr(kernel_launches, name)(**values)
        if not launched:
            raise RuntimeError(f"{name} launched nothing")
        compiled |= {kernel.hash: kernel for kernel, _ in launched}
        groups.append([(kernel.hash, own) for kernel, own in launched])
    described = dict(zip(compiled, _describe(list(compiled.values()), architecture), strict=True))
    return [[{**described[hash_], **own} for hash_, own in group] for group in groups]


def _describe(kernels: Sequence[Any], architecture: int) -> list[dict[str, Any]]:
    usages, codes = [], []
    with tempfile.TemporaryDirectory() as directory:
        for number, kernel in enumerate(kernels):
            cubin = Path(directory, f"{number}.cubin")
            cubin.write_bytes(kernel.asm["cubin"])
            usage = _run("cuobjdump", "--dump-resource-usage", cubin)
            usages.append(dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)))
            into = Path(directory, str(number))
            into.mkdir()
            _run("cuobjdump", "--extract-text", "all", cubin, cwd=into)
            (text,) = into.iterdir()
            codes.append(text.read_bytes())
        instructions = _disassemble(codes, architecture, Path(directory, "code"))
    return [
        {
            "name": kernel.metadata.name,
            "variant": kernel.hash,
            "architecture": architecture,
            "num_warps": kernel.metadata.num_warps,
            "registers": int(usage["REG"]),
            "stack_bytes": int(usage["STACK"]) + int(usage["LOCAL"]),
            "shared_bytes": kernel.metadata.shared,
            "instructions": Counter(_instructions(lines)),
            "copies_ahead": _copies_ahead(lines),
            "code": lines,
        }
        for kernel, usage, lines in zip(kernels, usages, instructions, strict=True)
    ]


def _disassemble(codes: Sequence[bytes], architecture: int, file: Path) -> list[str]:
    """Each kernel's instructions, one a line: address and control bits, in base 16, and the text.
    One file holds all kernels, as the disassembler takes half a second to start."""
    code = b"".join(codes)
    file.write_bytes(code)
    lines = _run("nvdisasm", "--binary", {80: "SM80", 90: "SM90a"}[architecture], file)
    ends = list(accumulate(map(len, codes)))
    found = [""] * len(codes)
    for written, text in re.findall(r"/\*([0-9a-f]+)\*/\s+(.*?);", lines):
        address = int(written, 16)
        # Bits 105 to 125 of an instruction: see `machine_code.Instruction`.
        control = int.from_bytes(code[address + 8 : address + 16], "little") >> 41 & 0x1FFFFF
        found[bisect_right(ends, address)] += f"{address:x} {control:x} {text}\n"
    return found


def _run(program: str, *arguments: str | Path, cwd: Path | None = None) -> str:
    """Returns the output of a program of the CUDA toolkit, which Triton ships."""
    from triton import knobs

    command = [getattr(knobs.nvidia, program).path, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


def _instructions(code: str) -> Iterator[str]:
    pattern = r"\b(LDG|STG|LDGSTS|LDL|STL|HMMA|HGMMA|FCHK)((?:\.\w+)*)\s"
    for operation, modifiers in re.findall(pattern, code):
        if operation in ("HMMA", "HGMMA", "FCHK"):
            yield operation
            continue
        widths = {"128": 128, "64": 64, "U16": 16, "S16": 16, "U8": 8, "S8": 8}
        named = [widths[part] for part in modifiers.split(".") if part in widths]
        yield f"{operation}.{named[0] if named else 32}"


def _copies_ahead(code: str) -> int:
    waits = re.findall(r"\bDEPBAR\.LE SB0, 0x([0-9a-f]+)", code)
    return max((int(wait, 16) for wait in waits), default=0)


if __name__ == "__main__":
    json.dump(_compile(**json.load(sys.stdin)), sys.stdout)
