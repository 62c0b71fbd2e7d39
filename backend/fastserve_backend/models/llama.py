"""LLaMA (Touvron et al. 2023) and models of its architecture: grouped KV heads, any rotary variant.

Checkpoint names are those of `transformers.LlamaForCausalLM` without "model.".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from fastserve_kernels import ops
from torch import Tensor

from .layers import Attention, AttentionBatch, Embedding, Linear, RMSNorm, prefixed
from .llama_config import LlamaConfig
from .lm_head import LMHead
from .rotary import RotaryEmbedding, rotate
from .weights import NamedTensors, Parameter

# Older checkpoints hold the rotary frequencies, which follow from the configuration.
_COMPUTED = ".rotary_emb.inv_freq"


class LlamaLayer:
    """One decoder layer; the residual sums are left to the model, which fuses them with norms."""

    def __init__(
        self, config: LlamaConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        linear = partial(Linear, dtype=dtype, device=device)
        self._num_rotated = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._qkv = linear(
            hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias=config.attention_bias
        )
        self._attend = Attention(
            layer, config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self._out = linear(q, {"o_proj": hidden}, bias=config.attention_bias)
        self._gate_up = linear(hidden, {"gate_proj": ffn, "up_proj": ffn}, bias=config.mlp_bias)
        self._down = linear(ffn, {"down_proj": hidden}, bias=config.mlp_bias)
        norm = partial(RMSNorm, hidden, dtype=dtype, device=device, eps=config.rms_norm_eps)
        self.attention_norm = norm()
        self.feed_forward_norm = norm()

    def parameters(self) -> dict[str, Parameter]:
        return {
            **prefixed("self_attn", {**self._qkv.parameters(), **self._out.parameters()}),
            **prefixed("mlp", {**self._gate_up.parameters(), **self._down.parameters()}),
            **prefixed("input_layernorm", self.attention_norm.parameters()),
            **prefixed("post_attention_layernorm", self.feed_forward_norm.parameters()),
        }

    def attention(self, x: Tensor, cos_sin: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        qkv = self._qkv(x)
        rotate(qkv, self._num_rotated, self._head_dim, cos_sin)
        return self._out(self._attend(qkv, batch, kv))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self._down(ops.silu_mul(self._gate_up(x)))


class LlamaModel:
    """The decoder and its LM head. Load weights once, then call under `torch.inference_mode`."""

    def __init__(self, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._rotary = RotaryEmbedding(config.rotary, config.max_model_len, device)
        self._layers = [LlamaLayer(config, i, device, dtype) for i in range(config.num_layers)]
        self._final_norm = RMSNorm(
            config.hidden_size, dtype=dtype, device=device, eps=config.rms_norm_eps
        )
        self._head = LMHead(
            "lm_head",
            config.hidden_size,
            config.vocab_size,
            tied_to=("embed_tokens.weight", self._tokens) if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that the model wants, by name; a tied LM head is none of them."""
        wanted = prefixed("embed_tokens", self._tokens.parameters())
        for index, layer in enumerate(self._layers):
            wanted |= prefixed(f"layers.{index}", layer.parameters())
        wanted |= prefixed("norm", self._final_norm.parameters())
        return wanted | self._head.parameters()

    def load_weights(self, tensors: NamedTensors) -> None:
        """Take all weights. Raises ModelError for missing, unexpected or misshapen tensors."""
        self._head.load_model(self.parameters(), _canonical(tensors))

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> Tensor:
        """Run the step's T tokens: token_ids and positions int64 [T] -> hidden states [T, hidden].

        Writes their keys and values to the cache `kv`, [blocks, layers, 2, kv_heads, block_size,
        head_dim].
        """
        cos_sin = self._rotary(positions)
        residual = self._tokens(token_ids)
        update = torch.zeros_like(residual)
        for layer in self._layers:
            residual, normed = layer.attention_norm(update, residual)
            update = layer.attention(normed, cos_sin, batch, kv)
            residual, normed = layer.feed_forward_norm(update, residual)
            update = layer.feed_forward(normed)
        return self._final_norm(update, residual)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of what `forward` returned -> logits [R, vocab]."""
        return self._head(hidden)


def _canonical(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if not name.endswith(_COMPUTED):
            yield name.removeprefix("model."), tensor
