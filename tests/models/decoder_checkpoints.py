"""Small random models of the families that `DecoderConfig` describes, in every variant."""

from __future__ import annotations

from typing import Any

import transformers
from paged_executor import POSITIONS
from transformers import PreTrainedConfig

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


def make(family: str, **fields: Any) -> PreTrainedConfig:
    """The family's configuration with small sizes and these fields."""
    config: PreTrainedConfig = getattr(transformers, f"{family}Config")(**SIZES | fields)
    return config


def long_rope(pairs: int, trained: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * pair for pair in range(pairs)],
        "long_factor": [2.0 + pair for pair in range(pairs)],
        "original_max_position_embeddings": trained,
    }


VARIANTS: dict[str, PreTrainedConfig] = {
    "arcee": make("Arcee", mlp_bias=True),
    "cohere2": make("Cohere2", **WINDOWED, **ALTERNATING),
    "cwm": make("Cwm", **HEAD_DIM, **WINDOWED, rope_parameters={"rope_theta": 1e4}),
    "ernie4_5": make("Ernie4_5", **HEAD_DIM, use_bias=True),
    "exaone4": make("Exaone4", **WINDOWED, **ALTERNATING),
    "exaone4_without_windows": make(
        "Exaone4", sliding_window=None, layer_types=3 * ["full_attention"]
    ),
    "gemma": make("Gemma", **HEAD_DIM),
    "gemma2": make("Gemma2", **HEAD_DIM, **WINDOWED, query_pre_attn_scalar=20),
    "gemma2_capped": make(
        "Gemma2", **HEAD_DIM, **WINDOWED, attn_logit_softcapping=1.5, final_logit_softcapping=2.5
    ),
    "gemma3": make("Gemma3Text", **HEAD_DIM, **WINDOWED, **ALTERNATING),
    "gemma3_scaled": make(
        "Gemma3Text",
        **HEAD_DIM,
        **WINDOWED,
        **ALTERNATING,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "glm": make("Glm", **HEAD_DIM),
    "glm4": make("Glm4", **HEAD_DIM),
    "granite": make(
        "Granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.3,
        logits_scaling=8.0,
    ),
    "helium": make("Helium", head_dim=8),
    "ministral": make("Ministral", **HEAD_DIM, **WINDOWED, **ALTERNATING),
    "mistral": make("Mistral", **WINDOWED),
    "mistral_without_windows": make("Mistral", **HEAD_DIM, sliding_window=None),
    "olmo": make("Olmo", clip_qkv=0.4),
    "olmo2": make("Olmo2"),
    "olmo3": make(
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
    "phi3": make("Phi3", **WINDOWED),
    "phi3_long": make(
        "Phi3", max_position_embeddings=4 * POSITIONS, rope_parameters=long_rope(4, POSITIONS)
    ),
    "phi4_mini": make(
        "Phi3",
        hidden_size=64,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.75},
    ),
    "qwen2": make("Qwen2"),
    "qwen2_windows": make(
        "Qwen2", use_sliding_window=True, max_window_layers=1, **WINDOWED, tie_word_embeddings=True
    ),
    "qwen3": make("Qwen3", **HEAD_DIM),
    "qwen3_biases": make("Qwen3", **HEAD_DIM, attention_bias=True),
    "seed_oss": make("SeedOss", **HEAD_DIM),
    "smollm3": make("SmolLM3", no_rope_layer_interval=2),
    "smollm3_windows": make(
        "SmolLM3", no_rope_layers=[0, 1, 0], use_sliding_window=True, **WINDOWED
    ),
    "starcoder2": make("Starcoder2", **WINDOWED),
    "starcoder2_without_biases": make("Starcoder2", use_bias=False),
    "vaultgemma": make("VaultGemma", **HEAD_DIM, **WINDOWED),
}
