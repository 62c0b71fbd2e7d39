"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.decoder_config import Activation, DecoderConfig
from fastserve_backend.models.layers import ColumnLinear, RowLinear
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": torch.relu,
    "relu_squared": _relu_squared,
}


class FeedForward:
    """A product, an activation and a product. If it is gated, half of the first product's result,
    activated, is multiplied by the other half (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, part: ModelPart) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        *ups, down = config.mlp
        self._up = ColumnLinear(hidden, dict.fromkeys(ups, ffn), bias=config.mlp_bias, part=part)
        self._activate = _activation(config.activation, is_gated=len(ups) == 2)
        self._down = RowLinear(
            ffn, {down: hidden}, bias=config.mlp_bias, part=part, reduce=not config.is_parallel
        )

    def parameters(self) -> dict[str, Parameter]:
        return {**self._up.parameters(), **self._down.parameters()}

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self._down(self._activate(self._up(x)))


def _activation(name: Activation, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
    """[T, n] -> [T, n]; a gated one [T, 2n] -> [T, n]."""
    if not is_gated:
        return _ACTIVATIONS[name]
    if name == "silu":
        return ops.silu_mul
    return ops.gelu_tanh_mul if name == "gelu_tanh" else partial(_gated, _ACTIVATIONS[name])


def _gated(activate: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activate(gate) * up
