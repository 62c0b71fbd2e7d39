"""What models with rotary positions have in common: all but their layers and their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fastserve_backend.models.attention_batch import AttentionBatch
from fastserve_backend.models.causal_lm import CausalLM
from fastserve_backend.models.layers import LayerNorm, RMSNorm, VocabEmbedding, prefixed
from fastserve_backend.models.lm_head import LMHead
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.rotary import RotaryEmbedding
from fastserve_backend.models.weights import Parameter

# What transformers has kept beside the weights, in one version or another.
_ROTARY_BUFFERS = tuple(f".rotary_emb.{one}" for one in ("inv_freq", "cos_cached", "sin_cached"))


class RotaryLayer(Protocol):
    """One decoder layer."""

    def parameters(self) -> dict[str, Parameter]: ...

    def __call__(
        self, update: Tensor, residual: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(update, residual) [T, hidden] of the layer before to its own: their sum is the hidden
        state, and is left to the next norm, which fuses it."""
        ...


class RotaryLM(CausalLM):
    """Layers are those of the part, in order; tokens and final_norm come with their names.
    `computed` is as in `CausalLM`, whose rotary tables are among them."""

    def __init__(
        self,
        *,
        prefix: str,
        computed: tuple[str, ...] = (),
        part: ModelPart,
        tokens: tuple[str, VocabEmbedding],
        rotary: RotaryEmbedding,
        layers: Sequence[RotaryLayer],
        final_norm: tuple[str, LayerNorm | RMSNorm],
        head: LMHead,
    ) -> None:
        tokens_name, self._tokens = tokens
        self._rotary = rotary
        self._layers = layers
        final_norm_name, self._final_norm = final_norm
        super().__init__(
            part,
            prefixes=(prefix,),
            computed=(*_ROTARY_BUFFERS, *computed),
            first=prefixed(tokens_name, self._tokens.parameters()),
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
    ) -> Tensor:
        cos_sin = self._rotary(positions)
        residual = self._tokens(token_ids) if hidden is None else hidden
        update = torch.zeros_like(residual)
        for layer in self._layers:
            update, residual = layer(update, residual, cos_sin, batch, kv)
        if not self._part.is_last:
            return residual + update
        return self._final_norm(update, residual)[1]
