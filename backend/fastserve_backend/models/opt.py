"""OPT (Zhang et al. 2022): the published sizes, and the post-norm 350m variant.

Checkpoint names are those of `transformers.OPTForCausalLM` without "model.decoder." (older
checkpoints only have "decoder.").
"""

from __future__ import annotations

from functools import partial

from fastserve_kernels import ops
from torch import Tensor

from fastserve_backend.checkpoints.opt_config import POSITION_OFFSET, OPTConfig
from fastserve_backend.models.attention import Attention, AttentionBatch
from fastserve_backend.models.causal_lm import CausalLM, LMHead
from fastserve_backend.models.layers import (
    ColumnLinear,
    Embedding,
    LayerNorm,
    Linear,
    RowLinear,
    VocabEmbedding,
    prefixed,
)
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter


class OPTLayer:
    """One decoder layer. The model adds the residuals itself, in the same kernels as the norms."""

    def __init__(self, config: OPTConfig, layer: int, part: ModelPart) -> None:
        hidden, ffn = config.hidden_size, config.intermediate_size
        column = partial(ColumnLinear, bias=config.enable_bias, part=part)
        row = partial(RowLinear, bias=config.enable_bias, part=part)
        affine = config.layer_norm_elementwise_affine
        norm = partial(LayerNorm, hidden, has_weight=affine, has_bias=affine, part=part)
        self._qkv = column(hidden, {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden})
        self._attend = Attention.of(config, layer, part)
        self._out = row(hidden, {"out_proj": hidden})
        self._fc1 = column(hidden, {"fc1": ffn}, relu=config.activation == "relu")
        self._gelu = config.activation == "gelu"
        self._fc2 = row(ffn, {"fc2": hidden})
        # Norms come before their sub-layer, or after it in a post-norm model.
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
            x = ops.activate(x, "gelu")
        return self._fc2(x)


class OPTModel(CausalLM):
    def __init__(self, config: OPTConfig, part: ModelPart) -> None:
        self.config = config
        hidden, embed = config.hidden_size, config.word_embed_proj_dim
        linear = partial(Linear, bias=False, part=part)
        projected = embed != hidden
        self._tokens = VocabEmbedding(config.vocab_size, embed, part=part)
        self._positions = Embedding(
            config.max_position_embeddings + POSITION_OFFSET,
            hidden,
            part=part,
            first_id=-POSITION_OFFSET,
        )
        self._project_in = linear(embed, {"project_in": hidden}) if projected else None
        project_out = linear(hidden, {"project_out": embed}) if projected else None
        self._layers = [OPTLayer(config, layer, part) for layer in range(len(part.layers))]
        affine = config.layer_norm_elementwise_affine
        self._final_norm = (
            LayerNorm(hidden, has_weight=affine, has_bias=affine, part=part)
            if config.has_final_layer_norm
            else None
        )
        first = prefixed("embed_tokens", self._tokens.parameters())
        first |= prefixed("embed_positions", self._positions.parameters())
        last: dict[str, Parameter] = {}
        if self._final_norm is not None:
            last |= prefixed("final_layer_norm", self._final_norm.parameters())
        if self._project_in is not None and project_out is not None:
            first |= self._project_in.parameters()
            last |= project_out.parameters()
        tied_to = ("embed_tokens.weight", self._tokens) if config.tie_word_embeddings else None
        super().__init__(
            part,
            prefixes=("model.", "decoder."),
            other_modules=("project_in", "project_out", "final_layer_norm"),
            first=first,
            layers=[layer.parameters() for layer in self._layers],
            last=last,
            head=LMHead(
                "lm_head",
                embed,
                config.vocab_size,
                tied_to=tied_to,
                part=part,
                projection=project_out,
            ),
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
        if hidden is not None:
            update, residual = hidden, ops.zeros_like(hidden)
        else:
            update = self._tokens(token_ids)
            if self._project_in is not None:
                update = self._project_in(update)
            residual = self._positions(positions)
        if self.config.do_layer_norm_before:
            return self._output(self._pre_norm(update, residual, batch, kv), sampled)
        return self._output(self._post_norm(ops.add(update, residual), batch, kv), sampled)

    def _pre_norm(
        self, update: Tensor, residual: Tensor, batch: AttentionBatch, kv: Tensor
    ) -> Tensor:
        # The next norm adds each sub-layer's output (`update`, at first the embeddings).
        for layer in self._layers:
            residual, normed = layer.attention_norm(update, residual)
            update = layer.attention(normed, batch, kv)
            residual, normed = layer.feed_forward_norm(update, residual)
            update = layer.feed_forward(normed)
        if self._final_norm is None or not self._part.is_last:
            return ops.add(residual, update)
        return self._final_norm(update, residual)[1]

    def _post_norm(self, hidden: Tensor, batch: AttentionBatch, kv: Tensor) -> Tensor:
        for layer in self._layers:
            _, hidden = layer.attention_norm(layer.attention(hidden, batch, kv), hidden)
            _, hidden = layer.feed_forward_norm(layer.feed_forward(hidden), hidden)
        return hidden
