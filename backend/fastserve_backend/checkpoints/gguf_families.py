"""What GGUF files of each architecture become. Adding an architecture takes an entry here.

The facts are those of llama.cpp's converter and of its readers: which rows it reorders, what it
adds to norms, and the constants that it does not write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_file import GGUFFile
from fastserve_backend.checkpoints.gguf_layers import (
    GEMMA_LAST_NORM,
    GEMMA_NORMS,
    GPT_OSS_EXPERTS,
    MLP_EXPERTS,
    POST_NORMS,
    PRE_NORM_NAMES,
    PRE_NORMS,
    attention,
    experts,
    gated_mlp,
    head_norms,
    layer_norm,
    norms,
)
from fastserve_backend.checkpoints.gguf_rotary import (
    LLAMA3_FACTORS,
    LONG_FACTORS,
    SHORT_FACTORS,
    partial_rotary,
    rotary,
    rotary_by_layer_type,
    rotary_of_gemma3,
    rotary_with_growing_queries,
    untruncated_yarn,
)
from fastserve_backend.checkpoints.gguf_tensors import TensorRule, linear, weight

Config = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """A metadata field, without the architecture's name before it."""

    key: str
    required: bool = True
    default: Any = None


def _optional(key: str, default: Any = None) -> Field:
    return Field(key, required=False, default=default)


@dataclass(frozen=True)
class Family:
    """How GGUF files of an architecture become a Hugging Face checkpoint."""

    model_type: str
    class_name: str
    layer: tuple[TensorRule, ...]
    """The tensors of a layer, by names without the layer's number."""
    norm: tuple[TensorRule, ...] = (weight("output_norm", "model.norm", "hidden"),)
    """The norm after the last layer."""
    fields: Mapping[str, Field] = field(default_factory=dict)
    """Fields of config.json in addition to those of all models. None leaves a field out."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that are the same for all models of the family."""
    computed: Callable[[GGUFFile, Config], Config] = lambda file, config: {}
    """Further fields of config.json."""
    biases: Mapping[str, str] = field(default_factory=dict)
    """Fields of config.json that are true if there is a tensor of this name."""
    rotary: Callable[[GGUFFile, Config], Config] = rotary
    """The rope_parameters of config.json."""
    used: frozenset[str] = frozenset()
    """Further metadata fields that the family takes into account."""
    tensors_of_config: frozenset[str] = frozenset({LLAMA3_FACTORS})
    """Tensors whose values are in config.json."""

    def uses(self, key: str) -> bool:
        """Whether a metadata field, without the architecture's name, counts for the family."""
        return key in self.used or any(one.key == key for one in self.fields.values())


def family_of(file: GGUFFile) -> Family:
    """The family of a file. Raises ModelError if its architecture is not known here."""
    family = _FAMILIES.get(file.architecture)
    for (architecture, key), other in _BY_FIELD.items():
        if architecture == file.architecture and file.own(key, 0) > 0:
            family = other
    if family is None:
        raise ModelError(
            f"its architecture is {file.architecture!r}; GGUF files are supported for "
            f"{', '.join(sorted(_FAMILIES))}; use the model's Hugging Face checkpoint"
        )
    return family


_GEMMA_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
_RMS_EPS = {"rms_norm_eps": Field("attention.layer_norm_rms_epsilon")}
_WINDOW = "attention.sliding_window"
_PATTERN = "attention.sliding_window_pattern"
_EXPERTS_PER_TOKEN = {"num_experts_per_tok": Field("expert_used_count")}
_LLAMA_BIASES = {
    "attention_bias": "blk.0.attn_q.bias",
    "mlp_bias": "blk.0.ffn_gate.bias",
}
_MISTRAL_LAYER = (*attention(permuted=True), *gated_mlp(), *PRE_NORMS)
_OLMO2_LAYER = (*attention(), *head_norms("q", "kv"), *gated_mlp(), *POST_NORMS)
_LLAMA_LAYER = (
    *attention(bias="attention_bias", permuted=True),
    *gated_mlp(bias="mlp_bias"),
    *PRE_NORMS,
)


