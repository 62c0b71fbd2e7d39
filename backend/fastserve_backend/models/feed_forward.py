"""The feed-forward block of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.decoder_config import Activation, DecoderConfig
from fastserve_backend.models.layers import ColumnLinear, RowLinear, prefixed
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter


class FeedForward:
    """A product, an activation and a product. If it is gated, half of the first product's result,
    activated, is multiplied by the other half (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig, part: ModelPart) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        *ups, down = config.mlp
        self._up = ColumnLinear(hidden, dict.fromkeys(ups, ffn), bias=config.mlp_bias, part=part)
        self._xielu = XIELU(part) if config.activation == "xielu" else None
        self._activate = self._xielu or _activation(config.activation, is_gated=len(ups) == 2)
        self._down = RowLinear(
            ffn, {down: hidden}, bias=config.mlp_bias, part=part, reduce=not config.is_parallel
        )

    def parameters(self) -> dict[str, Parameter]:
        own = {**self._up.parameters(), **self._down.parameters()}
        if self._xielu is not None:
            own |= prefixed("act_fn", self._xielu.parameters())
        return own

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        return self._down(self._activate(self._up(x)))


class XIELU:
    """An activation that is learned (Huang and Schlag 2024).

    Let p be softplus(alpha_p), and n be beta + softplus(alpha_n). A positive x gives
    p · x² + beta · x. Any other gives (e^min(x, eps) - 1 - x) · n + beta · x."""

    def __init__(self, part: ModelPart) -> None:
        self._numbers = {
            name: torch.empty(shape, device=part.device)
            for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))
        }

    def parameters(self) -> dict[str, Parameter]:
        return {name: Parameter(tuple(own.shape), own.copy_) for name, own in self._numbers.items()}

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, n] -> [T, n], in place, computed in fp32."""
        ops.call_on_rows(self._apply, x)
        return x

    def _apply(self, x: Tensor) -> None:
        alpha_p, alpha_n, beta, eps = self._numbers.values()
        y = x.float()
        positive = F.softplus(alpha_p) * y * y
        negative = (torch.expm1(y.minimum(eps)) - y) * (beta + F.softplus(alpha_n))
        x.copy_(torch.where(y > 0, positive, negative) + beta * y)


def _activation(name: Activation, *, is_gated: bool) -> Callable[[Tensor], Tensor]:
    assert name != "xielu"
    return partial(ops.activate_mul if is_gated else ops.activate, activation=name)
