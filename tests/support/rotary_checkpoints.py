"""Small random LLaMA and GPT-NeoX models of every kind."""

from __future__ import annotations

from typing import Any

import torch
from decoder_checkpoints import POSITIONS
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig, PreTrainedModel

LLAMA: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
NEOX: dict[str, Any] = {
    "vocab_size": 301,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
THETA = {"rope_theta": 10000.0}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12},
    "yarn_scaled": {
        "rope_type": "yarn",
        "factor": 3.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
}
VARIANTS: dict[str, Any] = {
    "llama": LlamaConfig(**LLAMA),
    "llama_multi_head": LlamaConfig(**LLAMA | {"num_key_value_heads": 4}),
    "llama_one_kv_head": LlamaConfig(**LLAMA | {"num_key_value_heads": 1}),
    "llama_tied": LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama_wide_heads": LlamaConfig(**LLAMA, head_dim=24),
    "llama_theta": LlamaConfig(**LLAMA, rope_parameters={"rope_theta": 500.0}),
    **{
        f"llama_{name}": LlamaConfig(**LLAMA, rope_parameters=THETA | rope)
        for name, rope in ROPES.items()
    },
    "neox": GPTNeoXConfig(**NEOX),
    "neox_sequential": GPTNeoXConfig(**NEOX, use_parallel_residual=False),
    "neox_whole_rotary": GPTNeoXConfig(**NEOX, rotary_pct=1.0),
    "neox_tanh": GPTNeoXConfig(**NEOX, hidden_act="gelu_new"),
    "neox_no_attention_bias": GPTNeoXConfig(**NEOX, attention_bias=False),
    "neox_tied": GPTNeoXConfig(**NEOX, tie_word_embeddings=True),
}


def random_model(config: Any) -> PreTrainedModel:
    """A transformers model whose weights, biases and norms are all random."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config).eval()
    randomize(model, 0.15)
    return model


def randomize(model: PreTrainedModel, deviation: float) -> None:
    """Make the weights, biases and norms random, and the biases of routers too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            parameter.normal_(1.0 if is_norm else 0.0, deviation)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, deviation)
