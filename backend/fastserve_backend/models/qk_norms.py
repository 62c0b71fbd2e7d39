"""Norms of queries and keys before attention (Henry et al. 2020)."""

from __future__ import annotations

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


def qk_norms_of(config: DecoderConfig, part: ModelPart) -> QKNorms | None:
    """The norms of a layer; None if the model has none."""
    if config.qk_norm is None:
        return None
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
