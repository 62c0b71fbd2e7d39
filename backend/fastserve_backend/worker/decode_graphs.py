"""Forward passes of decode steps as CUDA graphs: one launch replaces a hundred."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastserve_backend.worker.step_inputs import StepLayout, StepTensors, WorkListInputs

Forward = Callable[[StepTensors, Tensor | None], Tensor | None]


class DecodeGraphs:
    """One graph for each padded size of a step, captured in the constructor. All share memory.

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
        *,
        has_earlier_stage: bool,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._received = (
            torch.zeros((inputs.padded_sizes[-1], width), dtype=dtype, device=device)
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
        for size in reversed(inputs.padded_sizes):
            self._replays[size] = self._capture(size)

    def run(self, inputs: StepTensors, received: Tensor | None) -> Tensor:
        """The hidden states of a padded step, [num_jobs, width]. The next run overwrites them.

        The graph reads the addresses that all padded steps of this size share. So ``inputs`` must
        be the tensors that were prepared last.
        """
        if self._received is not None:
            assert received is not None
            self._received[: len(received)].copy_(received)
        return self._replays[len(inputs.token_ids)]()[: inputs.num_jobs]

    def close(self) -> None:
        """Free the graphs. NCCL ends no group whose sums a graph still holds."""
        for graph in self._graphs:
            graph.reset()
        self._replays.clear()

    def _capture(self, size: int) -> Callable[[], Tensor]:
        tensors = self._inputs.bring_padded(StepLayout.empty(self._inputs.num_groups), size)
        received = None if self._received is None else self._received[:size]

        def forward() -> Tensor:
            hidden = self._forward(tensors, received)
            assert hidden is not None  # no logits are asked for
            return hidden

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
