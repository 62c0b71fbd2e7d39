"""How long a rank works on a step."""

from __future__ import annotations

import time

import torch

_CPU = torch.device("cpu")


class Stopwatch:
    """Seconds since it was made; with a GPU, since the GPU had done what it was given before, such
    as to receive activations, which the host does not wait for."""

    def __init__(self, device: torch.device = _CPU) -> None:
        self._started_s = time.perf_counter()
        self._started = _recorded() if device.type == "cuda" else None

    def seconds(self) -> float:
        """Until now; with a GPU, until it has done what it was given."""
        if self._started is None:
            return time.perf_counter() - self._started_s
        ended = _recorded()
        ended.synchronize()
        return float(self._started.elapsed_time(ended)) / 1e3


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
