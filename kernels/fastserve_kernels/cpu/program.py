"""The operations of a step as a list that the compiled library runs in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.int64]
Run = Callable[[int, int, int], None]
"""`fs_run`: takes the address of the first instruction, their number, the address of the words."""


@dataclass(frozen=True)
class Call:
    """A call of Python before the instruction with number `position`, with each tensor's first
    rows. `value`: the number of the value that counts them."""

    position: int
    function: Callable[..., object]
    tensors: Sequence[Tensor]
    value: int


class Program:
    """Made by `recording.StepRecorder`. One thread at a time may run it.

    Args:
        run: the library's function.
        instructions: [n, 4], see program.cpp.
        words: the arguments of all instructions.
        varying: pairs of a word's place and the number of the value that is added to it.
        in_second_part: pairs of a word's place and the bytes of a row: the word is an address from
            the row on that the value `split` counts.
        multiples: values behind those of each run, which are such a value times a factor.
        calls: in the order of their positions.
        memory: of results and placeholders; it must live as long as the program.
    """

    def __init__(
        self,
        run: Run,
        instructions: Array,
        words: Array,
        varying: Array,
        in_second_part: Array,
        split: int | None,
        multiples: Sequence[tuple[int, int]],
        calls: Sequence[Call],
        memory: Sequence[Any],
    ) -> None:
        self._run = run
        self._instructions = instructions
        self._constants, self._words = words, words.copy()
        self._places, self._values = varying.T.copy()
        self._split_places, self._row_bytes = in_second_part.T.copy()
        self._split = split
        self._multiples = multiples
        self._calls = calls
        self._memory = memory

    def run(self, values: Sequence[int], end: int) -> None:
        """Run the first `end` instructions, and the calls between them.

        Args:
            values: in the order in which they were named while recording.
        """
        values = [*values, *(values[value] * factor for value, factor in self._multiples)]
        now = np.array(values, dtype=np.int64)
        self._words[:] = self._constants
        self._words[self._places] += now[self._values]
        if self._split is not None:
            self._words[self._split_places] += self._row_bytes * now[self._split]
        start = 0
        for call in self._calls:
            if call.position > end:
                break
            self._run_between(start, call.position)
            start = call.position
            if count := values[call.value]:
                call.function(*(tensor[:count] for tensor in call.tensors))
        self._run_between(start, end)

    def _run_between(self, start: int, end: int) -> None:
        if start < end:
            first = self._instructions.ctypes.data + start * self._instructions.strides[0]
            self._run(first, end - start, self._words.ctypes.data)
