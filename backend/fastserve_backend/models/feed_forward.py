"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from functools import partial

from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.decoder_config import DecoderConfig
from fastserve_backend.models.layers import ColumnLinear, RowLinear
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter


class FeedForward:
    """A product, an activation and a product. If it is gated, half of the first product's result,
    activated, is multiplied by the other half (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, part: ModelPart) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        *ups, down = config.mlp
        self._up = ColumnLinear(hidden, dict.fromkeys(ups, ffn), bias=config.mlp_bias, part=part)
        activate = ops.activate_mul if len(ups) == 2 else ops.activate
        self._activate = partial(activate, activation=config.activation)
        self._down = RowLinear(
            ffn, {down: hidden}, bias=config.mlp_bias, part=part, reduce=not config.is_parallel
        )

    def parameters(self) -> dict[str, Parameter]:
        return {**self._up.parameters(), **self._down.parameters()}

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self._down(self._activate(self._up(x)))
