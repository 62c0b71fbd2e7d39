"""Replaces Triton's CUDA driver: launches run on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from ptx.arithmetic import ARITHMETIC
from ptx.data_movement import DATA_MOVEMENT
from ptx.earlier_launches import EarlierLaunches
from ptx.global_order import GlobalOrder
from ptx.machine import Machine
from ptx.memory import GlobalMemory
from ptx.program import Program
from ptx.tensor_cores import TENSOR_CORES

VARIABLE = "EMULATED_GPU"
"""Environment variable with the architecture: "sm_80" or "sm_90"."""
INSTRUCTIONS = {**ARITHMETIC, **DATA_MOVEMENT, **TENSOR_CORES}
MOST_THREADS = 4096
"""Programs that run at once: enough to make numpy's calls cheap, without using much memory."""
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}
"""Shared memory of a program in bytes, by architecture."""
_architecture: int | None = None
earlier_launches = EarlierLaunches()


def install(name: str) -> None:
    """Compiles kernels for this architecture from now on, and emulates them.

    Raises:
        ValueError: no such architecture, or Triton was told to interpret.
    """
    if knobs.runtime.interpret:
        raise ValueError(f"{VARIABLE}={name}: unset TRITON_INTERPRET")
    match = re.fullmatch(r"sm_(\d+)", name)
    if match is None or int(match[1]) not in SHARED_BYTES:
        raise ValueError(f"{VARIABLE}={name}: use sm_80 or sm_90")
    global _architecture
    _architecture = int(match[1])
    driver.set_active(_Driver(_architecture))
    knobs.runtime.kernel_load_start_hook.add(_note_code)
    knobs.runtime.add_stages_inspection_hook = _stop_at_ptx
    knobs.compilation.disable_line_info = True  # which nothing here reads


def capability() -> tuple[int, int] | None:
    """Compute capability of the emulated GPU; None without emulation."""
    return None if _architecture is None else divmod(_architecture, 10)


_order_of_programs: Callable[[int], Sequence[int]] = range


@contextmanager
def programs_in_order(order: Callable[[int], Sequence[int]]) -> Iterator[None]:
    """Runs the programs of each launch in another order than that of their ids.

    order: gives the ids, by the number of programs.
    """
    global _order_of_programs
    _order_of_programs = order
    try:
        yield
    finally:
        _order_of_programs = range


def _stop_at_ptx(
    backend: Any = None,
    stages: dict[str, Callable[..., Any]] | None = None,
    options: Any = None,
    language: Any = None,
    capability: Any = None,
) -> tuple[str, str] | None:
    """Leaves the assembler out, which takes a sixth of a compilation's time. Tests of the machine
    code run it. Triton also asks, without arguments, for what tells these compilations from others
    in its caches."""
    if stages is None:
        return "PTX alone", "0"
    stages["cubin"] = lambda source, metadata: b""
    return None


_code: dict[str, str] = {}  # path of the PTX, by the hash of a compilation


def _note_code(
    module: Any, function: Any, name: str, metadata_group: dict[str, str], hash: str
) -> None:
    (_code[hash],) = (path for file, path in metadata_group.items() if file.endswith(".ptx"))


@cache
def _program(path: str) -> Program:
    return Program.parse(Path(path).read_text(encoding="utf-8"))


class _Launcher:
    """Launches a compiled kernel."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._types = source.signature.values()
        self._metadata = metadata

    def __call__(
        self, width: int, height: int, depth: int, stream: int, function: Any,
        packed_metadata: Any, launch_metadata: Any, enter_hook: Any, exit_hook: Any, *args: Any,
    ) -> None:  # fmt: skip
        program = _program(_code[self._metadata.hash])
        given = [
            arg
            for arg, type_name in zip(args, self._types, strict=True)
            if type_name != "constexpr"
        ]
        # The kernel's own parameters are followed by two for scratch memory, which no kernel uses.
        bits = [*map(_bits, given), 0, 0]
        parameters = dict(zip(program.parameters, bits, strict=True))
        memory = GlobalMemory(_range(one) for one in given if isinstance(one, Tensor))
        count, at_a_time = width * height * depth, max(1, MOST_THREADS // program.threads)
        order = GlobalOrder(memory.ranges, count) if program.has_atomics else None
        programs = _order_of_programs(count)
        starts_early = self._metadata.launch_pdl
        if not starts_early:
            earlier_launches.synchronize()
        with np.errstate(all="ignore"):
            for first in range(0, count, at_a_time):
                machine = Machine(
                    program,
                    parameters,
                    (width, height, depth),
                    programs[first : first + at_a_time],
                    memory,
                    self._metadata.shared,
                    order,
                    earlier_launches if starts_early else None,
                )
                machine.run(INSTRUCTIONS)
        for written in memory.written:
            earlier_launches.note(*written)


def _bits(argument: Tensor | int | float) -> int:
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return int(np.float32(argument).view(np.uint32))
    return argument


def _range(tensor: Tensor) -> tuple[int, int]:
    """Address, and bytes up to the last element."""
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes)
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


class _Utils:
    def __init__(self, architecture: int) -> None:
        self._architecture = architecture

    def load_binary(self, *_: Any) -> tuple[None, None, int, int, int]:
        """Module, function, registers, spilled ones, most threads of a program."""
        return None, None, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES[self._architecture]}


class _Driver:
    launcher_cls = _Launcher

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)
        self.utils = _Utils(architecture)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)
