"""The configuration of a decoder: the switches by which most families of models differ.

The defaults are LLaMA's. `families` reads each family's config.json into one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypedDict, Unpack

from fastserve_backend.checkpoints.experts_config import ExpertsConfig
from fastserve_backend.checkpoints.hf_config import HFConfig, checked_head_dim
from fastserve_backend.checkpoints.model_config import CommonFields, ModelConfig
from fastserve_backend.checkpoints.rotary_config import Rotary

NormKind = Literal["rms", "layer"]
"""Root mean square, or layer norm."""
QKNorm = Literal["head", "all_heads", "layer", "layer_by_head"]
"""Norm of queries and keys: RMS of each head, or of all heads of a token together; or a layer norm
of each head, with weights that heads share or for each head."""
FusedQKV = Literal["parts", "by_kv_head", "in_quarters"]
"""The order of rows if query, key and value are one matrix in the checkpoint: all queries, keys and
values; for each KV head its queries, its key and its value; or four times a quarter of the queries,
of the values and of the keys (CodeGen)."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "xielu"]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The types of layers, as config.json names them."""
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}


@dataclass(frozen=True)
class NormNames:
    """The checkpoint names of a layer's norms. None: the layer has no such norm."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    feed_forward_in: str | None = "post_attention_layernorm"
    feed_forward_out: str | None = None

    @property
    def count(self) -> int:
        names = self.attention_in, self.attention_out, self.feed_forward_in, self.feed_forward_out
        return sum(name is not None for name in names)


NORMS_AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
NORMS_AROUND = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
Names = tuple[tuple[str, str], ...]
GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder, in elements; ``positions`` in tokens."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int

    @classmethod
    def read(
        cls,
        raw: HFConfig,
        *,
        layers: int,
        hidden: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        ffn: int,
        vocab: int,
        positions: int,
    ) -> Self:
        """The sizes in a config.json.

        Args:
            layers, …: the family's defaults. kv_heads None, also in the file: as many as heads.
                head_dim None: hidden / heads.

        Raises:
            ModelError: a size is wrong.
        """
        width = raw.integer("hidden_size", hidden)
        num_heads = raw.integer("num_attention_heads", heads)
        num_kv_heads = raw.optional_integer("num_key_value_heads", kv_heads) or num_heads
        if num_heads % num_kv_heads:
            raise raw.error("num_key_value_heads", f"a divisor of the {num_heads} heads")
        if "head_dim" not in raw and head_dim is None and width % num_heads:
            raise raw.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}")
        return cls(
            layers=raw.integer("num_hidden_layers", layers),
            hidden=width,
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_dim=checked_head_dim(raw, raw.integer("head_dim", head_dim or width // num_heads)),
            ffn=raw.integer("intermediate_size", ffn),
            vocab=raw.integer("vocab_size", vocab),
            positions=raw.integer("max_position_embeddings", positions),
        )


class Switches(TypedDict, total=False):
    """The fields of a `DecoderConfig` in which a family differs from LLaMA."""

    norm: NormKind
    norm_plus_one: bool
    norm_has_weight: bool
    norm_has_bias: bool
    norms: NormNames
    qk_norm: QKNorm | None
    qk_norm_follows_rotation: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    mlp: tuple[str, ...]
    activation: Activation
    is_parallel: bool
    rotates_neighbours: bool
    rotary_of_layer: tuple[int | None, ...]
    window_of_layer: tuple[int | None, ...]
    attention_scale: float | None
    attention_soft_cap: float | None
    has_sinks: bool
    clip_qkv: float | None
    embedding_factor: float
    residual_factor: float
    logit_factor: float
    logit_soft_cap: float | None
    experts: ExpertsConfig | None
    dense_layers: tuple[int, ...]
    head_bias: bool
    table_positions: int
    module_names: Names
    layer_names: Names
    fused_qkv: FusedQKV
    has_transposed_layers: bool
    spare_layers: int


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder, mostly with rotary positions."""

    norm_eps: float
    norm: NormKind = "rms"
    norm_plus_one: bool = False
    """The weights of norms are stored less 1."""
    norm_has_weight: bool = True
    norm_has_bias: bool = False
    norms: NormNames = NormNames()
    qk_norm: QKNorm | None = None
    qk_norm_follows_rotation: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    mlp: tuple[str, ...] = GATED
    """Checkpoint names of the feed-forward's matrices: three of a gated one, else two."""
    activation: Activation = "silu"
    is_parallel: bool = False
    """Attention and feed-forward read the same input, with one norm."""
    rotaries: tuple[Rotary, ...]
    rotates_neighbours: bool = False
    """The pairs to rotate are (2i, 2i + 1) of a head, not (i, i + dim / 2)."""
    rotary_of_layer: tuple[int | None, ...] = ()
    """For each layer the index of its rotation; None: none. Empty: all have the first."""
    window_of_layer: tuple[int | None, ...] = ()
    """See `ModelConfig.windows`. Empty: no layer has one."""
    attention_scale: float | None = None
    """None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    has_sinks: bool = False
    """Each head has one more score, which is a weight (`AttentionRule.sinks`)."""
    clip_qkv: float | None = None
    """Queries, keys and values are cut off at this magnitude."""
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    """Factor for what attention and feed-forward add to the residual."""
    logit_factor: float = 1.0
    logit_soft_cap: float | None = None
    """c: a logit l becomes c · tanh(l / c)."""
    experts: ExpertsConfig | None = None
    """In place of the feed-forward block of each layer, except `dense_layers`."""
    dense_layers: tuple[int, ...] = ()
    head_bias: bool = False
    table_positions: int = 0
    """An embedding of each of so many positions is added to that of the token; 0: none is."""
    module_names: Names = ()
    """The checkpoint's names for the model's modules, where they differ, and ours."""
    layer_names: Names = ()
    """The same for the modules of a layer."""
    fused_qkv: FusedQKV = "parts"
    has_transposed_layers: bool = False
    """The layers' matrices are [in, out] in the checkpoint."""
    spare_layers: int = 0
    """The checkpoint may have so many layers after the last one. They predict more than the next
    token, and nobody computes them (GLM 4.5)."""

    @classmethod
    def read(
        cls,
        raw: HFConfig,
        common: CommonFields,
        name: str,
        sizes: Sizes,
        rotaries: Sequence[Rotary],
        *,
        norm_eps: float,
        ties: bool = False,
        end: tuple[int, ...] = (2,),
        **switches: Unpack[Switches],
    ) -> Self:
        """Build it from the fields of a config.json.

        Args:
            name: the family's key in `ARCHITECTURES`.
            norm_eps, ties, end: the family's defaults for the norms' epsilon, a tied head and the
                end tokens.

            switches: without an ``activation`` it is that of ``hidden_act``, by default silu.

        Raises:
            ModelError: a field is wrong.
        """
        if "activation" not in switches:
            switches["activation"] = read_activation(raw, "hidden_act", "silu")
        is_tied = raw.boolean("tie_word_embeddings", ties)
        if is_tied and switches.get("head_bias", False):
            raise raw.error("tie_word_embeddings", "false, since the LM head has a bias")
        return cls(
            **common,
            architecture=name,
            num_layers=sizes.layers,
            hidden_size=sizes.hidden,
            num_heads=sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.ffn,
            vocab_size=sizes.vocab,
            max_model_len=min(
                (rotary.max_positions for rotary in rotaries), default=sizes.positions
            ),
            eos_token_ids=raw.token_ids("eos_token_id", end),
            tie_word_embeddings=is_tied,
            norm_eps=norm_eps,
            rotaries=tuple(rotaries),
            **switches,
        )

    @property
    def rotary_switch(self) -> int | None:
        switch = self.rotaries[0].switch if self.rotaries else None
        return None if switch is None or self.max_model_len <= switch else switch

    @property
    def head_order(self) -> Sequence[int]:
        """Which element of a head in the checkpoint becomes each of ours. The pairs (2i, 2i + 1)
        become (i, i + dim / 2), which the kernels rotate. Scores stay, since queries and keys are
        reordered alike."""
        if not self.rotates_neighbours:
            return range(self.head_dim)
        dim = self.rotaries[0].dim
        return [*range(0, dim, 2), *range(1, dim, 2), *range(dim, self.head_dim)]

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self.window_of_layer or super().windows

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of this layer; None if it has a feed-forward block."""
        return None if layer in self.dense_layers else self.experts

    @property
    def num_layer_parameters(self) -> int:
        return self._num_layers_parameters // self.num_layers

    @property
    def num_parameters(self) -> int:
        tables = 1 if self.tie_word_embeddings else 2
        total = self._num_layers_parameters + tables * self.num_head_parameters
        total += self.head_bias * self.vocab_size
        total += self.table_positions * self.hidden_size
        return total + self._num_norm_parameters

    @property
    def num_expert_parameters(self) -> int:
        if self.experts is None:
            return 0
        layers = self.num_layers - len(self.dense_layers)
        each = self.experts.num_expert_parameters(self.hidden_size)
        return layers * self.experts.count * each

    def share_of_experts_read(self, tokens: int) -> float:
        return 0.0 if self.experts is None else self.experts.share_read(tokens)

    @property
    def _num_layers_parameters(self) -> int:
        """Of all layers together."""
        hidden, ffn = self.hidden_size, self.intermediate_size
        feed_forward = len(self.mlp) * hidden * ffn
        feed_forward += self.mlp_bias * ((len(self.mlp) - 1) * ffn + hidden)
        feed_forward += 4 * (self.activation == "xielu")
        blocks = (self.experts_of(layer) for layer in range(self.num_layers))
        return self.num_layers * self._num_attention_parameters + sum(
            feed_forward if experts is None else experts.num_parameters(hidden)
            for experts in blocks
        )

    @property
    def _num_attention_parameters(self) -> int:
        """Of a layer, with its norms."""
        hidden = self.hidden_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = hidden * (2 * q + 2 * kv)
        layer += self.norms.count * self._num_norm_parameters
        layer += self.qkv_bias * (q + 2 * kv) + self.out_bias * hidden
        if self.qk_norm == "head":
            layer += 2 * self.head_dim
        elif self.qk_norm == "layer":
            layer += 4 * self.head_dim
        elif self.qk_norm is not None:
            layer += q + kv
        return layer + self.has_sinks * self.num_heads

    @property
    def _num_norm_parameters(self) -> int:
        return self.hidden_size * (self.norm_has_weight + self.norm_has_bias)


def read_activation(raw: HFConfig, key: str, default: str) -> Activation:
    """The activation of a feed-forward, by transformers' name for it.

    Raises:
        ModelError: it is none of those that are known.
    """
    return _ACTIVATIONS[raw.choice(key, default, tuple(_ACTIVATIONS))]


def read_windows(
    raw: HFConfig, window: int | None, default: Sequence[str]
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """The type and the window of each layer.

    Args:
        window: tokens to which a token attends in layers of type "sliding_attention".
        default: the types if ``layer_types`` is missing.

    Raises:
        ModelError: a type is unknown, or a layer's window is missing.
    """
    types = raw.choices("layer_types", tuple(default), (FULL, SLIDING))
    if SLIDING in types and window is None:
        raise raw.error("sliding_window", f"a number of tokens, since a layer is {SLIDING}")
    return types, tuple(window if one == SLIDING else None for one in types)
