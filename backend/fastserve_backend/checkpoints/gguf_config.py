"""The Hugging Face configuration of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

from fastserve_backend.checkpoints.architectures import ARCHITECTURES
from fastserve_backend.checkpoints.end_tokens import TURN_ENDS, named_turn_ends
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_families import Family, Field
from fastserve_backend.checkpoints.gguf_file import GGUFFile
from fastserve_backend.checkpoints.gguf_tensors import sizes
from fastserve_backend.checkpoints.gguf_vocabulary import NO_TOKEN
from fastserve_backend.checkpoints.hf_config import HFConfig

# Fields of config.json that all families have -> GGUF's.
_FIELDS = {
    "hidden_size": Field("embedding_length"),
    "intermediate_size": Field("feed_forward_length"),
    "num_hidden_layers": Field("block_count"),
    "num_attention_heads": Field("attention.head_count"),
    "num_key_value_heads": Field("attention.head_count_kv", required=False),
    "head_dim": Field("attention.key_length", required=False),
    "max_position_embeddings": Field("context_length"),
}

# Fields that would change a model's answers -> the values that change nothing. They are refused
# unless the model's family uses them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.sliding_window": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # 1 is softmax
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True,),  # without it Granite 4 does not rotate
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


def hf_config(file: GGUFFile, family: Family) -> dict[str, Any]:
    """The fields of config.json. Raises ModelError if the model cannot be served."""
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "vocab_size": len(file.required("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(file),
    }
    for ours, theirs in {**_FIELDS, **family.fields}.items():
        key = file.key(theirs.key)
        config[ours] = file.required(key) if theirs.required else file.field(key, theirs.default)
    config = {key: value for key, value in config.items() if value is not None}
    config["pad_token_id"] = None  # transformers' defaults may lie beyond the vocabulary
    config |= {ours: tensor in file.tensors for ours, tensor in family.biases.items()}
    config |= family.constants
    # Refuse what cannot be served, such as too large heads, before its rotation is computed.
    _check_served(config | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    config |= family.computed(file, config)
    _refuse_unsupported(file, family, config)
    config["rope_parameters"] = family.rotary(file, config)
    _check_served(config)
    return config


def _check_served(config: dict[str, Any]) -> None:
    ARCHITECTURES[config["model_type"]].read(
        HFConfig(config, "its metadata"),
        name="",
        directory=None,
        load_format="dummy",
        dtype="bfloat16",
        quantization=None,
        kv_dtype="same",
    )


def _refuse_unsupported(file: GGUFFile, family: Family, config: dict[str, Any]) -> None:
    head_dim = sizes(config)["head_dim"]
    neutral = _NEUTRAL | {
        "attention.scale": (0.0, head_dim**-0.5),
        "rope.dimension_count": (head_dim,),
        "rope.freq_base_swa": (file.own("rope.freq_base") or 1e4,),
    }
    for key, values in neutral.items():
        value = file.own(key)
        if value is None or family.uses(key):
            continue
        if not any(math.isclose(value, one, rel_tol=1e-6) for one in values):
            raise ModelError(
                f"metadata field {file.key(key)} is {value}, but only {values[-1]} is supported; "
                "use the model's Hugging Face checkpoint"
            )


def _end_tokens(file: GGUFFile) -> list[int]:
    """Ids of the ends of a text, of a turn in a chat and of a message. Older files lack the
    fields, so tokens with the usual names count too."""
    tokens = dict(enumerate(file.required("tokenizer.ggml.tokens")))
    ends = named_turn_ends(set(tokens.values()))
    no_ends = [name for name in TURN_ENDS if name not in ends]  # in gpt-oss <|end|> is none
    fields = (file.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ids = [one for one in fields if one not in NO_TOKEN and tokens.get(one) not in no_ends]
    ids += [token_id for token_id, token in tokens.items() if token in ends]
    return list(dict.fromkeys(ids))
