"""The outputs that one job's client gets."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fastserve_backend.job import JobOutput

# The ranks may be replaced before a job ends. They import torch, which takes a second of a core.
END_S = 150.0


class Collector:
    """A sink that keeps outputs and knows when the job has ended."""

    def __init__(self) -> None:
        self.outputs: list[JobOutput] = []
        self.started = threading.Event()
        self._ended = threading.Event()

    def __call__(self, output: JobOutput) -> None:
        assert self.end is None, "output after the end"
        self.outputs.append(output)
        self.started.set()
        if output.finish_reason is not None:
            self._ended.set()

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def end(self) -> JobOutput | None:
        return self.outputs[-1] if self._ended.is_set() else None

    def wait(self) -> JobOutput:
        """Returns the last output."""
        assert self._ended.wait(END_S)
        return self.outputs[-1]


class Trigger(Collector):
    """Calls back at the job's n-th output, before the next one can come. The engine does
    nothing else meanwhile: sinks run on its thread."""

    def __init__(self, num_outputs: int, callback: Callable[[], object]) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        self._callback = callback

    def __call__(self, output: JobOutput) -> None:
        super().__call__(output)
        if len(self.outputs) == self._num_outputs:
            self._callback()
