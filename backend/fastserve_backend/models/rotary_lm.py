"""`RotaryLM`: the base of models with rotary positions.

An architecture adds its layers and the names of its tensors; `RotaryLM.forward` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.rotary_config import Rotary
from fastserve_backend.models.attention import AttentionBatch
from fastserve_backend.models.causal_lm import CausalLM, LMHead
from fastserve_backend.models.layers import (
    Embedding,
    LayerNorm,
    RMSNorm,
    VocabEmbedding,
    prefixed,
)
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter

# Buffers that one version of transformers or another has stored beside the weights.
_ROTARY_BUFFERS = tuple(f".rotary_emb.{one}" for one in ("inv_freq", "cos_cached", "sin_cached"))


class Rotation(NamedTuple):
    """How the queries and keys of T tokens are rotated."""

    cos_sin: Tensor
    """float32 [T, dim]: dim / 2 cosines, then dim / 2 sines."""
    query_factors: Tensor | None = None
    """float32 [T, 1]: factors of the queries; None: all 1."""


class RotaryLayer(Protocol):
    """One decoder layer."""

    def parameters(self) -> dict[str, Parameter]: ...

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        rotations: Sequence[Rotation],
        batch: AttentionBatch,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(update, residual), both [T, hidden], of the layer before -> those of this layer.

        rotations: those of the model's rotary embeddings, in order.

        Their sum is the hidden state. The next norm adds them, in the same kernel.
        """
        ...


class RotaryLM(CausalLM):
    """Embeds tokens, runs the layers with their rotations, and normalises.

    Args:
        prefixes, computed: as in `CausalLM`; the rotary tables need not be named.
        tokens, final_norm: blocks with their checkpoint names.
        positions: an embedding of positions, which is added to the tokens'.
        embedding_factor: factor of the embeddings. It is rounded to the model's dtype.
        rotaries: the layers' rotations, from which each layer chooses.
        layers: those of the part, in order.
    """

    def __init__(
        self,
        *,
        prefixes: tuple[str, ...],
        computed: tuple[str, ...] = (),
        part: ModelPart,
        tokens: tuple[str, VocabEmbedding],
        positions: tuple[str, Embedding] | None = None,
        embedding_factor: float = 1.0,
        rotaries: Sequence[RotaryEmbedding],
        layers: Sequence[RotaryLayer],
        final_norm: tuple[str, LayerNorm | RMSNorm],
        head: LMHead,
    ) -> None:
        tokens_name, self._tokens = tokens
        self._positions = None if positions is None else positions[1]
        self._embedding_factor = float(torch.tensor(embedding_factor, dtype=part.dtype))
        self._rotaries = rotaries
        self._layers = layers
        final_norm_name, self._final_norm = final_norm
        first = prefixed(tokens_name, self._tokens.parameters())
        if positions is not None:
            first |= prefixed(positions[0], positions[1].parameters())
        super().__init__(
            part,
            prefixes=prefixes,
            computed=(*_ROTARY_BUFFERS, *computed),
            first=first,
            layers=[layer.parameters() for layer in layers],
            last=prefixed(final_norm_name, self._final_norm.parameters()),
            head=head,
        )

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        hidden: Tensor | None = None,
        sampled: Tensor | None = None,
    ) -> Tensor | None:
        rotations = [rotary(positions) for rotary in self._rotaries]
        residual = self._embedded(token_ids) if hidden is None else hidden
        if hidden is None and self._positions is not None:
            update = self._positions(positions)
        else:
            update = ops.zeros_like(residual)
        for layer in self._layers:
            update, residual = layer(update, residual, rotations, batch, kv)
        if not self._part.is_last:
            return ops.add(residual, update)
        return self._output(self._final_norm(update, residual)[1], sampled)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        embedded = self._tokens(token_ids)
        factor = self._embedding_factor
        return embedded if factor == 1.0 else ops.scale_(embedded, factor)


class RotaryEmbedding:
    """The angles by which queries and keys are rotated: cosines and sines of all positions. A step
    looks them up once for all layers."""

    def __init__(self, rotary: Rotary, positions: int, device: torch.device) -> None:
        table = _cosines_and_sines(rotary.frequencies, positions, rotary.scale)
        if rotary.switch is not None and positions > rotary.switch:
            table = table[: rotary.switch]
            long = _cosines_and_sines(rotary.long_frequencies, positions, rotary.scale)
            table = np.concatenate([table, long[::-1]])  # -1 is the last row
        self._table = torch.from_numpy(table).to(device)
        self._query_factors: Tensor | None = None
        if rotary.query_growth is not None:
            beta, trained = rotary.query_growth
            windows = torch.arange(positions, device=device) // trained
            self._query_factors = 1 + beta * torch.log1p(windows.float())[:, None]

    def __call__(self, positions: Tensor) -> Rotation:
        """The rotations of T tokens: positions int64 [T]. -1 - p stands for position p of a long
        job (`Rotary.switch`)."""
        cos_sin = ops.lookup_rows(self._table, positions)
        if self._query_factors is None:
            return Rotation(cos_sin)
        return Rotation(cos_sin, ops.lookup_rows(self._query_factors, positions))


def _cosines_and_sines(
    frequencies: Sequence[float], positions: int, scale: float
) -> npt.NDArray[np.float32]:
    """[positions, 2 * len(frequencies)]."""
    angles = np.outer(
        np.arange(positions, dtype=np.float32), np.array(frequencies, dtype=np.float32)
    )
    # Not with torch: on a CPU a process's first cosines are sometimes wrong by 1e-4, if two of
    # MKL's threads compute them at once (github.com/pytorch/pytorch/issues/188792).
    parts = [function(angles, dtype=np.float64) for function in (np.cos, np.sin)]
    table: npt.NDArray[np.float32] = (np.concatenate(parts, axis=1) * scale).astype(np.float32)
    return table
