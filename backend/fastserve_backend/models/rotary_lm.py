"""What models with rotary positions have in common: all but their layers and their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fastserve_backend.models.attention_batch import AttentionBatch
from fastserve_backend.models.layers import LayerNorm, RMSNorm, VocabEmbedding, prefixed
from fastserve_backend.models.lm_head import LMHead
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.rotary import RotaryEmbedding
from fastserve_backend.models.weights import Parameter, StoredTensor, WeightSource


class RotaryLayer(Protocol):
    """One decoder layer."""

    def parameters(self) -> dict[str, Parameter]: ...

    def __call__(
        self, update: Tensor, residual: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(update, residual) [T, hidden] of the layer before to its own: their sum is the hidden
        state, and is left to the next norm, which fuses it."""
        ...


class RotaryLM:
    """The decoder and its LM head. Load weights once, then call under `torch.inference_mode`.

    Args:
        prefix: of checkpoint names, left out below.
        computed: ends of the names of tensors that older checkpoints hold although they follow
            from the configuration.
        tokens, final_norm: with their names.
        layers: those of the part, in order.
    """

    def __init__(
        self,
        *,
        prefix: str,
        computed: tuple[str, ...],
        part: ModelPart,
        tokens: tuple[str, VocabEmbedding],
        rotary: RotaryEmbedding,
        layers: Sequence[RotaryLayer],
        final_norm: tuple[str, LayerNorm | RMSNorm],
        head: LMHead,
    ) -> None:
        self._prefix, self._computed = prefix, computed
        self._part = part
        self._tokens_name, self._tokens = tokens
        self._rotary = rotary
        self._layers = layers
        self._final_norm_name, self._final_norm = final_norm
        self._head = head

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that the stage wants, by name; a tied head's as `LMHead.parameters` says."""
        wanted: dict[str, Parameter] = {}
        if self._part.is_first:
            wanted |= prefixed(self._tokens_name, self._tokens.parameters())
        for index, layer in zip(self._part.layers, self._layers, strict=True):
            wanted |= prefixed(f"layers.{index}", layer.parameters())
        if self._part.is_last:
            wanted |= prefixed(self._final_norm_name, self._final_norm.parameters())
        return wanted | self._head.parameters()

    def load_weights(self, source: WeightSource, elsewhere: Collection[str] = ()) -> None:
        """Take all weights; tensors named in `elsewhere` may be there for other stages.

        Raises ModelError for missing, unexpected or misshapen tensors.
        """
        self._head.load_model(self.parameters(), self._canonical(source), elsewhere)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Run the step's T tokens: token_ids and positions int64 [T] -> hidden states [T, hidden].

        Writes their keys and values to the cache `kv`, [blocks, layers, 2, kv_heads, block_size,
        head_dim]. `hidden` is what the stage before returned; the first has none.
        """
        cos_sin = self._rotary(positions)
        residual = self._tokens(token_ids) if hidden is None else hidden
        update = torch.zeros_like(residual)
        for layer in self._layers:
            update, residual = layer(update, residual, cos_sin, batch, kv)
        if not self._part.is_last:
            return residual + update
        return self._final_norm(update, residual)[1]

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden [R, hidden], rows of what the last stage's `forward` returned -> logits [R,
        vocab]; None but on the first rank of the stage."""
        return self._head(hidden)

    def _canonical(self, source: WeightSource) -> Iterator[StoredTensor]:
        for stored in source:
            if not stored.name.endswith(self._computed):
                yield replace(stored, name=stored.name.removeprefix(self._prefix))
