"""OPT's configuration (Zhang et al. 2022, "OPT: Open Pre-trained Transformer Language Models").

Fields that a config.json leaves out have the defaults that `transformers.OPTConfig` documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

from fastserve_backend.checkpoints.hf_config import HFConfig, checked_head_dim
from fastserve_backend.checkpoints.model_config import CommonFields, ModelConfig

# OPT's table of positions has so many rows before position 0; they once served padding.
POSITION_OFFSET = 2


def _published(layers: int, heads: int, hidden: int) -> Mapping[str, Any]:
    """Fields of a published size (table 1 of the paper); the feed-forward is four times as wide."""
    return MappingProxyType(
        {
            "model_type": "opt",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_size": hidden,
            "ffn_dim": 4 * hidden,
            "torch_dtype": "float16",
        }
    )


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    """An OPT model. `word_embed_proj_dim` is the width of the token embeddings (350m: 512)."""

    word_embed_proj_dim: int
    max_position_embeddings: int
    do_layer_norm_before: bool
    has_final_layer_norm: bool
    activation: str
    enable_bias: bool
    layer_norm_elementwise_affine: bool

    builtin: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "opt-125m": _published(12, 12, 768),
            "opt-1.3b": _published(24, 32, 2048),
            "opt-2.7b": _published(32, 32, 2560),
            "opt-6.7b": _published(32, 32, 4096),
            "opt-13b": _published(40, 40, 5120),
            "opt-66b": _published(64, 72, 9216),
            "opt-175b": _published(96, 96, 12288),
        }
    )

    @classmethod
    def from_hf(cls, raw: HFConfig, **common: Unpack[CommonFields]) -> OPTConfig:
        hidden_size = raw.integer("hidden_size", 768)
        num_heads = raw.integer("num_attention_heads", 12)
        if hidden_size % num_heads:
            raise raw.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}")
        positions = raw.integer("max_position_embeddings", 2048)
        norm_before = raw.boolean("do_layer_norm_before", True)
        return cls(
            **common,
            architecture="opt",
            num_layers=raw.integer("num_hidden_layers", 12),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=checked_head_dim(raw, hidden_size // num_heads),
            intermediate_size=raw.integer("ffn_dim", 3072),
            vocab_size=raw.integer("vocab_size", 50272),
            max_model_len=positions,
            eos_token_ids=raw.token_ids("eos_token_id", (2,)),
            word_embed_proj_dim=raw.integer("word_embed_proj_dim", hidden_size),
            max_position_embeddings=positions,
            do_layer_norm_before=norm_before,
            has_final_layer_norm=norm_before and not raw.boolean("_remove_final_layer_norm", False),
            activation=raw.choice("activation_function", "relu", ("relu", "gelu")),
            tie_word_embeddings=raw.boolean("tie_word_embeddings", True),
            enable_bias=raw.boolean("enable_bias", True),
            layer_norm_elementwise_affine=raw.boolean("layer_norm_elementwise_affine", True),
        )

    @property
    def num_layer_parameters(self) -> int:
        hidden, ffn = self.hidden_size, self.intermediate_size
        layer = 4 * hidden * hidden + 2 * hidden * ffn + 2 * self._num_norm_parameters
        if self.enable_bias:
            layer += 5 * hidden + ffn
        return layer

    @property
    def num_head_parameters(self) -> int:
        return self.vocab_size * self.word_embed_proj_dim

    @property
    def _num_norm_parameters(self) -> int:
        return 2 * self.hidden_size if self.layer_norm_elementwise_affine else 0

    @property
    def num_parameters(self) -> int:
        hidden, embed = self.hidden_size, self.word_embed_proj_dim
        tables = 1 if self.tie_word_embeddings else 2
        total = self.num_layers * self.num_layer_parameters + tables * self.num_head_parameters
        total += (self.max_position_embeddings + POSITION_OFFSET) * hidden
        if embed != hidden:
            total += 2 * embed * hidden
        if self.has_final_layer_norm:
            total += self._num_norm_parameters
        return total
