"""Forward passes of decode steps as CUDA graphs: one launch replaces a hundred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastserve_backend.worker.step_inputs import StepLayout, StepTensors, WorkListInputs

Forward = Callable[[StepTensors, Tensor | None], Tensor]
_SIZES_AN_OCTAVE = 4


def batch_sizes(max_jobs: int) -> list[int]:
    """The numbers of jobs to which steps are padded, ascending. At most a fourth is padding."""
    sizes = set(range(1, 2 * _SIZES_AN_OCTAVE))
    step = 2
    while 4 * step < max_jobs:
        sizes |= {step * n for n in range(_SIZES_AN_OCTAVE, 2 * _SIZES_AN_OCTAVE)}
        step *= 2
    return sorted({size for size in sizes if size < max_jobs} | {max_jobs})


class DecodeGraphs:
    """One graph for each batch size, captured in the constructor. All share the same memory.

    A CPU has no graphs: there each run is a forward pass on the same padded inputs.

    Args:
        forward: computes hidden states, [T, width], from a step's tensors and the activations of
            the stage before (None on the first).
        has_earlier_stage: whether another stage sends activations.
        width, dtype: those of the activations.
    """

    def __init__(
        self,
        forward: Forward,
        inputs: WorkListInputs,
        max_jobs: int,
        *,
        has_earlier_stage: bool,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._sizes = batch_sizes(max_jobs)
        self._received = (
            torch.zeros((max_jobs, width), dtype=dtype, device=device)
            if has_earlier_stage
            else None
        )
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._device = device
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)
        # The largest first: the others reuse its memory from the pool.
        for size in reversed(self._sizes):
            self._replays[size] = self._capture(size)

    def bring(self, layout: StepLayout) -> StepTensors:
        """The padded tensors that the next `run` for as many jobs reads.

        The step must have decodes alone, and at most ``max_jobs`` of them.
        """
        return self._inputs.bring_padded(layout, self._size(layout.num_jobs))

    def run(self, num_jobs: int, received: Tensor | None) -> Tensor:
        """The hidden states of the step that `bring` brought last, [num_jobs, width]. The next run
        overwrites them."""
        if self._received is not None:
            assert received is not None
            self._received[: len(received)].copy_(received)
        return self._replays[self._size(num_jobs)]()[:num_jobs]

    def close(self) -> None:
        """Free the graphs. NCCL ends no group whose sums a graph still holds."""
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
        # This pass compiles kernels and creates workspaces, which a capture must not do.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            forward()
        graph = torch.cuda.CUDAGraph()
        # Thread-local, because NCCL's watchdog queries events in its own thread meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            hidden = forward()
        self._graphs.append(graph)

        def replay() -> Tensor:
            graph.replay()
            return hidden

        return replay
