"""The configuration of GPT-NeoX (Black et al. 2022) and Pythia.

Fields that a config.json leaves out have the defaults that `transformers.GPTNeoXConfig` documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Unpack

from fastserve_backend.checkpoints.hf_config import HFConfig, checked_head_dim
from fastserve_backend.checkpoints.model_config import CommonFields, ModelConfig
from fastserve_backend.checkpoints.rotary_config import Rotary, read_rotary


def _pythia(layers: int, heads: int, hidden: int, vocab: int = 50304) -> Mapping[str, Any]:
    """Fields of a published size (Biderman et al. 2023, table 1)."""
    return MappingProxyType(
        {
            "model_type": "gpt_neox",
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "vocab_size": vocab,
            "torch_dtype": "float16",
        }
    )


@dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(ModelConfig):
    layer_norm_eps: float
    rotaries: tuple[Rotary, ...]
    activation: str
    use_parallel_residual: bool
    attention_bias: bool

    builtin: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {
            "pythia-160m": _pythia(12, 12, 768),
            "pythia-1.4b": _pythia(24, 16, 2048),
            "pythia-12b": _pythia(36, 40, 5120, 50688),
        }
    )

    @classmethod
    def from_hf(cls, raw: HFConfig, **common: Unpack[CommonFields]) -> GPTNeoXConfig:
        hidden_size = raw.integer("hidden_size", 6144)
        num_heads = raw.integer("num_attention_heads", 64)
        if hidden_size % num_heads:
            raise raw.error("hidden_size", f"a multiple of num_attention_heads, {num_heads}")
        head_dim = checked_head_dim(raw, hidden_size // num_heads)
        if raw.integer("head_dim", head_dim) != head_dim:
            raise raw.error("head_dim", f"hidden_size / num_attention_heads, {head_dim}")
        positions = raw.integer("max_position_embeddings", 2048)
        rotary = read_rotary(
            raw,
            head_dim,
            positions,
            theta=("rotary_emb_base", 1e4),
            share=("rotary_pct", 0.25),
        )
        return cls(
            **common,
            architecture="gpt_neox",
            num_layers=raw.integer("num_hidden_layers", 44),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            intermediate_size=raw.integer("intermediate_size", 24576),
            vocab_size=raw.integer("vocab_size", 50432),
            max_model_len=rotary.max_positions,
            eos_token_ids=raw.token_ids("eos_token_id", (2,)),
            layer_norm_eps=raw.number("layer_norm_eps", 1e-5),
            rotaries=(rotary,),
            activation=raw.choice(
                "hidden_act", "gelu", ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu")
            ),
            use_parallel_residual=raw.boolean("use_parallel_residual", True),
            attention_bias=raw.boolean("attention_bias", True),
            tie_word_embeddings=raw.boolean("tie_word_embeddings", False),
        )

    @property
    def num_layer_parameters(self) -> int:
        hidden, ffn = self.hidden_size, self.intermediate_size
        layer = 4 * hidden * hidden + 2 * hidden * ffn + ffn + hidden + 4 * hidden
        if self.attention_bias:
            layer += 4 * hidden
        return layer

    @property
    def num_parameters(self) -> int:
        tables = 1 if self.tie_word_embeddings else 2
        total = self.num_layers * self.num_layer_parameters
        return total + tables * self.num_head_parameters + 2 * self.hidden_size
