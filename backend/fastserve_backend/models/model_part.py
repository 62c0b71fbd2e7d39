"""Which part of a model a rank builds: some of its layers, and a share of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.model_config import Quantization
from fastserve_backend.checkpoints.partition import span
from fastserve_backend.models.int4_rounding import Int4Rounding


class TensorGroup:
    """The ranks of one stage, which share each of its layers.

    Every rank must make the same calls in the same order. In a group of one the calls do nothing.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, process_group: dist.ProcessGroup | None = None
    ) -> None:
        """
        Args:
            process_group: None: all processes belong to this group.
        """
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
        """Replace every rank's ``x`` by the sum of all; returns ``x``."""
        if self.size > 1:
            ops.call_on_rows(self._sum, x)
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace every rank's ``x`` by the first rank's; returns ``x``."""
        if self.size > 1:
            dist.broadcast(x, group=self._process_group, group_src=0)
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor | None:
        """Join the ranks' parts of the columns: [R, part] -> [R, num_columns] on the first rank,
        None on the others."""
        if self.size == 1:
            return x
        gather = partial(self._gather, num_columns)
        if not self.is_first:
            ops.call_on_rows(gather, x)
            return None
        joined = ops.empty((len(x), num_columns), x)
        ops.call_on_rows(gather, x, joined)
        return joined

    def _sum(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self._process_group)

    def _gather(self, num_columns: int, x: Tensor, joined: Tensor | None = None) -> None:
        """Fill `joined`, on the first rank, from all ranks' x."""
        widths = [len(span(num_columns, rank, self.size)) for rank in range(self.size)]
        x = F.pad(x, (0, widths[0] - widths[self.rank]))  # gather needs parts of one size
        parts = None if joined is None else [torch.empty_like(x) for _ in widths]
        dist.gather(x, parts, group=self._process_group, group_dst=0)
        if joined is not None and parts is not None:
            of_ranks = [part[:, :n] for part, n in zip(parts, widths, strict=True)]
            torch.cat(of_ranks, dim=1, out=joined)


ALONE = TensorGroup()
"""The group of a rank that has its layers to itself."""


@dataclass(frozen=True)
class ModelPart:
    """Some neighbouring layers of a model (a stage), and this rank's share of each.

    The first stage also has the embeddings, the last stage the final norm and the LM head.
    """

    device: torch.device
    dtype: torch.dtype
    layers: range
    num_layers: int
    """Layers of the whole model."""
    tensor: TensorGroup = ALONE
    quantization: Quantization | None = None
    int4_rounding: Int4Rounding = field(default_factory=Int4Rounding)
    """For all linear layers, if `quantization` is int4."""

    @property
    def rounds_weights(self) -> bool:
        """Whether linear layers are rounded when they are loaded, however they are stored."""
        return self.quantization in ("int8", "int4")

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers
