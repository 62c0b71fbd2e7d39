"""Forward passes as CUDA graphs: one launch replaces hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastserve_backend.worker.graph_sizes import GraphSize
from fastserve_backend.worker.step_inputs import StepLayout, StepTensors, WorkListInputs

Forward = Callable[[StepTensors, Tensor | None], Tensor | None]


class StepGraphs:
    """One graph for each size to which steps are padded, captured in the constructor. All share
    memory.

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
        # The largest first: the others reuse its memory from the pool.
        sizes = sorted(inputs.sizes, key=lambda size: size.num_tokens, reverse=True)
        self._received = (
            torch.zeros((sizes[0].num_tokens, width), dtype=dtype, device=device)
            if has_earlier_stage
            else None
        )
        self._replays: dict[GraphSize, Callable[[], Tensor]] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._device = device
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)
        for size in sizes:
            self._replays[size] = self._capture(size)

    def run(self, inputs: StepTensors, received: Tensor | None) -> Tensor:
        """The hidden states of a padded step, [num_tokens, width]. The next run overwrites them.

        The graph reads the addresses that all steps of this size share. So ``inputs`` must be the
        tensors that were prepared last.
        """
        assert inputs.size is not None
        if self._received is not None:
            assert received is not None
            self._received[: len(received)].copy_(received)
        return self._replays[inputs.size]()[: inputs.num_tokens]

    def close(self) -> None:
        """Free the graphs. NCCL ends no group whose sums a graph still holds."""
        for graph in self._graphs:
            graph.reset()
        self._replays.clear()

    def _capture(self, size: GraphSize) -> Callable[[], Tensor]:
        tensors = self._inputs.bring_padded(StepLayout.empty(self._inputs.num_groups), size)
        received = None if self._received is None else self._received[: size.num_tokens]

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
