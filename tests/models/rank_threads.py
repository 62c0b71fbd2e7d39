"""All ranks of a model as threads of one process: the arithmetic of ranks without their
processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.partition import layers_of_stages, span
from fastserve_backend.models.attention import AttentionBatch
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.model_part import TensorGroup
from torch import Tensor
from waiting import DEADLINE_S

Result = TypeVar("Result")


class Meeting:
    """The point where the threads of a stage exchange tensors. It counts their sums."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_sums = 0
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given[rank] = x.clone()
        self._barrier.wait(DEADLINE_S)
        given = list(self._given)
        self._barrier.wait(DEADLINE_S)
        return given


class ThreadGroup(TensorGroup):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting.size)
        self._meeting = meeting

    def _sum(self, x: Tensor) -> None:
        if self.rank == 0:
            self._meeting.num_sums += 1
        x.copy_(torch.stack(self._meeting.exchange(self.rank, x)).sum(0))

    def _gather(self, num_columns: int, x: Tensor, joined: Tensor | None = None) -> None:
        assert x.shape[1] == len(span(num_columns, self.rank, self.size))
        parts = self._meeting.exchange(self.rank, x)
        if joined is not None:
            torch.cat(parts, dim=1, out=joined)


class DividedModel:
    """A model of ``tensor_size × num_stages`` parts that looks like a whole one (`CausalLM`)."""

    def __init__(self, config: ModelConfig, tensor_size: int, num_stages: int) -> None:
        self._config = config
        self._stages = layers_of_stages(config, num_stages)
        self._size = tensor_size
        self.meetings = [Meeting(tensor_size) for _ in self._stages]
        self._pool = ThreadPoolExecutor(tensor_size)
        self._parts: list[list[CausalLM]] = [
            self._on_all(partial(_load, config, layers, meeting))
            for layers, meeting in zip(self._stages, self.meetings, strict=True)
        ]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        hidden: None,
        sampled: Tensor,
    ) -> Tensor:
        """``kv`` is the whole model's. Each rank has a copy of its part."""
        received: list[Tensor | None] = [None] * self._size
        for models, layers in zip(self._parts, self._stages, strict=True):
            views = [self._part_of(kv, layers, rank) for rank in range(self._size)]
            parts = [view.contiguous() for view in views]
            step = (token_ids, positions, batch)
            received = self._on_all(partial(_run, models, parts, received, step, sampled))
            for view, part in zip(views, parts, strict=True):
                view.copy_(part)
        logits, *others = received
        assert logits is not None
        assert others == [None] * len(others)
        return logits

    def _part_of(self, kv: Tensor, layers: range, rank: int) -> Tensor:
        heads = span(self._config.num_kv_heads, rank, self._size)
        stop = layers.start + self._config.layer_groups.depth(layers)
        return kv[:, layers.start : stop, :, heads.start : heads.stop]

    def _on_all(self, run: Callable[[int], Result]) -> list[Result]:
        def without_gradients(rank: int) -> Result:
            with torch.inference_mode():  # results of this thread
                return run(rank)

        return list(self._pool.map(without_gradients, range(self._size)))


def _load(config: ModelConfig, layers: range, meeting: Meeting, rank: int) -> CausalLM:
    tensor = ThreadGroup(rank, meeting)
    return load_model(config, torch.device("cpu"), layers=layers, tensor=tensor)


def _run(
    models: list[CausalLM],
    parts: list[Tensor],
    received: list[Tensor | None],
    step: tuple[Tensor, Tensor, AttentionBatch],
    sampled: Tensor,
    rank: int,
) -> Tensor | None:
    return models[rank].forward(*step, parts[rank], received[rank], sampled)