def _sliding_layers(period: int) -> Callable[[GGUFFile, Config], Config]:
    """Which layers have a sliding window: all but the last of each `period`, unless the file says
    otherwise. A period of 0 means all."""

    def layer_types(file: GGUFFile, config: Config) -> Config:
        pattern = file.own(_PATTERN, period)
        layers = range(config["num_hidden_layers"])
        if isinstance(pattern, int):
            pattern = [pattern == 0 or (layer + 1) % pattern != 0 for layer in layers]
        if not config.get("sliding_window"):
            pattern = [False for _ in layers]
        kinds = {True: "sliding_attention", False: "full_attention"}
        return {"layer_types": [kinds[bool(one)] for one in pattern]}

    return layer_types


def _gemma(period: int, layers_of_largest: int) -> Callable[[GGUFFile, Config], Config]:
    """Gemma's layers and the scale of its attention. The largest model of each generation divides
    by another size than the head's; as llama.cpp does, it is recognised by its layers."""

    def fields(file: GGUFFile, config: Config) -> Config:
        scalar = config["head_dim"]
        if config["num_hidden_layers"] == layers_of_largest:
            scalar = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": scalar} | _sliding_layers(period)(file, config)

    return fields


def _layers_without_rotation(file: GGUFFile, config: Config) -> Config:
    """SmolLM3 does not rotate each fourth layer."""
    layers = range(config["num_hidden_layers"])
    return {
        "no_rope_layer_interval": 4,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in layers],
    }


def _window_of_phi3(file: GGUFFile, config: Config) -> Config:
    """Files have 0 for no window. A window of all positions is none."""
    window = file.own(_WINDOW) or None
    if window is not None and window >= config["max_position_embeddings"]:
        window = None
    return {"sliding_window": window}


_FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama", "LlamaForCausalLM", _LLAMA_LAYER, fields=_RMS_EPS, biases=_LLAMA_BIASES
    ),
    "mistral3": Family(
        "mistral",
        "MistralForCausalLM",
        _MISTRAL_LAYER,
        fields=_RMS_EPS,
        constants={"sliding_window": None},
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        (*attention(bias=True, output_bias=False), *gated_mlp(), *PRE_NORMS),
        fields=_RMS_EPS,
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        (
            *attention(bias="attention_bias"),
            *head_norms("head_dim", "head_dim"),
            *gated_mlp(),
            *PRE_NORMS,
        ),
        fields=_RMS_EPS,
        biases={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "gemma": Family(
        "gemma",
        "GemmaForCausalLM",
        (*attention(), *gated_mlp(), *norms(PRE_NORM_NAMES, offset=1.0)),
        GEMMA_LAST_NORM,
        fields=_RMS_EPS | {"head_dim": Field("attention.key_length")},
        constants={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma2": Family(
        "gemma2",
        "Gemma2ForCausalLM",
        (*attention(), *gated_mlp(), *GEMMA_NORMS),
        GEMMA_LAST_NORM,
        fields=_RMS_EPS
        | {
            "head_dim": Field("attention.key_length"),
            "sliding_window": _optional(_WINDOW, 4096),
            "attn_logit_softcapping": _optional("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": _optional("final_logit_softcapping", 30.0),
        },
        constants=_GEMMA_ACTIVATION,
        computed=_gemma(period=2, layers_of_largest=46),
        used=frozenset({_PATTERN}),
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            *attention(),
            *head_norms("head_dim", "head_dim", offset=1.0),
            *gated_mlp(),
            *GEMMA_NORMS,
        ),
        GEMMA_LAST_NORM,
        fields=_RMS_EPS
        | {
            "head_dim": Field("attention.key_length"),
            "sliding_window": _optional(_WINDOW),
            "final_logit_softcapping": _optional("final_logit_softcapping"),
        },
        constants=_GEMMA_ACTIVATION,
        computed=_gemma(period=6, layers_of_largest=62),
        rotary=rotary_of_gemma3,
        used=frozenset({_PATTERN, "rope.freq_base_swa"}),
    ),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        (
            *linear("attn_qkv", "self_attn.qkv_proj", "qkv", "hidden"),
            *linear("attn_output", "self_attn.o_proj", "hidden", "q"),
            *linear("ffn_up", "mlp.gate_up_proj", "gate_up", "hidden"),
            *linear("ffn_down", "mlp.down_proj", "hidden", "ffn"),
            *PRE_NORMS,
        ),
        fields=_RMS_EPS
        | {
            "original_max_position_embeddings": _optional("rope.scaling.original_context_length"),
        },
        computed=_window_of_phi3,
        rotary=partial_rotary,
        used=frozenset({_WINDOW, "rope.dimension_count", "rope.scaling.attn_factor"}),
        tensors_of_config=frozenset({LONG_FACTORS, SHORT_FACTORS}),
    ),
    "granite": Family(
        "granite",
        "GraniteForCausalLM",
        _LLAMA_LAYER,
        fields=_RMS_EPS
        | {
            "attention_multiplier": Field("attention.scale"),
            "embedding_multiplier": _optional("embedding_scale", 1.0),
            "residual_multiplier": _optional("residual_scale", 1.0),
            "logits_scaling": _optional("logit_scale", 1.0),
        },
        biases=_LLAMA_BIASES,
    ),
    "smollm3": Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        _LLAMA_LAYER,
        fields=_RMS_EPS,
        computed=_layers_without_rotation,
        biases=_LLAMA_BIASES,
    ),
    "olmo2": Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _OLMO2_LAYER,
        fields=_RMS_EPS,
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        (
            *attention(bias="use_bias"),
            *linear("ffn_up", "mlp.c_fc", "ffn", "hidden", bias="use_bias"),
            *linear("ffn_down", "mlp.c_proj", "hidden", "ffn", bias="use_bias"),
            *layer_norm("attn_norm", "input_layernorm"),
            *layer_norm("ffn_norm", "post_attention_layernorm"),
        ),
        layer_norm("output_norm", "model.norm"),
        fields={"norm_epsilon": Field("attention.layer_norm_epsilon")},
        biases={"use_bias": "blk.0.attn_q.bias"},
    ),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (
            *attention(bias="attention_bias"),
            *head_norms("head_dim", "head_dim"),
            *MLP_EXPERTS,
            *PRE_NORMS,
        ),
        fields=_RMS_EPS
        | _EXPERTS_PER_TOKEN
        | {
            "num_experts": Field("expert_count"),
            "moe_intermediate_size": Field("expert_feed_forward_length"),
        },
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        biases={"attention_bias": "blk.0.attn_q.bias"},
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeForCausalLM",
        (*attention(), *head_norms("q", "kv"), *MLP_EXPERTS, *PRE_NORMS),
        fields=_RMS_EPS | _EXPERTS_PER_TOKEN | {"num_experts": Field("expert_count")},
        constants={"norm_topk_prob": False},
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        (
            *attention(bias=True),
            TensorRule("self_attn.sinks", ("attn_sinks.weight",), ("heads",)),
            *GPT_OSS_EXPERTS,
            *norms(
                {
                    "attn_norm": "input_layernorm",
                    "post_attention_norm": "post_attention_layernorm",
                }
            ),
        ),
        fields=_RMS_EPS
        | _EXPERTS_PER_TOKEN
        | {
            "num_local_experts": Field("expert_count"),
            "intermediate_size": Field("expert_feed_forward_length"),
            "sliding_window": Field(_WINDOW),
        },
        constants={"attention_bias": True},
        computed=_sliding_layers(2),
        rotary=untruncated_yarn,
        used=frozenset({_PATTERN}),
    ),
}

# Families whose files have another family's architecture: they have this field too.
_BY_FIELD: Mapping[tuple[str, str], Family] = {
    ("llama", "expert_count"): Family(
        "mixtral",
        "MixtralForCausalLM",
        (
            *attention(permuted=True),
            *experts("block_sparse_moe", "w1", "w3", "w2"),
            *PRE_NORMS,
        ),
        fields=_RMS_EPS | _EXPERTS_PER_TOKEN | {"num_local_experts": Field("expert_count")},
    ),
    ("mistral3", "attention.temperature_scale"): Family(
        "ministral3",
        "Ministral3ForCausalLM",
        _MISTRAL_LAYER,
        fields=_RMS_EPS,
        constants={"sliding_window": None},
        rotary=rotary_with_growing_queries,
        used=frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
    ),
    ("olmo2", _WINDOW): Family(
        "olmo3",
        "Olmo3ForCausalLM",
        _OLMO2_LAYER,
        fields=_RMS_EPS | {"sliding_window": Field(_WINDOW)},
        computed=_sliding_layers(4),
        rotary=rotary_by_layer_type,
        used=frozenset({_PATTERN, "rope.freq_base_swa"}),
    ),
}
