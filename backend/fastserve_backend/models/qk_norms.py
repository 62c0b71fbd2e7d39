"""Norms of queries and keys before attention (Henry et al. 2020)."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.decoder_config import DecoderConfig
from fastserve_backend.models.layers import RMSNorm, prefixed
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter


class QKNorms:
    """RMS norms of the queries and of the keys of each token: of each head, or of all together.

    Args:
        widths: elements of all queries and of all keys of this rank.
    """

    def __init__(self, query: RMSNorm, key: RMSNorm, widths: tuple[int, int]) -> None:
        self._query, self._key = query, key
        self._widths = widths

    def parameters(self) -> dict[str, Parameter]:
        return {
            **prefixed("q_norm", self._query.parameters()),
            **prefixed("k_norm", self._key.parameters()),
        }

    def __call__(self, qkv: Tensor) -> None:
        """Normalise queries and keys in place: qkv [T, all heads of the rank * head_dim]."""
        q, kv = self._widths
        self._query.in_place(qkv[:, :q])
        self._key.in_place(qkv[:, q : q + kv])


class LayerNormsByHead:
    """A layer norm of each head of queries and keys, with weights of its own (Command R+)."""

    def __init__(self, config: DecoderConfig, part: ModelPart) -> None:
        self._config = config
        self._heads = {
            "q_norm": part.tensor.part(config.num_heads),
            "k_norm": part.tensor.part(config.num_kv_heads),
        }
        counts = [len(range(one.start, one.stop)) for one in self._heads.values()]
        self._weight = torch.empty(sum(counts), config.head_dim, device=part.device)
        """float32 [query heads and key heads of this rank, head_dim]."""
        self._weights = dict(zip(self._heads, self._weight.split(counts), strict=True))

    def parameters(self) -> dict[str, Parameter]:
        counts = self._config.num_heads, self._config.num_kv_heads
        return {
            f"{name}.weight": Parameter(
                (count, self._config.head_dim),
                partial(self._take, self._weights[name]),
                (heads,),
                is_scale=True,
            )
            for (name, heads), count in zip(self._heads.items(), counts, strict=True)
        }

    def __call__(self, qkv: Tensor) -> None:
        """See ``QKNorms``."""
        ops.call_on_rows(self._normalise, qkv)

    def _take(self, weight: Tensor, stored: Tensor) -> None:
        weight.copy_(stored[:, self._config.head_order])

    def _normalise(self, qkv: Tensor) -> None:
        count, head_dim = self._weight.shape
        heads = qkv[:, : count * head_dim].unflatten(1, (count, head_dim))
        normed = F.layer_norm(heads.float(), (head_dim,), eps=self._config.norm_eps)
        heads.copy_(normed * self._weight)


class SharedLayerNorms:
    """A layer norm of each head, whose weights all queries or all keys share (Phi, Persimmon)."""

    def __init__(self, config: DecoderConfig, part: ModelPart) -> None:
        self._config = config
        size = part.tensor.size
        self._heads = {"q_norm": config.num_heads // size, "k_norm": config.num_kv_heads // size}
        self._weights = {
            f"{name}.{kind}": torch.empty(config.head_dim, device=part.device)
            for name in self._heads
            for kind in ("weight", "bias")
        }

    def parameters(self) -> dict[str, Parameter]:
        return {
            name: Parameter((self._config.head_dim,), own.copy_, is_scale=name.endswith(".weight"))
            for name, own in self._weights.items()
        }

    def __call__(self, qkv: Tensor) -> None:
        """See ``QKNorms``."""
        ops.call_on_rows(self._normalise, qkv)

    def _normalise(self, qkv: Tensor) -> None:
        head_dim, start = self._config.head_dim, 0
        for name, count in self._heads.items():
            heads = qkv[:, start : start + count * head_dim].unflatten(1, (count, head_dim))
            weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
            heads.copy_(
                F.layer_norm(heads.float(), (head_dim,), weight, bias, self._config.norm_eps)
            )
            start += count * head_dim


def qk_norms_of(
    config: DecoderConfig, part: ModelPart
) -> QKNorms | LayerNormsByHead | SharedLayerNorms | None:
    """The norms of a layer; None if the model has none."""
    if config.qk_norm is None:
        return None
    if config.qk_norm == "layer":
        return SharedLayerNorms(config, part)
    if config.qk_norm == "layer_by_head":
        return LayerNormsByHead(config, part)
    plus_one = config.norm_plus_one

    def norm(heads: int) -> RMSNorm:
        if config.qk_norm == "head":
            return RMSNorm(config.head_dim, part=part, eps=config.norm_eps, plus_one=plus_one)
        width = heads * config.head_dim
        own = part.tensor.part(width)
        return RMSNorm(width, part=part, eps=config.norm_eps, plus_one=plus_one, shard=(own,))

    size = part.tensor.size
    q, kv = config.num_heads // size, config.num_kv_heads // size
    widths = q * config.head_dim, kv * config.head_dim
    return QKNorms(norm(config.num_heads), norm(config.num_kv_heads), widths)
