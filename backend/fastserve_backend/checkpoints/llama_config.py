"""The configuration of LLaMA (Touvron et al. 2023) and of models with the same architecture.

Fields that a config.json leaves out have the defaults that `transformers.LlamaConfig` documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig, checked_head_dim
from fastserve_backend.checkpoints.model_config import CommonFields, ModelConfig
from fastserve_backend.checkpoints.rotary_config import Rotary, read_rotary


def _published(
    layers: int, heads: int, kv_heads: int, hidden: int, ffn: int, positions: int, **more: Any
) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "model_type": "llama",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "max_position_embeddings": positions,
            "torch_dtype": "bfloat16",
            **more,
        }
    )


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    rms_norm_eps: float
    rotary: Rotary
    attention_bias: bool
    mlp_bias: bool

    builtin: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "llama-7b": _published(32, 32, 32, 4096, 11008, 2048),
            "llama-13b": _published(40, 40, 40, 5120, 13824, 2048),
            "llama-3-8b": _published(
                32, 32, 8, 4096, 14336, 8192, vocab_size=128256, rope_theta=500000.0
            ),
            "smollm2-135m": _published(
                30, 9, 3, 576, 1536, 8192,
                vocab_size=49152, rope_theta=100000.0, tie_word_embeddings=True,
            ),
        }
    )  # fmt: skip

    @classmethod
    def from_hf(cls, raw: HFConfig, **common: Unpack[CommonFields]) -> LlamaConfig:
        hidden_size = raw.integer("hidden_size", 4096)
        num_heads = raw.integer("num_attention_heads", 32)
        num_kv_heads = raw.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise raw.error("num_key_value_heads", f"a divisor of the {num_heads} heads")
        if "head_dim" not in raw and hidden_size % num_heads:
            raise raw.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}")
        raw.choice("hidden_act", "silu", ("silu",))
        head_dim = checked_head_dim(raw, raw.integer("head_dim", hidden_size // num_heads))
        positions = raw.integer("max_position_embeddings", 2048)
        rotary = read_rotary(
            raw,
            head_dim,
            positions,
            theta=("rope_theta", 1e4),
            share=("partial_rotary_factor", 1.0),
        )
        if rotary.dim != head_dim:  # no version of transformers runs such a model correctly
            raise ModelError(
                f"{raw.source}: partial_rotary_factor asks for a rotation of {rotary.dim} of a "
                f"head's {head_dim} elements, but a LLaMA model rotates them all"
            )
        return cls(
            **common,
            architecture="llama",
            num_layers=raw.integer("num_hidden_layers", 32),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=raw.integer("intermediate_size", 11008),
            vocab_size=raw.integer("vocab_size", 32000),
            max_model_len=rotary.max_positions,
            eos_token_ids=raw.token_ids("eos_token_id", (2,)),
            rms_norm_eps=raw.number("rms_norm_eps", 1e-6),
            rotary=rotary,
            tie_word_embeddings=raw.boolean("tie_word_embeddings", False),
            attention_bias=raw.boolean("attention_bias", False),
            mlp_bias=raw.boolean("mlp_bias", False),
        )

    @property
    def num_layer_parameters(self) -> int:
        hidden, ffn = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = hidden * (2 * q + 2 * kv) + 3 * hidden * ffn + 2 * hidden
        if self.attention_bias:
            layer += q + 2 * kv + hidden
        if self.mlp_bias:
            layer += 2 * ffn + hidden
        return layer

    @property
    def num_parameters(self) -> int:
        tables = 1 if self.tie_word_embeddings else 2
        total = self.num_layers * self.num_layer_parameters
        return total + tables * self.num_head_parameters + self.hidden_size
