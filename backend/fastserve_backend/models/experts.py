"""A mixture of experts in place of the feed-forward block of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from fastserve_kernels import ops
from fastserve_kernels.quantized_weight import QuantizedWeight
from torch import Tensor

from fastserve_backend.checkpoints.experts_config import ExpertsConfig
from fastserve_backend.models.int4_rounding import int4_group
from fastserve_backend.models.layers import ColumnLinear, Linear, RowLinear, prefixed
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter, StoredWeight, reordered

Load = Callable[[Sequence[StoredWeight], Tensor | None], None]
"""Takes weights [out, in], which are one below the other, and a bias [all out] or None."""


class Experts:
    """A router chooses experts for each token; the results are summed with the router's weights.

    Each rank has whole experts, and computes the tokens that chose them; the sum over the ranks
    joins the results. So a rank reads only its experts' tensors, products keep their width, and
    what groups of few bits share needs no division. The price is that the ranks' work is unequal,
    and differs from step to step.

    The router is whole on every rank. It is never rounded: it is small, and its scores decide.
    """

    def __init__(self, config: ExpertsConfig, hidden: int, part: ModelPart) -> None:
        self._config, self._hidden, self._part = config, hidden, part
        whole = replace(part, quantization=None)
        self._router = Linear(hidden, {"gate": config.count}, bias=config.has_biases, part=whole)
        own = part.tensor.part(config.count)
        self._own = range(own.start, own.stop)
        grouped = partial(
            ops.GroupedLinear,
            len(self._own),
            bias=config.has_biases,
            dtype=part.dtype,
            device=part.device,
            int8=part.quantization == "int8",
        )
        ffn = config.intermediate_size
        self._up = grouped(2 * ffn, hidden)
        self._down = grouped(hidden, ffn)
        self._activate: Callable[[Tensor], Tensor] = ops.silu_mul
        if gate := config.clamped_gate:
            self._activate = partial(ops.clamped_swiglu, alpha=gate.alpha, limit=gate.limit)
        self._choice_bias: Tensor | None = None
        if config.has_choice_bias:
            self._choice_bias = torch.empty(config.count, device=part.device)
        self._shared = _SharedExpert(config, hidden, part) if config.shared_size else None

    def parameters(self) -> dict[str, Parameter]:
        """The tensors of the router ("gate", "choice_bias"), of this rank's experts
        ("experts.<number>") and of the shared one."""
        wanted = self._router.parameters()
        if self._choice_bias is not None:
            wanted["choice_bias"] = Parameter((self._config.count,), self._choice_bias.copy_)
        for place, number in enumerate(self._own):
            wanted |= prefixed(f"experts.{number}", self._parameters_of(place))
        if self._shared is not None:
            wanted |= self._shared.parameters()
        return wanted

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden], summed over the ranks."""
        config = self._config
        weights, chosen = ops.choose(
            self._router(x), config.top_k, config.routing, self._choice_bias
        )
        routes = ops.sort_choices(chosen, self._own.start, len(self._own))
        between = self._activate(self._up(x, routes.starts, routes.tokens))
        out = ops.sum_choices(self._down(between, routes.starts), weights, routes)
        if self._shared is not None:
            out = ops.add(out, self._shared(x))
        return self._part.tensor.sum(out)

    def _parameters_of(self, place: int) -> dict[str, Parameter]:
        """The tensors of this rank's expert `place`, named below the expert."""
        config, hidden = self._config, self._hidden
        ffn, has_bias = config.intermediate_size, config.has_biases
        up, down = partial(self._up.load, place), partial(self._down.load, place)
        if config.is_fused:
            rows = {"gate_up_proj": 2 * ffn}
            load = partial(_load_in_halves, up)
        else:
            rows, load = {"gate_proj": ffn, "up_proj": ffn}, up
        first = _Product(rows, hidden, has_bias, load, self._part)
        second = _Product({"down_proj": hidden}, ffn, has_bias, down, self._part)
        return first.parameters() | second.parameters()


class _Product:
    """Collects the tensors of one product of an expert, and loads them when all are there.

    Args:
        parts: checkpoint layers, name -> out features. They are stacked in this order.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        in_features: int,
        has_bias: bool,
        load: Load,
        part: ModelPart,
    ) -> None:
        self._parts, self._in_features = parts, in_features
        self._has_bias, self._load, self._part = has_bias, load, part
        self._group = 0
        if part.quantization == "int4":
            self._group = int4_group(parts, slice(0, in_features))
        self._weights: dict[str, StoredWeight] = {}
        self._biases: dict[str, Tensor] = {}

    def parameters(self) -> dict[str, Parameter]:
        wanted = {}
        for name, size in self._parts.items():
            wanted[f"{name}.weight"] = Parameter(
                (size, self._in_features), partial(self._take_weight, name), takes_quantized=True
            )
            if self._has_bias:
                wanted[f"{name}.bias"] = Parameter((size,), partial(self._take_bias, name))
        return wanted

    def _take_weight(self, name: str, weight: StoredWeight) -> None:
        part = self._part
        if isinstance(weight, QuantizedWeight) and part.rounds_weights:
            weight = weight.dequantized(part.dtype)
        if part.quantization == "int4":
            assert isinstance(weight, Tensor)
            weight = part.int4_rounding(weight.to(part.device, part.dtype), self._group)
        self._weights[name] = weight
        self._load_when_complete()

    def _take_bias(self, name: str, tensor: Tensor) -> None:
        self._biases[name] = tensor
        self._load_when_complete()

    def _load_when_complete(self) -> None:
        if len(self._weights) + len(self._biases) < len(self._parts) * (1 + self._has_bias):
            return
        bias = torch.cat([self._biases[name] for name in self._parts]) if self._has_bias else None
        self._load([self._weights[name] for name in self._parts], bias)
        self._weights.clear()
        self._biases.clear()


def _load_in_halves(load: Load, weights: Sequence[StoredWeight], bias: Tensor | None) -> None:
    """Rows 0, 2, 4, … of the only weight come first, then the others."""
    (weight,) = weights
    rows = torch.arange(weight.shape[0]).view(-1, 2).T.flatten()
    load([reordered(weight, rows)], None if bias is None else bias[rows])


class _SharedExpert:
    """A feed-forward block for all tokens, perhaps times the logistic function of one more product
    (Qwen1.5-MoE). Its features are divided among the ranks, which leave the sum to the caller."""

    def __init__(self, config: ExpertsConfig, hidden: int, part: ModelPart) -> None:
        size = config.shared_size
        self._up = ColumnLinear(hidden, {"gate_proj": size, "up_proj": size}, bias=False, part=part)
        self._down = RowLinear(size, {"down_proj": hidden}, bias=False, part=part, reduce=False)
        self._gate = (
            Linear(hidden, {"shared_expert_gate": 1}, bias=False, part=part)
            if config.shared_has_gate
            else None
        )

    def parameters(self) -> dict[str, Parameter]:
        block = prefixed("shared_expert", {**self._up.parameters(), **self._down.parameters()})
        return block if self._gate is None else {**block, **self._gate.parameters()}

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> this rank's part of [T, hidden]."""
        out = self._down(ops.silu_mul(self._up(x)))
        return out if self._gate is None else ops.scale_by_sigmoid_(out, self._gate(x))
