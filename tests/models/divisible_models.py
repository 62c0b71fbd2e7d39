"""Random models of all architectures, which two or four ranks can share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decoder_checkpoints import FAMILIES as DECODERS
from opt_checkpoints import VARIANTS as OPT_VARIANTS
from opt_checkpoints import random_opt
from rotary_checkpoints import LLAMA, NEOX, random_model
from transformers import GPTNeoXConfig, LlamaConfig, PreTrainedModel

WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4}
ROTARY = {
    "llama": LlamaConfig(**LLAMA | WIDE),
    "llama_grouped": LlamaConfig(
        **LLAMA | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    ),
    "llama_tied": LlamaConfig(**LLAMA | WIDE, tie_word_embeddings=True),
    "llama_biases": LlamaConfig(**LLAMA | WIDE, attention_bias=True, mlp_bias=True),
    # Four ranks cannot share 83 equally.
    "llama_uneven": LlamaConfig(**LLAMA | WIDE | {"intermediate_size": 83}),
    "neox": GPTNeoXConfig(**NEOX),
    "neox_sequential": GPTNeoXConfig(**NEOX, use_parallel_residual=False),
    "neox_tied": GPTNeoXConfig(**NEOX, tie_word_embeddings=True),
}
ROTARY |= {
    name: variant.config(num_key_value_heads=4, divides=True) for name, variant in DECODERS.items()
}
MODELS: dict[str, Any] = ROTARY | {f"opt_{name}": None for name in OPT_VARIANTS}


def saved(name: str, directory: Path) -> PreTrainedModel:
    theirs = random_model(ROTARY[name]) if name in ROTARY else random_opt(**OPT_VARIANTS[name[4:]])
    theirs.save_pretrained(directory)
    return theirs
