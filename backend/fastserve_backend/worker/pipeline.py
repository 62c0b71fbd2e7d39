"""Sends activations from one pipeline stage to the next."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from fastserve_backend.checkpoints.partition import RankPlace


class Pipeline:
    """Sends to the rank of the same number in the next stage, and receives from its
    counterpart in the stage before.

    Both ranks run the same steps in the same order, so neither waits for a step that the other
    does not know.

    Args:
        width: elements of a token's activations.
    """

    def __init__(
        self, place: RankPlace, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        rank = place.stage * place.tensor_size + place.tensor_rank
        self._next, self._previous = rank + place.tensor_size, rank - place.tensor_size
        self._num_stages = place.num_stages
        self._width, self._dtype, self._device = width, dtype, device
        self._sends: deque[tuple[dist.Work, Tensor]] = deque()
        # The first exchange opens the connections: do it before serving.
        if not place.is_first_stage:
            self.receive(1)
        if not place.is_last_stage:
            self.send(torch.zeros((1, width), dtype=dtype, device=device))

    @staticmethod
    def most_sent_bytes(place: RankPlace, width: int, dtype: torch.dtype, max_tokens: int) -> int:
        """The most bytes of activations kept for the next stage, if steps have ``max_tokens``."""
        if place.is_last_stage:
            return 0
        return place.num_stages * max_tokens * width * dtype.itemsize

    def receive(self, num_tokens: int) -> Tensor:
        """This step's activations, [num_tokens, width]. Waits for the stage before."""
        shape = (num_tokens, self._width)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        dist.recv(hidden, self._previous)
        return hidden

    def send(self, hidden: Tensor) -> None:
        """Start to send. The next stage may still run an earlier step."""
        # At most as many steps are under way as there are stages, so an older send has been
        # received: this call frees its memory and does not wait.
        if len(self._sends) == self._num_stages:
            self._sends.popleft()[0].wait()
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self._next)
        assert work is not None  # this rank belongs to the group
        self._sends.append((work, hidden))
