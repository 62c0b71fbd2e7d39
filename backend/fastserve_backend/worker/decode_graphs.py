"""Forward passes of decode steps as CUDA graphs: a hundred kernel launches become one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastserve_backend.worker.step_inputs import StepTensors, WorkListInputs
from fastserve_backend.worker.step_layout import StepLayout

Forward = Callable[[StepTensors, Tensor | None], Tensor]
_SIZES_AN_OCTAVE = 4


def batch_sizes(max_jobs: int) -> list[int]:
    """Ascending numbers of jobs that steps are padded to; padding is a fourth of a step at most."""
    sizes = set(range(1, 2 * _SIZES_AN_OCTAVE))
    step = 2
    while 4 * step < max_jobs:
        sizes |= {step * n for n in range(_SIZES_AN_OCTAVE, 2 * _SIZES_AN_OCTAVE)}
        step *= 2
    return sorted({size for size in sizes if size < max_jobs} | {max_jobs})


class DecodeGraphs:
    """One graph for each batch size, captured when it is made, all on the same memory.

    On a CPU there are no graphs: the forward pass runs each time, on the same padded inputs.

    Args:
        forward: tensors and what the stage before sent to hidden states, [T, width].
        receives: whether an earlier stage sends activations.
        width, dtype: of the activations.
    """

    def __init__(
        self,
        forward: Forward,
        inputs: WorkListInputs,
        max_jobs: int,
        *,
        receives: bool,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._sizes = batch_sizes(max_jobs)
        self._received = (
            torch.zeros((max_jobs, width), dtype=dtype, device=device) if receives else None
        )
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._device = device
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)
        # The largest first: the others find its memory in the pool.
        for size in reversed(self._sizes):
            self._replays[size] = self._capture(size)

    def bring(self, layout: StepLayout) -> StepTensors:
        """The tensors that the next run of as many jobs reads, with padding.

        For steps of decodes alone, of at most ``max_jobs`` jobs.
        """
        return self._inputs.bring_padded(layout, self._size(layout.num_jobs))

    def run(self, num_jobs: int, received: Tensor | None) -> Tensor:
        """The hidden states of what was brought last, [num_jobs, width]; the next run overwrites
        them."""
        if self._received is not None:
            assert received is not None
            self._received[: len(received)].copy_(received)
        return self._replays[self._size(num_jobs)]()[:num_jobs]

    def close(self) -> None:
        """Free the graphs. NCCL ends no group that a graph still holds sums of."""
        for graph in self._graphs:
            graph.reset()
        self._replays.clear()

    def _size(self, num_jobs: int) -> int:
        most = self._sizes[-1]
        assert num_jobs <= most, f"a step of {num_jobs} jobs, but graphs for {most} at most"
        return next(size for size in self._sizes if size >= num_jobs)

    def _capture(self, size: int) -> Callable[[], Tensor]:
        tensors = self._inputs.bring_padded(StepLayout.empty(), size)
        received = None if self._received is None else self._received[:size]

        def forward() -> Tensor:
            return self._forward(tensors, received)

        if self._device.type != "cuda":
            return forward
        # Compiles kernels and makes workspaces, which a capture must not.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            forward()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog asks for events in a thread of its own meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            hidden = forward()
        self._graphs.append(graph)

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay
