"""LLaMA (Touvron et al. 2023) and models of its architecture: grouped KV heads, any rotary variant.

`LlamaLayer.__call__` computes a layer; `RotaryLM.forward` runs all layers between the embedding and
the final norm. Checkpoint names are those of `transformers.LlamaForCausalLM` without "model.".
"""

from __future__ import annotations

from functools import partial

from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.llama_config import LlamaConfig
from fastserve_backend.models.attention import Attention, AttentionBatch
from fastserve_backend.models.causal_lm import LMHead
from fastserve_backend.models.layers import (
    ColumnLinear,
    RMSNorm,
    RowLinear,
    VocabEmbedding,
    prefixed,
)
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.rotary_lm import RotaryEmbedding, RotaryLM
from fastserve_backend.models.weights import Parameter


class LlamaLayer:
    """One decoder layer (`RotaryLayer`)."""

    def __init__(self, config: LlamaConfig, layer: int, part: ModelPart) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        column, row = partial(ColumnLinear, part=part), partial(RowLinear, part=part)
        self._attend = Attention.of(config, layer, part)
        self._qkv = column(
            hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=config.attention_bias
        )
        self._out = row(q, {"o_proj": hidden}, bias=config.attention_bias)
        self._gate_up = column(hidden, {"gate_proj": ffn, "up_proj": ffn}, bias=config.mlp_bias)
        self._down = row(ffn, {"down_proj": hidden}, bias=config.mlp_bias)
        norm = partial(RMSNorm, hidden, part=part, eps=config.rms_norm_eps)
        self._attention_norm = norm()
        self._feed_forward_norm = norm()

    def parameters(self) -> dict[str, Parameter]:
        return {
            **prefixed("self_attn", {**self._qkv.parameters(), **self._out.parameters()}),
            **prefixed("mlp", {**self._gate_up.parameters(), **self._down.parameters()}),
            **prefixed("input_layernorm", self._attention_norm.parameters()),
            **prefixed("post_attention_layernorm", self._feed_forward_norm.parameters()),
        }

    def __call__(
        self, update: Tensor, residual: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `RotaryLayer`."""
        residual, normed = self._attention_norm(update, residual)
        qkv = self._qkv(normed)
        attended = self._out(self._attend(qkv, batch, kv, cos_sin))
        residual, normed = self._feed_forward_norm(attended, residual)
        return self._down(ops.silu_mul(self._gate_up(normed))), residual


class LlamaModel(RotaryLM):
    def __init__(self, config: LlamaConfig, part: ModelPart) -> None:
        hidden, vocab = config.hidden_size, config.vocab_size
        tokens = VocabEmbedding(vocab, hidden, part=part)
        tied_to = ("embed_tokens.weight", tokens) if config.tie_word_embeddings else None
        super().__init__(
            prefix="model.",
            part=part,
            tokens=("embed_tokens", tokens),
            rotary=RotaryEmbedding(config.rotary, config.max_model_len, part.device),
            layers=[LlamaLayer(config, layer, part) for layer in range(len(part.layers))],
            final_norm=("norm", RMSNorm(hidden, part=part, eps=config.rms_norm_eps)),
            head=LMHead("lm_head", hidden, vocab, tied_to=tied_to, part=part),
        )
