"""The model that the tests of the server share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0

TINY_OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float32",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def engine_options(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "policy": "skip_join_mlfq",  # with queues to look at
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        "device_blocks": 240,  # 3840 tokens, less than the model's 4096
        "swap_space_gib": 0.1,
    }
