"""Small random models of the families that `DecoderConfig` describes, in every variant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import transformers
from _pytest.mark import ParameterSet
from transformers import PreTrainedConfig

POSITIONS = 48
WINDOW = 9
SIZES: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": None,
}
HEAD_DIM = {"head_dim": 16}
WINDOWED = {"sliding_window": WINDOW}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}


class Variant:
    """Fields of a family's configuration, beside small sizes.

    dividing: those that differ for a model that several ranks can share.
    """

    def __init__(
        self, family: str, *, dividing: Mapping[str, Any] | None = None, **fields: Any
    ) -> None:
        self._class = getattr(transformers, f"{family}Config")
        self._fields = SIZES | fields
        self._dividing = dividing or {}

    @property
    def model_type(self) -> str:
        model_type: str = self._class.model_type
        return model_type

    @property
    def has_windows(self) -> bool:
        return self._fields.get("sliding_window") is not None

    def config(self, *, divides: bool = False, **changes: Any) -> PreTrainedConfig:
        dividing = self._dividing if divides else {}
        config: PreTrainedConfig = self._class(**self._fields | dividing | changes)
        return config


def long_rope(pairs: int, trained: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + pair for pair in range(pairs)],
        "original_max_position_embeddings": trained,
    }


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
# Scores of sigmoid routers that differ as those of trained ones do.
DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
MIXTURES: dict[str, Variant] = {
    "dots1": Variant(
        "Dots1",
        **DEEPSEEK,
        norm_topk_prob=True,
        max_window_layers=2,
        **WINDOWED,
        routed_scaling_factor=2.5,
    ),
    "ernie4_5_moe": Variant(
        "Ernie4_5_Moe",
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=1,
        moe_intermediate_size=24,
        tie_word_embeddings=False,
    ),
    "exaone_moe": Variant(
        "ExaoneMoe",
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        **WINDOWED,
        **ALTERNATING,
    ),
    "flex_olmo": Variant("FlexOlmo", **EXPERTS),
    "glm4_moe": Variant(
        "Glm4Moe", **DEEPSEEK, **HEAD_DIM, use_qk_norm=True, n_group=4, topk_group=2
    ),
    "granitemoe": Variant(
        "GraniteMoe",
        num_local_experts=5,
        num_experts_per_tok=2,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        attention_multiplier=0.3,
    ),
    "granitemoeshared": Variant(
        "GraniteMoeShared", num_local_experts=5, num_experts_per_tok=2, shared_intermediate_size=40
    ),
    "hunyuan_v1_moe": Variant("HunYuanMoEV1", num_experts=6, moe_topk=2, **HEAD_DIM),
    "minimax_m2": Variant(
        "MiniMaxM2", num_local_experts=6, num_experts_per_tok=2, head_dim=16, rotary_dim=8
    ),
    "solar_open": Variant(
        "SolarOpen",
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        head_dim=16,
        attention_bias=True,
    ),
    "phimoe": Variant(
        "Phimoe",
        num_local_experts=6,
        attention_bias=True,
        lm_head_bias=True,
        router_jitter_noise=0.2,
    ),
    "gpt_oss": Variant(
        "GptOss", **HEAD_DIM, **WINDOWED, num_local_experts=5, num_experts_per_tok=2
    ),
    "mixtral": Variant("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral_windows": Variant("Mixtral", **WINDOWED, num_local_experts=3, num_experts_per_tok=1),
    "olmoe": Variant("Olmoe", **EXPERTS, clip_qkv=0.9),
    "qwen2_moe": Variant(
        "Qwen2Moe",
        **EXPERTS,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=2,
    ),
    "qwen3_moe": Variant(
        "Qwen3Moe",
        **EXPERTS,
        **HEAD_DIM,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}
FAMILIES: dict[str, Variant] = {
    "apertus": Variant("Apertus"),
    "arcee": Variant("Arcee", mlp_bias=True),
    "codegen": Variant("CodeGen", hidden_size=64, rotary_dim=8),
    "cohere": Variant("Cohere"),
    "cohere_qk_norm": Variant("Cohere", use_qk_norm=True),
    "cohere2": Variant("Cohere2", **WINDOWED, **ALTERNATING),
    "cwm": Variant("Cwm", **HEAD_DIM, **WINDOWED, rope_parameters={"rope_theta": 1e4}),
    "ernie4_5": Variant("Ernie4_5", **HEAD_DIM, use_bias=True),
    "exaone4": Variant("Exaone4", **WINDOWED, **ALTERNATING),
    "exaone4_without_windows": Variant(
        "Exaone4", sliding_window=None, layer_types=3 * ["full_attention"]
    ),
    "falcon": Variant("Falcon", hidden_size=64, dividing={"multi_query": False}),
    "falcon_sequential": Variant(
        "Falcon", hidden_size=64, multi_query=False, parallel_attn=False, bias=True
    ),
    "falcon_new": Variant(
        "Falcon",
        hidden_size=64,
        new_decoder_architecture=True,
        num_kv_heads=2,
        dividing={"num_kv_heads": 4},
    ),
    "falcon2": Variant(
        "Falcon",
        hidden_size=64,
        new_decoder_architecture=True,
        num_kv_heads=4,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=80,
    ),
    "gemma": Variant("Gemma", **HEAD_DIM),
    "gemma2": Variant("Gemma2", **HEAD_DIM, **WINDOWED, query_pre_attn_scalar=20),
    "gemma2_capped": Variant(
        "Gemma2", **HEAD_DIM, **WINDOWED, attn_logit_softcapping=1.5, final_logit_softcapping=2.5
    ),
    "gemma3": Variant("Gemma3Text", **HEAD_DIM, **WINDOWED, **ALTERNATING),
    "gemma3_scaled": Variant(
        "Gemma3Text",
        **HEAD_DIM,
        **WINDOWED,
        **ALTERNATING,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "glm": Variant("Glm", **HEAD_DIM),
    "glm4": Variant("Glm4", **HEAD_DIM),
    "gpt2": Variant("GPT2", n_inner=80),
    "gpt2_unscaled": Variant("GPT2", scale_attn_weights=False),
    "gpt_bigcode": Variant("GPTBigCode", dividing={"multi_query": False}),
    "gptj": Variant("GPTJ", hidden_size=64, rotary_dim=8, n_inner=80),
    "granite": Variant(
        "Granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
        logits_scaling=8.0,
    ),
    "hunyuan_v1_dense": Variant(
        "HunYuanDenseV1",
        **HEAD_DIM,
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4},
    ),
    "helium": Variant("Helium", **HEAD_DIM, hidden_size=64),
    "internlm3": Variant("InternLM3", **HEAD_DIM, attention_bias=True, mlp_bias=True),
    "iquestcoder": Variant("IQuestCoder", **HEAD_DIM),
    "jais2": Variant("Jais2"),
    "ministral": Variant("Ministral", **HEAD_DIM, **WINDOWED, **ALTERNATING),
    "ministral3": Variant(
        "Ministral3",
        **HEAD_DIM,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 12,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    ),
    "mistral": Variant("Mistral", **WINDOWED),
    "mistral_without_windows": Variant("Mistral", **HEAD_DIM, sliding_window=None),
    "nemotron": Variant("Nemotron", **HEAD_DIM),
    "olmo": Variant("Olmo", clip_qkv=0.4),
    "olmo2": Variant("Olmo2"),
    "olmo3": Variant(
        "Olmo3",
        **WINDOWED,
        **ALTERNATING,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 12,
            "attention_factor": 1.2,
        },
    ),
    "persimmon": Variant("Persimmon", hidden_size=64),
    "phi": Variant("Phi", hidden_size=64),
    "phi_norms": Variant("Phi", hidden_size=64, qk_layernorm=True),
    "phi3": Variant("Phi3", **WINDOWED),
    "phi3_long": Variant(
        "Phi3", max_position_embeddings=4 * POSITIONS, rope_parameters=long_rope(4, 20)
    ),
    "phi4_mini": Variant(
        "Phi3",
        hidden_size=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75},
    ),
    "qwen2": Variant("Qwen2"),
    "qwen2_windows": Variant(
        "Qwen2", use_sliding_window=True, max_window_layers=1, **WINDOWED, tie_word_embeddings=True
    ),
    "qwen3": Variant("Qwen3", **HEAD_DIM),
    "qwen3_biases": Variant("Qwen3", **HEAD_DIM, attention_bias=True),
    "seed_oss": Variant("SeedOss", **HEAD_DIM),
    "smollm3": Variant("SmolLM3", no_rope_layer_interval=2),
    "smollm3_windows": Variant(
        "SmolLM3", no_rope_layers=[0, 1, 0], use_sliding_window=True, **WINDOWED
    ),
    "stablelm": Variant("StableLm", hidden_size=64, use_qkv_bias=True),
    "starcoder2": Variant("Starcoder2", **WINDOWED),
    "starcoder2_without_biases": Variant("Starcoder2", use_bias=False),
    "vaultgemma": Variant("VaultGemma", **HEAD_DIM, **WINDOWED),
    **MIXTURES,
}
VARIANTS = {name: variant.config() for name, variant in FAMILIES.items()}

ALIKE = frozenset(
    {
        "arcee",
        "cwm",
        "dots1",
        "exaone4_without_windows",
        "falcon",
        "falcon2",
        "falcon_sequential",
        "flex_olmo",
        "gemma",
        "gemma2",
        "glm",
        "gpt2_unscaled",
        "granitemoe",
        "hunyuan_v1_dense",
        "exaone_moe",
        "internlm3",
        "iquestcoder",
        "jais2",
        "solar_open",
        "ministral",
        "mistral",
        "mistral_without_windows",
        "mixtral",
        "olmo2",
        "phi_norms",
        "phi4_mini",
        "qwen2",
        "qwen3",
        "qwen3_biases",
        "seed_oss",
        "smollm3",
        "starcoder2_without_biases",
    }
)
"""Variants of which others have each part. `make test` compares their logits alone."""


def of_each(names: Iterable[str], *more: Any) -> list[ParameterSet]:
    """Parameters of a test: a variant's name, and more that are the same for all."""
    return [
        pytest.param(name, *more, marks=(pytest.mark.repeated,) if name in ALIKE else ())
        for name in names
    ]
