"""Random models of several families, and the GGUF files that llama.cpp's converter writes for them.

The names of tensors come from the tables of the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf_files import (
    F32,
    VOCAB_SIZE,
    Arrays,
    Blocks,
    Fields,
    permute,
    tokenizer_fields,
    write_gguf,
)
from paged_executor import POSITIONS
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class Variant:
    """A model of a family, and what is special about its file."""

    architecture: str
    """GGUF's."""
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    fields: Callable[[Any], Fields] = lambda config: {}
    """Further metadata, by names without the architecture's."""
    permuted: bool = False
    """Whether the converter reorders the rows of q and k."""
    norm_offset: float = 0.0
    """What the converter adds to norms."""
    split: Callable[[str, Tensor], Tensors] = lambda name, value: iter([(name, value)])
    """The tensors of the file that a tensor of the model becomes, by names that `gguf` knows."""
    extra: Callable[[Any], Arrays] = lambda config: {}

    def model(self) -> PreTrainedModel:
        """With random weights that bfloat16 holds exactly. It computes in float32."""
        sizes: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": None,
        }
        torch.manual_seed(7)
        config = CONFIG_MAPPING[self.model_type](**{**sizes, **self.changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_plain_norm = "norm" in name and not self.norm_offset
                parameter.normal_(1.0 if is_plain_norm else 0.0, 0.15)
                parameter.copy_(parameter.bfloat16())
        return model

    def write(
        self,
        path: Path,
        model: PreTrainedModel,
        change: Callable[[Fields, Arrays], None] = lambda fields, arrays: None,
        kind: GGMLQuantizationType = F32,
        blocks: Mapping[str, Blocks] = MappingProxyType({}),
    ) -> Path:
        """`kind`, `blocks`: see `write_gguf`."""
        fields = tokenizer_fields()
        own = _common_fields(model.config) | self.fields(model.config)
        fields |= {f"{self.architecture}.{key}": value for key, value in own.items()}
        arrays = self._arrays(model)
        change(fields, arrays)
        return write_gguf(
            path, fields, arrays, kind=kind, architecture=self.architecture, blocks=blocks
        )

    def _arrays(self, model: PreTrainedModel) -> Arrays:
        config = model.config
        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(kinds[self.architecture], config.num_hidden_layers)
        arrays = dict(self.extra(config))
        for name, value in model.state_dict().items():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if self.permuted and ".q_proj." in name:
                value = torch.from_numpy(permute(value.numpy(), config.num_attention_heads))
            elif self.permuted and ".k_proj." in name:
                value = torch.from_numpy(permute(value.numpy(), config.num_key_value_heads))
            elif name.endswith("norm.weight"):
                value = value + self.norm_offset
            for part, tensor in self.split(name, value):
                theirs = names.get_name(part, try_suffixes=(".weight", ".bias"))
                assert theirs is not None, part
                arrays[theirs] = np.ascontiguousarray(tensor.numpy())
        return arrays


def _common_fields(config: PreTrainedConfig) -> Fields:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if (eps := getattr(config, "rms_norm_eps", None)) is not None:
        fields["attention.layer_norm_rms_epsilon"] = eps
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        fields |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if rope["rope_type"] in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields |= {
            f"rope.scaling.yarn_{key}": rope[key]
            for key in ("beta_fast", "beta_slow")
            if key in rope
        }
    return fields


def _llama_fields(config: Any) -> Fields:
    head_dim = getattr(config, "head_dim", None)
    return {
        "vocab_size": config.vocab_size,
        "rope.dimension_count": head_dim or config.hidden_size // config.num_attention_heads,
    }


def _ministral3_fields(config: Any) -> Fields:
    return _llama_fields(config) | {
        "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
    }


def _granite_fields(config: Any) -> Fields:
    return _llama_fields(config) | {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def _gemma2_fields(config: Any) -> Fields:
    return {
        "attention.sliding_window": config.sliding_window,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _gemma3_fields(config: Any) -> Fields:
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    fields = {"attention.sliding_window": config.sliding_window}
    return fields | ({"rope.freq_base_swa": local} if local != 1e4 else {})


def _olmo3_fields(config: Any) -> Fields:
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [
            kind == "sliding_attention" for kind in config.layer_types
        ],
    }


def _phi3_fields(config: Any) -> Fields:
    rope = config.rope_parameters
    head_dim = config.hidden_size // config.num_attention_heads
    fields = {
        "rope.dimension_count": int(rope["partial_rotary_factor"] * head_dim),
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "attention.sliding_window": config.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        log = math.log(config.original_max_position_embeddings)
        fields["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / log)
    return fields


def _phi3_factors(config: Any) -> Arrays:
    return {
        f"rope_factors_{kind}.weight": np.array(factors, dtype=np.float32)
        for kind in ("long", "short")
        if (factors := config.rope_parameters.get(f"{kind}_factor")) is not None
    }


def _expert_fields(config: Any, *, size: str | None = None) -> Fields:
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    fields = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if size is not None:
        fields["expert_feed_forward_length"] = getattr(config, size)
    return fields


def _split_experts(name: str, value: Tensor) -> Tensors:
    """transformers has gate and up of all experts in one tensor."""
    if name.endswith("experts.gate_up_proj"):
        for part, tensor in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), tensor
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", value
    else:
        yield name, value


def _split_gpt_oss(name: str, value: Tensor) -> Tensors:
    if name.endswith("sinks"):
        yield f"{name}.weight", value
    elif name.endswith("gate_up_proj"):
        for first, part in enumerate(("gate", "up")):
            tensor = value.transpose(1, 2)[:, first::2]
            yield name.replace("gate_up_proj", f"{part}_proj.weight"), tensor
    elif name.endswith("gate_up_proj_bias"):
        for first, part in enumerate(("gate", "up")):
            yield name.replace("gate_up_proj_bias", f"{part}_proj.bias"), value[:, first::2]
    elif name.endswith("experts.down_proj"):
        yield f"{name}.weight", value.transpose(1, 2)
    else:
        yield name.replace("down_proj_bias", "down_proj.bias"), value


_HEADS = {"head_dim": 24}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.25, 1.5, 2.0, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 16.0],
    "partial_rotary_factor": 0.75,
    # transformers computes the same if it is left out.
    "attention_factor": math.sqrt(1 + math.log(POSITIONS / 32) / math.log(32)),
}
_gemma2 = partial(Variant, "gemma2", "gemma2", fields=_gemma2_fields, norm_offset=1.0)
_gemma3 = partial(Variant, "gemma3", "gemma3_text", fields=_gemma3_fields, norm_offset=1.0)
_phi3 = partial(Variant, "phi3", "phi3", fields=_phi3_fields, extra=_phi3_factors)

VARIANTS: dict[str, Variant] = {
    "mistral3": Variant(
        "mistral3",
        "mistral",
        {**_HEADS, "sliding_window": None},
        fields=_llama_fields,
        permuted=True,
    ),
    "ministral3": Variant(
        "mistral3",
        "ministral3",
        {
            **_HEADS,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 12,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        fields=_ministral3_fields,
        permuted=True,
    ),
    "qwen2": Variant("qwen2", "qwen2", {"rope_parameters": {"rope_theta": 1e6}}),
    "qwen2_tied_yarn": Variant(
        "qwen2",
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 12,
            },
        },
    ),
    "qwen3": Variant("qwen3", "qwen3", {**_HEADS, "rope_parameters": {"rope_theta": 1e6}}),
    "gemma": Variant("gemma", "gemma", {"head_dim": 16}, norm_offset=1.0),
    "gemma2": _gemma2({"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
    "gemma2_largest": _gemma2(
        {
            "head_dim": 32,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 46,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
        }
    ),
    "gemma3": _gemma3(
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
        }
    ),
    "gemma3_scaled": _gemma3(
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        }
    ),
    "phi3": _phi3({"original_max_position_embeddings": POSITIONS}),
    "phi3_window": _phi3({"original_max_position_embeddings": POSITIONS, "sliding_window": 8}),
    "phi3_long": _phi3({"original_max_position_embeddings": 32, "rope_parameters": _LONGROPE}),
    "granite": Variant(
        "granite",
        "granite",
        {
            "attention_multiplier": 0.125,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "logits_scaling": 2.0,
        },
        fields=_granite_fields,
        permuted=True,
    ),
    "smollm3": Variant(
        "smollm3", "smollm3", {"num_hidden_layers": 5}, _llama_fields, permuted=True
    ),
    "olmo2": Variant("olmo2", "olmo2"),
    "olmo3": Variant(
        "olmo2",
        "olmo3",
        {
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 4.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 12,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
        fields=_olmo3_fields,
    ),
    "starcoder2": Variant(
        "starcoder2",
        "starcoder2",
        fields=lambda config: {"attention.layer_norm_epsilon": config.norm_epsilon},
    ),
    "starcoder2_without_biases": Variant(
        "starcoder2",
        "starcoder2",
        {"use_bias": False, "tie_word_embeddings": False},
        fields=lambda config: {"attention.layer_norm_epsilon": config.norm_epsilon},
    ),
    "mixtral": Variant(
        "llama",
        "mixtral",
        {"num_local_experts": 4, "head_dim": 16},
        fields=lambda config: _llama_fields(config) | _expert_fields(config),
        permuted=True,
        split=_split_experts,
    ),
    "qwen3moe": Variant(
        "qwen3moe",
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        fields=partial(_expert_fields, size="moe_intermediate_size"),
        split=_split_experts,
    ),
    "olmoe": Variant(
        "olmoe",
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2},
        fields=_expert_fields,
        split=_split_experts,
    ),
    "gpt_oss": Variant(
        "gpt-oss",
        "gpt_oss",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
        fields=lambda config: (
            _expert_fields(config, size="intermediate_size")
            | {"attention.sliding_window": config.sliding_window}
        ),
        split=_split_gpt_oss,
    ),
}
