"""GPT-NeoX (Black et al. 2022) and Pythia: parallel residual, partly rotated heads.

`GPTNeoXLayer.__call__` computes a layer; `RotaryLM.forward` runs all layers. Checkpoint names are
those that `transformers.GPTNeoXForCausalLM` writes, without "gpt_neox.".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.gpt_neox_config import GPTNeoXConfig
from fastserve_backend.models.attention import Attention, AttentionBatch
from fastserve_backend.models.causal_lm import LMHead
from fastserve_backend.models.layers import (
    ColumnLinear,
    LayerNorm,
    RowLinear,
    VocabEmbedding,
    prefixed,
)
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.rotary_lm import RotaryEmbedding, RotaryLM, Rotation
from fastserve_backend.models.weights import (
    Parameter,
    StoredTensor,
    StoredWeight,
    WeightSource,
    reordered,
)

_ACTIVATIONS: dict[str, ops.Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


class GPTNeoXLayer:
    """One decoder layer (`RotaryLayer`)."""

    def __init__(self, config: GPTNeoXConfig, layer: int, part: ModelPart) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        norm = partial(LayerNorm, hidden, part=part, eps=config.layer_norm_eps)
        self._parallel = config.use_parallel_residual
        column = partial(ColumnLinear, part=part)
        # With a parallel residual one sum over the ranks serves both sub-layers.
        row = partial(RowLinear, part=part, reduce=not self._parallel)
        self._tensor = part.tensor
        self._attend = Attention.of(config, layer, part)
        self._qkv = column(hidden, {"query_key_value": 3 * hidden}, bias=config.attention_bias)
        self._out = row(hidden, {"dense": hidden}, bias=config.attention_bias)
        self._up = column(hidden, {"dense_h_to_4h": ffn}, bias=True)
        self._activation = _ACTIVATIONS[config.activation]
        self._down = row(ffn, {"dense_4h_to_h": hidden}, bias=True)
        self._attention_norm = norm()
        self._feed_forward_norm = norm()

    def parameters(self) -> dict[str, Parameter]:
        qkv = {name: self._by_part(one) for name, one in self._qkv.parameters().items()}
        return {
            **prefixed("attention", {**qkv, **self._out.parameters()}),
            **prefixed("mlp", {**self._up.parameters(), **self._down.parameters()}),
            **prefixed("input_layernorm", self._attention_norm.parameters()),
            **prefixed("post_attention_layernorm", self._feed_forward_norm.parameters()),
        }

    def _by_part(self, parameter: Parameter) -> Parameter:
        """Reorder a tensor while loading: the checkpoint has query, key and value head by head, the
        layer wants all queries, all keys, all values."""

        def load(weight: StoredWeight) -> None:
            heads, head_dim = self._attend.heads, self._attend.head_dim
            by_head = torch.arange(weight.shape[0]).view(heads, 3, head_dim)
            parameter.load(reordered(weight, by_head.transpose(0, 1).flatten()))

        return replace(parameter, load=load)

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        rotations: Sequence[Rotation],
        batch: AttentionBatch,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `RotaryLayer`."""
        total, normed = self._attention_norm(update, residual)
        qkv = self._qkv(normed)
        attended = self._out(self._attend(qkv, batch, kv, rotations[0].cos_sin))
        if self._parallel:  # both sub-layers see the same input
            _, normed = self._feed_forward_norm(update, residual)
            return self._tensor.sum(ops.add(attended, self._feed_forward(normed))), total
        total, normed = self._feed_forward_norm(attended, total)
        return self._feed_forward(normed), total

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self._down(ops.activate(self._up(x), self._activation))


class GPTNeoXModel(RotaryLM):
    def __init__(self, config: GPTNeoXConfig, part: ModelPart) -> None:
        hidden, vocab = config.hidden_size, config.vocab_size
        tokens = VocabEmbedding(vocab, hidden, part=part)
        tied_to = ("embed_in.weight", tokens) if config.tie_word_embeddings else None
        norm = LayerNorm(hidden, part=part, eps=config.layer_norm_eps)
        super().__init__(
            prefixes=("gpt_neox.",),
            computed=(".attention.bias", ".attention.masked_bias"),
            part=part,
            tokens=("embed_in", tokens),
            rotaries=[RotaryEmbedding(config.rotaries[0], config.max_model_len, part.device)],
            layers=[GPTNeoXLayer(config, layer, part) for layer in range(len(part.layers))],
            final_norm=("final_layer_norm", norm),
            head=LMHead("embed_out", hidden, vocab, tied_to=tied_to, part=part),
        )

    def _canonical(self, source: WeightSource) -> Iterator[StoredTensor]:
        # transformers 5 uses this name in memory, and in files unless told to write older names.
        head = {"lm_head.weight": "embed_out.weight"}
        return super()._canonical(
            replace(stored, name=head.get(stored.name, stored.name)) for stored in source
        )
