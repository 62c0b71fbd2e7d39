"""The ranks that share each layer of a stage, and what they say to each other."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastserve_backend.checkpoints.partition import span


class TensorGroup:
    """The ranks of one stage, in order. Every rank must make the same calls in the same order.

    A group of one calls nobody and changes nothing.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """``process_group`` None: all processes are of this group."""
        self.rank = rank
        self.size = size
        self._process_group = process_group

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, size: int) -> slice:
        """This rank's part of ``size`` rows or columns."""
        part = span(size, self.rank, self.size)
        return slice(part.start, part.stop)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' ``x``, in its place; every rank gets it."""
        if self.size > 1:
            dist.all_reduce(x, group=self._process_group)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's ``x``, in the place of every rank's."""
        if self.size > 1:
            dist.broadcast(x, group=self._process_group, group_src=0)
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor | None:
        """Each rank's part of the columns, [R, part], to all of them, [R, num_columns], on the
        first rank; None on the others."""
        if self.size == 1:
            return x
        widths = [len(span(num_columns, rank, self.size)) for rank in range(self.size)]
        x = F.pad(x, (0, widths[0] - widths[self.rank]))  # the parts must be of one size
        parts = [torch.empty_like(x) for _ in widths] if self.is_first else None
        dist.gather(x, parts, group=self._process_group, group_dst=0)
        if parts is None:
            return None
        return torch.cat([part[:, :n] for part, n in zip(parts, widths, strict=True)], dim=1)


ALONE = TensorGroup()
"""The group of a model that is not divided."""
