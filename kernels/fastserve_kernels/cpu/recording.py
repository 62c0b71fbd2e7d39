"""Records the operations of a step once, as a program that then runs for any number of rows.

The model's own Python code is run with tensors of placeholder sizes. Its operations are noted and
not executed. So everything that decides which operations there are must be the same in all steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastserve_kernels.cpu.operations import ADDRESS, Operation, of_thread
from fastserve_kernels.cpu.program import Call, Program, Run

Bytes = npt.NDArray[np.uint8]
_LINE = 64


class UnrecordableError(Exception):
    """The model does something that a program cannot. The message names it."""


@dataclass(frozen=True)
class _Region:
    """Memory of a tensor. ``value``: the number of the input that it stands for, or None."""

    memory: Bytes
    start: int
    row_bytes: int
    value: int | None = None

    @classmethod
    def of(cls, rows: int, row_bytes: int, value: int | None = None) -> _Region:
        memory = _allocate(rows * row_bytes)
        return cls(memory, memory.ctypes.data, row_bytes, value)


class StepRecorder:
    """Notes operations (`operations.Recorder`).

    What varies from run to run is a list of values: counts of rows, and addresses of inputs. First
    name them all with `count` and `input`, then record.
    """

    def __init__(self) -> None:
        self._num_values = 0
        self._counts: dict[int, int] = {}
        """Value by placeholder."""
        self._multiples: list[tuple[int, int]] = []
        """Values that follow those of each run: the value that each is a multiple of, and its
        factor."""
        self._split: tuple[int, int] | None = None
        self._regions: list[_Region] = []
        self._free: dict[tuple[int, int], list[_Region]] = defaultdict(list)
        self._instructions: list[tuple[int, int, int, bool]] = []
        self._words: list[int] = []
        self._varying: list[tuple[int, int]] = []
        self._in_second_part: list[tuple[int, int]] = []
        self._calls: list[Call] = []
        self._last: tuple[Operation, int] | None = None

    def count(self, placeholder: int, *, splits: bool = False) -> None:
        """Name a count of rows. While recording it is `placeholder`, unlike all other counts.

        splits: a tensor's part from this row on is the part from the count's row on.
        """
        assert placeholder not in self._counts
        self._counts[placeholder] = self._num_values
        if splits:
            self._split = placeholder, self._num_values
        self._num_values += 1

    def input(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Name an input, whose address is a value of each run. Returns a placeholder for it."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        region = _Region.of(shape[0], row_bytes, self._num_values)
        self._regions.append(region)
        self._num_values += 1
        return torch.from_numpy(region.memory).view(dtype).view(shape)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Operations of this thread are noted until the end of the block.

        Raises:
            UnrecordableError: in the block, at an operation of torch that computes something.
        """
        assert of_thread.recorder is None
        of_thread.recorder = self
        try:
            with _ViewsOnly():  # type: ignore[no-untyped-call]
                yield
        finally:
            of_thread.recorder = None

    def note(self, operation: Operation, arguments: tuple[float, ...]) -> None:
        first = len(self._words)
        self._words += np.frombuffer(operation.pack(*arguments), dtype=np.int64).tolist()
        for place, (kind, argument) in enumerate(zip(operation.types, arguments, strict=True)):
            if kind == ADDRESS:
                self._note_address(first + place, int(argument))
        rows = first + operation.rows_place
        value = self._counts.get(self._words[rows])
        if value is None:
            raise UnrecordableError(f"{operation.name} of {self._words[rows]} rows")
        self._varying.append((rows, value))
        self._words[rows] = 0
        joins = False
        if self._last is not None:
            before, value_before = self._last
            joins = operation.is_by_row and before.is_by_row and value == value_before
        self._last = operation, value
        self._instructions.append((operation.address, first, rows, joins))

    def note_call(self, function: Callable[..., object], tensors: tuple[Tensor, ...]) -> None:
        value = self._counts[len(tensors[0])]
        aliases = [self.lasting(tensor) for tensor in tensors]
        self._calls.append(Call(self.num_instructions, function, aliases, value))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory is used again when no tensor refers to it any more: by tensors of equal rows, so
        that a thread that is ahead of others within its rows overwrites no others."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        free = self._free[shape[0], row_bytes]
        if free:
            region = free.pop()
        else:
            region = _Region.of(shape[0], row_bytes)
            self._regions.append(region)
        memory = region.memory[:]  # a new object, which lives as long as the tensor's storage
        finalize(memory, free.append, region)
        return torch.from_numpy(memory).view(dtype).view(shape)

    def lasting(self, tensor: Tensor) -> Tensor:
        """The same memory, which other tensors may use too: good until an operation has written to
        it."""
        region, offset = self._find(tensor.data_ptr())
        flat = torch.from_numpy(region.memory).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), offset // tensor.itemsize)

    @property
    def num_instructions(self) -> int:
        return len(self._instructions)

    def multiple(self, count: int, factor: int) -> None:
        value = self._counts[count]
        if factor == 1 or (value, factor) in self._multiples:
            return
        if count * factor in self._counts:
            raise UnrecordableError(f"{count * factor} rows stand for two counts")
        self._counts[count * factor] = self._num_values + len(self._multiples)
        self._multiples.append((value, factor))

    def program(self, run: Run) -> Program:
        """What was noted. `run`: the library's function."""
        return Program(
            run,
            np.array(self._instructions, dtype=np.int64),
            np.array(self._words, dtype=np.int64),
            np.array(self._varying, dtype=np.int64).reshape(-1, 2),
            np.array(self._in_second_part, dtype=np.int64).reshape(-1, 2),
            None if self._split is None else self._split[1],
            self._multiples,
            self._calls,
            [region.memory for region in self._regions],
        )

    @property
    def num_bytes(self) -> int:
        """Of the memory for results. The system provides pages when they are first written."""
        return sum(len(region.memory) for region in self._regions if region.value is None)

    def _find(self, address: int) -> tuple[_Region, int]:
        for region in self._regions:
            offset = address - region.start
            if 0 <= offset < len(region.memory):
                return region, offset
        raise LookupError

    def _note_address(self, place: int, address: int) -> None:
        try:
            region, offset = self._find(address)
        except LookupError:
            return  # of a weight, a table or the cache
        row, offset = divmod(offset, region.row_bytes)
        if row:
            if self._split is None or row != self._split[0]:
                raise UnrecordableError(f"rows from number {row} on")
            self._in_second_part.append((place, region.row_bytes))
        if region.value is None:
            self._words[place] = region.start + offset
        else:
            self._words[place] = offset
            self._varying.append((place, region.value))


def _allocate(size: int) -> Bytes:
    """From the start of a cache line on."""
    memory = np.empty(size + _LINE, dtype=np.uint8)
    first = -memory.ctypes.data % _LINE
    return memory[first : first + size]


class _ViewsOnly(TorchDispatchMode):
    """Lets torch make views of tensors, and nothing else."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler need not know of this mode. To tell it, torch would import it, which
        takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            raise UnrecordableError(str(func))
        result = func(*args, **(kwargs or {}))
        memories = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        for one in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() not in memories:
                raise UnrecordableError(str(func))
        return result
