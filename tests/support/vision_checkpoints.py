"""Configurations of small models that also read images, by ``model_type``."""

from __future__ import annotations

from typing import Any

from decoder_checkpoints import ALTERNATING, HEAD_DIM, SIZES, WINDOWED
from transformers import (
    CONFIG_MAPPING,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
)

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
TEXT = SIZES | HEAD_DIM | WINDOWED
# Qwen's vision models name their sizes in other words, and rotate by three positions.
QWEN_VISION = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 14}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
QWEN_TEXT = SIZES | {"rope_parameters": SECTIONS}
LLAMA = LlamaConfig(**SIZES).to_dict()


def _whole(model_type: str, text: dict[str, Any], **fields: Any) -> PreTrainedConfig:
    """The configuration of a model that also reads images."""
    fields = {"vision_config": VISION, "image_token_id": 300} | fields
    return CONFIG_MAPPING[model_type](text_config=text, **fields)


WITH_IMAGES = {
    "gemma3": _whole(
        "gemma3", Gemma3TextConfig(**TEXT, **ALTERNATING).to_dict(), mm_tokens_per_image=1
    ),
    "idefics3": _whole("idefics3", LLAMA),
    "internvl": _whole("internvl", SIZES | {"model_type": "qwen2"}),
    "llava": _whole("llava", LLAMA),
    "llava_next": _whole("llava_next", LLAMA),
    "llava_onevision": _whole("llava_onevision", SIZES | {"model_type": "qwen2"}),
    "mistral3": _whole(
        "mistral3",
        MistralConfig(**TEXT).to_dict(),
        vision_config=VISION | {"model_type": "pixtral"},
        tie_word_embeddings=False,
    ),
    "qwen2_5_vl": _whole(
        "qwen2_5_vl", QWEN_TEXT, vision_config={**QWEN_VISION, "out_hidden_size": 64}
    ),
    "qwen2_vl": _whole("qwen2_vl", QWEN_TEXT, vision_config={**QWEN_VISION, "hidden_size": 64}),
    "qwen3_vl": _whole("qwen3_vl", QWEN_TEXT | HEAD_DIM, vision_config=QWEN_VISION),
    "qwen3_vl_moe": _whole(
        "qwen3_vl_moe",
        QWEN_TEXT
        | HEAD_DIM
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
        vision_config=QWEN_VISION,
    ),
    "smolvlm": _whole("smolvlm", LLAMA),
}
