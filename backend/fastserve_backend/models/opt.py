"""OPT (Zhang et al. 2022), the published sizes and the post-norm 350m variant.

Checkpoint names are those of `transformers.OPTForCausalLM` without "model.decoder.", and older
checkpoints begin at "decoder.".
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from .layers import Attention, AttentionBatch, Embedding, LayerNorm, Linear, prefixed
from .lm_head import LMHead
from .opt_config import POSITION_OFFSET, OPTConfig
from .weights import NamedTensors, Parameter


class OPTLayer:
    """One decoder layer; the residual sums are left to the model, which fuses them with norms."""

    def __init__(
        self, config: OPTConfig, layer: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        linear = partial(Linear, bias=config.enable_bias, dtype=dtype, device=device)
        norm = partial(
            LayerNorm,
            hidden,
            affine=config.layer_norm_elementwise_affine,
            dtype=dtype,
            device=device,
        )
        self._qkv = linear(hidden, {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden})
        self._attend = Attention(
            layer, config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5
        )
        self._out = linear(hidden, {"out_proj": hidden})
        self._fc1 = linear(hidden, {"fc1": ffn}, relu=config.activation == "relu")
        self._gelu = config.activation == "gelu"
        self._fc2 = linear(ffn, {"fc2": hidden})
        # Before their sub-layer, or after it where the model is post-norm.
        self.attention_norm = norm()
        self.feed_forward_norm = norm()

    def parameters(self) -> dict[str, Parameter]:
        return {
            **prefixed("self_attn", {**self._qkv.parameters(), **self._out.parameters()}),
            **prefixed("self_attn_layer_norm", self.attention_norm.parameters()),
            **self._fc1.parameters(),
            **self._fc2.parameters(),
            **prefixed("final_layer_norm", self.feed_forward_norm.parameters()),
        }

    def attention(self, x: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        return self._out(self._attend(self._qkv(x), batch, kv))

    def feed_forward(self, x: Tensor) -> Tensor:
        x = self._fc1(x)
        if self._gelu:
            x = torch.nn.functional.gelu(x)
        return self._fc2(x)


class OPTModel:
    """The decoder and its LM head. Load weights once, then call under `torch.inference_mode`."""

    def __init__(self, config: OPTConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        hidden, embed = config.hidden_size, config.word_embed_proj_dim
        embedding = partial(Embedding, dtype=dtype, device=device)
        linear = partial(Linear, bias=False, dtype=dtype, device=device)
        projected = embed != hidden
        self._tokens = embedding(config.vocab_size, embed)
        self._positions = embedding(config.max_position_embeddings + POSITION_OFFSET, hidden)
        self._project_in = linear(embed, {"project_in": hidden}) if projected else None
        self._project_out = linear(hidden, {"project_out": embed}) if projected else None
        self._layers = [OPTLayer(config, i, device, dtype) for i in range(config.num_layers)]
        self._final_norm = (
            LayerNorm(
                hidden, affine=config.layer_norm_elementwise_affine, dtype=dtype, device=device
            )
            if config.has_final_layer_norm
            else None
        )
        self._head = LMHead(
            "lm_head",
            embed,
            config.vocab_size,
            tied_to=("embed_tokens.weight", self._tokens) if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that the model wants, by name; a tied LM head is none of them."""
        wanted = {
            **prefixed("embed_tokens", self._tokens.parameters()),
            **prefixed("embed_positions", self._positions.parameters()),
        }
        for projection in (self._project_in, self._project_out):
            if projection is not None:
                wanted |= projection.parameters()
        for index, layer in enumerate(self._layers):
            wanted |= prefixed(f"layers.{index}", layer.parameters())
        if self._final_norm is not None:
            wanted |= prefixed("final_layer_norm", self._final_norm.parameters())
        return wanted | self._head.parameters()

    def load_weights(self, tensors: NamedTensors) -> None:
        """Take all weights. Raises ModelError for missing, unexpected or misshapen tensors."""
        self._head.load_model(self.parameters(), _canonical(tensors))

    def forward(
        self, token_ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> Tensor:
        """Run the step's T tokens: token_ids and positions int64 [T] -> hidden states [T, hidden].

        Writes their keys and values to the cache `kv`, [blocks, layers, 2, heads, block_size,
        head_dim].
        """
        embedded = self._tokens(token_ids)
        if self._project_in is not None:
            embedded = self._project_in(embedded)
        where = self._positions(positions + POSITION_OFFSET)
        if self.config.do_layer_norm_before:
            return self._pre_norm(embedded, where, batch, kv)
        return self._post_norm(embedded + where, batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], rows of what `forward` returned -> logits [R, vocab]."""
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden)

    def _pre_norm(
        self, update: Tensor, residual: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> Tensor:
        # Every sub-layer's output (`update`, the embeddings at first) is added where the next one
        # normalises.
        for layer in self._layers:
            residual, normed = layer.attention_norm(update, residual)
            update = layer.attention(normed, batch, kv)
            residual, normed = layer.feed_forward_norm(update, residual)
            update = layer.feed_forward(normed)
        if self._final_norm is None:
            return residual + update
        return self._final_norm(update, residual)[1]

    def _post_norm(self, hidden: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        for layer in self._layers:
            _, hidden = layer.attention_norm(layer.attention(hidden, batch, kv), hidden)
            _, hidden = layer.feed_forward_norm(layer.feed_forward(hidden), hidden)
        return hidden


def _canonical(tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name.removeprefix("model.").removeprefix("decoder."), tensor
