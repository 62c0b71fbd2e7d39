"""Operations of the compiled library: called one by one, or noted by a recorder."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

import torch
from torch import Tensor

ADDRESS = "P"
"""The type of an argument that is an address, as in `struct`."""


class Recorder(Protocol):
    """What takes the place of running, while a program is recorded."""

    def note(self, operation: Operation, arguments: tuple[float, ...]) -> None:
        """Note one operation."""
        ...

    def note_call(self, function: Callable[..., object], tensors: tuple[Tensor, ...]) -> None:
        """Note a call of Python between operations."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor for results of operations. Its first dimension counts rows."""
        ...

    def multiple(self, count: int, factor: int) -> None:
        """Operations may have `factor` times as many rows as this count."""
        ...


class _OfThread(threading.local):
    recorder: Recorder | None = None


of_thread = _OfThread()
"""The recorder of the calling thread, if it records."""


class Operation:
    """A function of the library that works on a step's rows.

    The first number after the addresses is how many rows there are.

    Args:
        arguments: their types, as in `struct`, 8 bytes each.
        is_by_row: whether a row of its results depends on no other row of the tensors that it
            reads, and rows are divided among threads as they are in other such operations.
    """

    def __init__(self, function: Any, arguments: str, is_by_row: bool) -> None:
        function.restype, function.argtypes = None, [ctypes.c_void_p, ctypes.c_char_p]
        self._function = function
        self.name: str = function.__name__
        self.pack = Struct(arguments).pack
        self.types = re.sub(r"(\d+)(\w)", lambda match: int(match[1]) * match[2], arguments)
        self.rows_place = self.types.rindex(ADDRESS) + 1
        self.is_by_row = is_by_row

    @property
    def address(self) -> int:
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        return address

    def __call__(self, *arguments: float) -> None:
        """Run at once, with threads of its own, or note it. An address of 0 stands for none."""
        if of_thread.recorder is None:
            self._function(None, self.pack(*arguments))
        else:
            of_thread.recorder.note(self, arguments)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A new tensor on the CPU for results of operations; rows come first."""
    if of_thread.recorder is None:
        return torch.empty(shape, dtype=dtype)
    return of_thread.recorder.empty(shape, dtype)


def multiple(count: int, factor: int) -> int:
    """count * factor, as a number of rows of operations. count: one that operations had before."""
    if of_thread.recorder is not None:
        of_thread.recorder.multiple(count, factor)
    return count * factor
