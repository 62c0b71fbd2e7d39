"""The decoder that `DecoderConfig` describes: LLaMA and most families since.

`DecoderLayer.__call__` computes a layer; `RotaryLM.forward` runs all layers between the embedding
and the final norm. Checkpoint names are those of transformers' models without "model.".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from fastserve_kernels import ops
from fastserve_kernels.ops import AttentionRule
from torch import Tensor

from fastserve_backend.checkpoints.decoder_config import DecoderConfig
from fastserve_backend.models.attention import Attention, AttentionBatch
from fastserve_backend.models.causal_lm import LMHead
from fastserve_backend.models.expert_weights import experts_apart
from fastserve_backend.models.experts import Experts
from fastserve_backend.models.feed_forward import FeedForward
from fastserve_backend.models.layers import (
    ColumnLinear,
    Embedding,
    LayerNorm,
    RMSNorm,
    RowLinear,
    VocabEmbedding,
    prefixed,
)
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.qk_norms import qk_norms_of
from fastserve_backend.models.rotary_lm import RotaryEmbedding, RotaryLM, Rotation
from fastserve_backend.models.stored_layers import qkv_rows, rows_apart, transposed
from fastserve_backend.models.weights import (
    Parameter,
    StoredTensor,
    StoredWeight,
    WeightSource,
    reordered,
    split_rows,
)

_IN_LAYER = re.compile(r"(layers\.\d+)\.(.+)")


class SelfAttention:
    """Query, key and value from one product, norms and rotation, attention, output."""

    def __init__(self, config: DecoderConfig, layer: int, part: ModelPart) -> None:
        self._config = config
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._qkv = ColumnLinear(
            config.hidden_size,
            {"q_proj": q, "k_proj": kv, "v_proj": kv},
            bias=config.qkv_bias,
            part=part,
        )
        self._out = RowLinear(
            q,
            {"o_proj": config.hidden_size},
            bias=config.out_bias,
            part=part,
            reduce=not config.is_parallel,
        )
        self._norms = qk_norms_of(config, part)
        heads = part.tensor.part(config.num_heads)
        self._sinks = Parameter((config.num_heads,), self._take_sinks, (heads,))
        number = part.layers[layer]
        self._rule = AttentionRule(
            scale=config.attention_scale or config.head_dim**-0.5,
            window=config.windows[number],
            soft_cap=config.attention_soft_cap,
            sinks=torch.empty(heads.stop - heads.start, device=part.device)
            if config.has_sinks
            else None,
        )
        self._attend = Attention.of(config, layer, part, self._rule)
        rotations = config.rotary_of_layer
        self._rotation = rotations[number] if rotations else 0

    def parameters(self) -> dict[str, Parameter]:
        qkv = self._qkv.parameters()
        if self._config.rotates_neighbours:
            for name in [name for name in qkv if name.startswith(("q_proj", "k_proj"))]:
                qkv[name] = self._with_halves(qkv[name])
        norms = {} if self._norms is None else self._norms.parameters()
        sinks = {"sinks": self._sinks} if self._config.has_sinks else {}
        return {**qkv, **self._out.parameters(), **norms, **sinks}

    def __call__(
        self, x: Tensor, rotations: Sequence[Rotation], batch: AttentionBatch, kv: Tensor
    ) -> Tensor:
        """x [T, hidden] -> [T, hidden]. For ``rotations`` see `RotaryLayer`."""
        qkv = self._qkv(x)
        norms_follow = self._config.qk_norm_follows_rotation
        if self._norms is not None and not norms_follow:
            self._norms(qkv)
        if self._config.clip_qkv is not None:
            ops.clamp_(qkv, self._config.clip_qkv)
        if self._rotation is None:
            return self._out(self._attend(qkv, batch, kv))
        cos_sin, query_factors = rotations[self._rotation]
        if self._norms is not None and norms_follow:
            attend = self._attend
            by_head = qkv.view(len(qkv), -1, attend.head_dim)
            ops.rotate(by_head[:, : attend.heads + attend.kv_heads], cos_sin)
            self._norms(qkv)
            return self._out(attend(qkv, batch, kv))
        if query_factors is not None:
            query = qkv[:, : self._attend.heads * self._attend.head_dim]
            ops.scale_rows_(query, query_factors)
        return self._out(self._attend(qkv, batch, kv, cos_sin))

    def _take_sinks(self, tensor: Tensor) -> None:
        assert self._rule.sinks is not None
        self._rule.sinks.copy_(tensor)

    def _with_halves(self, parameter: Parameter) -> Parameter:
        """Reorder each head while loading (`DecoderConfig.head_order`)."""

        def load(weight: StoredWeight) -> None:
            by_head = torch.arange(weight.shape[0]).view(-1, self._config.head_dim)
            parameter.load(reordered(weight, by_head[:, self._config.head_order].flatten()))

        return replace(parameter, load=load)


class DecoderLayer:
    """One decoder layer (`RotaryLayer`)."""

    def __init__(self, config: DecoderConfig, layer: int, part: ModelPart) -> None:
        names = config.norms
        norm = partial(_norm, config, part)
        self._names = names
        self._tensor = part.tensor
        self._is_parallel = config.is_parallel
        self._residual_factor = config.residual_factor
        self._attention = SelfAttention(config, layer, part)
        experts = config.experts_of(part.layers[layer])
        self._feed_forward: FeedForward | Experts
        if experts is None:
            self._feed_forward = FeedForward(config, part)
        else:
            self._feed_forward = Experts(experts, config.hidden_size, part)
        self._attention_in = norm() if names.attention_in else None
        self._attention_out = _norm_alone(config, part) if names.attention_out else None
        self._feed_forward_in = norm() if names.feed_forward_in else None
        self._feed_forward_out = _norm_alone(config, part) if names.feed_forward_out else None

    def parameters(self) -> dict[str, Parameter]:
        names = self._names
        wanted = prefixed("self_attn", self._attention.parameters())
        wanted |= prefixed("mlp", self._feed_forward.parameters())
        for name, norm in (
            (names.attention_in, self._attention_in),
            (names.attention_out, self._attention_out),
            (names.feed_forward_in, self._feed_forward_in),
            (names.feed_forward_out, self._feed_forward_out),
        ):
            if name is not None and norm is not None:
                wanted |= prefixed(name, norm.parameters())
        return wanted

    def __call__(
        self,
        update: Tensor,
        residual: Tensor,
        rotations: Sequence[Rotation],
        batch: AttentionBatch,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See `RotaryLayer`."""
        before = residual
        residual, normed = _added(self._attention_in, update, before)
        attended = self._attention(normed, rotations, batch, kv)
        if self._is_parallel:  # both read the same input, and one sum over the ranks serves both
            if self._feed_forward_in is not None:
                _, normed = self._feed_forward_in(update, before)
            return self._tensor.sum(ops.add(attended, self._feed_forward(normed))), residual
        attended = self._finished(attended, self._attention_out)
        residual, normed = _added(self._feed_forward_in, attended, residual)
        return self._finished(self._feed_forward(normed), self._feed_forward_out), residual

    def _finished(self, update: Tensor, norm: RMSNorm | None) -> Tensor:
        """What a block adds to the residual."""
        if norm is not None:
            update = norm.in_place(update)
        factor = self._residual_factor
        return update if factor == 1.0 else ops.scale_(update, factor)


class DecoderModel(RotaryLM):
    def __init__(self, config: DecoderConfig, part: ModelPart) -> None:
        hidden, vocab = config.hidden_size, config.vocab_size
        self._config = config
        tokens = VocabEmbedding(vocab, hidden, part=part)
        tied_to = ("embed_tokens.weight", tokens) if config.tie_word_embeddings else None
        super().__init__(
            prefixes=("transformer.", "model.", "language_model.", "text_model.", "model."),
            computed=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
            part=part,
            tokens=("embed_tokens", tokens),
            positions=(
                ("embed_positions", Embedding(config.table_positions, hidden, part=part))
                if config.table_positions
                else None
            ),
            embedding_factor=config.embedding_factor,
            rotaries=[
                RotaryEmbedding(rotary, config.max_model_len, part.device)
                for rotary in config.rotaries
            ],
            layers=[DecoderLayer(config, layer, part) for layer in range(len(part.layers))],
            final_norm=("norm", _norm(config, part)),
            head=LMHead(
                "lm_head",
                hidden,
                vocab,
                tied_to=tied_to,
                part=part,
                factor=config.logit_factor,
                soft_cap=config.logit_soft_cap,
                has_bias=config.head_bias,
            ),
        )

    def _own_name(self, name: str) -> str:
        """With our names for its modules (`DecoderConfig.module_names` and ``layer_names``)."""
        module, dot, rest = name.partition(".")
        name = f"{dict(self._config.module_names).get(module, module)}{dot}{rest}"
        match = _IN_LAYER.fullmatch(name)
        if match is None:
            return name
        layer, within = match.groups()
        for theirs, ours in self._config.layer_names:
            if within.startswith(f"{theirs}."):
                return f"{layer}.{ours}{within.removeprefix(theirs)}"
        return name

    def _canonical(self, source: WeightSource) -> Iterator[StoredTensor]:
        """Also divides products that a checkpoint has fused, and tensors of all experts."""
        config = self._config
        last = config.num_layers + config.spare_layers
        spare = tuple(f"layers.{layer}." for layer in range(config.num_layers, last))
        canonical: WeightSource = super()._canonical(source)
        if config.experts is not None:
            canonical = experts_apart(canonical, config.experts)
        for stored in canonical:
            if stored.name.startswith(spare):
                continue
            if config.has_transposed_layers and stored.name.startswith("layers."):
                stored = transposed(stored)
            yield from self._parts_of(stored)

    def _parts_of(self, stored: StoredTensor) -> Iterator[StoredTensor]:
        """Those of a product that the checkpoint has fused; otherwise the tensor itself."""
        layer, _, kind = stored.name.rpartition(".")
        block, _, _ = layer.rpartition(".")
        ffn = self._config.intermediate_size
        if layer.endswith("self_attn.qkv_proj"):
            rows = qkv_rows(self._config)
            yield from rows_apart(stored, {f"{block}.{one}.{kind}": rows[one] for one in rows})
        elif layer.endswith("mlp.gate_up_proj"):
            yield from split_rows(
                stored, {f"{block}.{one}.{kind}": ffn for one in ("gate_proj", "up_proj")}
            )
        else:
            yield stored


def _norm(config: DecoderConfig, part: ModelPart) -> RMSNorm | LayerNorm:
    if config.norm != "layer":
        return _norm_alone(config, part)
    return LayerNorm(
        config.hidden_size,
        has_weight=config.norm_has_weight,
        has_bias=config.norm_has_bias,
        plus_one=config.norm_plus_one,
        part=part,
        eps=config.norm_eps,
    )


def _norm_alone(config: DecoderConfig, part: ModelPart) -> RMSNorm:
    """A norm that can also normalise one tensor."""
    return RMSNorm(
        config.hidden_size, part=part, eps=config.norm_eps, plus_one=config.norm_plus_one
    )


def _added(
    norm: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None, update: Tensor, residual: Tensor
) -> tuple[Tensor, Tensor]:
    """(The sum, the normalised sum)."""
    if norm is not None:
        return norm(update, residual)
    total = ops.add(update, residual)
    return total, total
