"""The model architectures. Adding one takes a function that reads its config.json, and a line here;
a model file too, if the decoder's switches do not describe it.

Model classes are named by import path and imported on use. So reading this table, or a
configuration, never imports torch: the engine's process must stay free of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from fastserve_backend.checkpoints.families import (
    biased_routers,
    cohere,
    falcon,
    gemma,
    glm,
    gpt,
    granite,
    hunyuan,
    layer_norm,
    llama,
    mistral,
    mixtures,
    olmo,
    phi,
    qwen,
    smollm,
)
from fastserve_backend.checkpoints.gpt_neox_config import GPTNeoXConfig
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.opt_config import OPTConfig


@dataclass(frozen=True)
class Architecture:
    """How models of one ``model_type`` are read, and the class that runs them."""

    models: str
    """Published models, as people call them."""
    read: Callable[..., ModelConfig]
    """From the fields of a config.json and `CommonFields` to the configuration. Raises ModelError.
    Its module must not import torch."""
    model_path: str = "decoder:DecoderModel"
    """"module:class" of the model class, in ``fastserve_backend.models``."""
    builtin: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Built-in configurations: name -> the fields of a config.json."""

    def model_class(self) -> Any:
        """The `CausalLM` subclass. Importing it imports torch."""
        module, _, name = self.model_path.partition(":")
        return getattr(import_module(f"fastserve_backend.models.{module}"), name)


# Keyed by the `model_type` of Hugging Face's config.json.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "apertus": Architecture("Apertus", llama.read_apertus),
        "arcee": Architecture("Arcee AFM", llama.read_arcee),
        "codegen": Architecture("CodeGen 1, 2 and 2.5", gpt.read_codegen),
        "cohere": Architecture("Command R, R+", cohere.read_cohere),
        "cohere2": Architecture("Command R7B, A; Aya", cohere.read_cohere2),
        "cwm": Architecture("CWM", llama.read_cwm),
        "ernie4_5": Architecture("ERNIE 4.5 (dense)", llama.read_ernie4_5),
        "dots1": Architecture("dots.llm1", biased_routers.read_dots1),
        "ernie4_5_moe": Architecture(
            "ERNIE 4.5 21B-A3B, 300B-A47B", biased_routers.read_ernie4_5_moe
        ),
        "exaone4": Architecture("EXAONE 4", olmo.read_exaone4),
        "exaone_moe": Architecture("K-EXAONE", biased_routers.read_exaone_moe),
        "falcon": Architecture("Falcon 7B to 180B, Falcon 2", falcon.read_falcon),
        "flex_olmo": Architecture("FlexOlmo", mixtures.read_flex_olmo),
        "gemma": Architecture("Gemma 1", gemma.read_gemma),
        "gemma2": Architecture("Gemma 2", gemma.read_gemma2),
        "gemma3_text": Architecture("Gemma 3", gemma.read_gemma3, builtin=gemma.GEMMA3),
        "glm": Architecture("GLM-4-9B", glm.read_glm),
        "glm4": Architecture("GLM-4-0414", glm.read_glm4),
        "glm4_moe": Architecture("GLM 4.5 to 4.7", biased_routers.read_glm4_moe),
        "gpt2": Architecture("GPT-2", gpt.read_gpt2),
        "gpt_bigcode": Architecture("StarCoder 1, SantaCoder", gpt.read_gpt_bigcode),
        "gpt_neox": Architecture(
            "GPT-NeoX, Pythia",
            GPTNeoXConfig.from_hf,
            "gpt_neox:GPTNeoXModel",
            GPTNeoXConfig.builtin,
        ),
        "gpt_oss": Architecture("gpt-oss", mixtures.read_gpt_oss, builtin=mixtures.GPT_OSS),
        "gptj": Architecture("GPT-J", gpt.read_gptj),
        "granite": Architecture("Granite 3", granite.read_granite),
        "granitemoe": Architecture("Granite 3 MoE", granite.read_granitemoe),
        "granitemoeshared": Architecture("Granite 4 preview mixtures", granite.read_granitemoe),
        "helium": Architecture("Helium", llama.read_helium),
        "hunyuan_v1_dense": Architecture("Hunyuan 0.5B to 7B", hunyuan.read_hunyuan_dense),
        "hunyuan_v1_moe": Architecture("Hunyuan A13B", hunyuan.read_hunyuan_moe),
        "internlm3": Architecture("InternLM 3", llama.read_internlm3),
        "iquestcoder": Architecture("IQuest-Coder V1", llama.read_iquestcoder),
        "jais2": Architecture("Jais 2", layer_norm.read_jais2),
        "llama": Architecture(
            "LLaMA 1 to 3.3, SmolLM 1 and 2, Falcon 3, Yi, DeepSeek LLM, TinyLlama",
            llama.read_llama,
            builtin=llama.BUILTIN,
        ),
        "minimax_m2": Architecture("MiniMax M2", biased_routers.read_minimax_m2),
        "ministral": Architecture("Ministral 8B", mistral.read_ministral),
        "ministral3": Architecture("Ministral 3", mistral.read_ministral3),
        "mistral": Architecture(
            "Mistral 7B, Nemo, Small", mistral.read_mistral, builtin=mistral.MISTRAL
        ),
        "mixtral": Architecture("Mixtral", mixtures.read_mixtral, builtin=mixtures.MIXTRAL),
        "nemotron": Architecture("Nemotron 4, Minitron", layer_norm.read_nemotron),
        "olmo": Architecture("OLMo 1", olmo.read_olmo),
        "olmo2": Architecture("OLMo 2", olmo.read_olmo2),
        "olmo3": Architecture("OLMo 3", olmo.read_olmo3),
        "olmoe": Architecture("OLMoE", mixtures.read_olmoe, builtin=mixtures.OLMOE),
        "opt": Architecture("OPT", OPTConfig.from_hf, "opt:OPTModel", OPTConfig.builtin),
        "persimmon": Architecture("Persimmon", layer_norm.read_persimmon),
        "phi": Architecture("Phi 1, 1.5, 2", phi.read_phi),
        "phi3": Architecture("Phi 3, 3.5, 4, 4-mini", phi.read_phi3),
        "phimoe": Architecture("Phi 3.5 MoE", phi.read_phimoe),
        "qwen2": Architecture(
            "Qwen 2, 2.5; DeepSeek-R1-Distill-Qwen", qwen.read_qwen2, builtin=qwen.QWEN2
        ),
        "qwen2_moe": Architecture("Qwen 1.5 MoE, Qwen 2 57B-A14B", mixtures.read_qwen2_moe),
        "qwen2_vl_text": Architecture("Qwen 2 VL, its text model", qwen.read_qwen2_vl),
        "qwen2_5_vl_text": Architecture("Qwen 2.5 VL, its text model", qwen.read_qwen2_vl),
        "qwen3": Architecture("Qwen 3", qwen.read_qwen3, builtin=qwen.QWEN3),
        "qwen3_moe": Architecture(
            "Qwen 3 30B-A3B, 235B-A22B; Qwen3-Coder",
            mixtures.read_qwen3_moe,
            builtin=mixtures.QWEN3_MOE,
        ),
        "qwen3_vl_text": Architecture("Qwen 3 VL, its text model", qwen.read_qwen3_vl),
        "qwen3_vl_moe_text": Architecture(
            "Qwen 3 VL mixtures, their text model", mixtures.read_qwen3_vl_moe
        ),
        "seed_oss": Architecture("Seed-OSS", llama.read_seed_oss),
        "smollm3": Architecture("SmolLM3", smollm.read_smollm3),
        "solar_open": Architecture("Solar Open", biased_routers.read_solar_open),
        "stablelm": Architecture("StableLM 2 1.6B, Zephyr 3B", layer_norm.read_stablelm),
        "starcoder2": Architecture("StarCoder2", layer_norm.read_starcoder2),
        "vaultgemma": Architecture("VaultGemma", gemma.read_vaultgemma),
    }
)


REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "bitnet": "their linear layers round activations to 8 bits",
        "bloom": "their scores have a bias for distances (ALiBi)",
        "mpt": "their scores have a bias for distances (ALiBi)",
    }
)
"""Families that people ask for, by ``model_type``, and why they are not served."""


class TextOf(NamedTuple):
    """The text model of a model that also reads images, if its config.json does not say more."""

    model_type: str
    is_tied: bool
    """Whether its head is its embedding."""
    is_flat: bool = False
    """Whether its fields are those of the whole model, if there is no ``text_config``."""


TEXT_OF: Mapping[str, TextOf] = MappingProxyType(
    {
        "gemma3": TextOf("gemma3_text", True),
        "idefics3": TextOf("llama", False),
        "internvl": TextOf("qwen2", True),
        "llava": TextOf("llama", False),
        "llava_next": TextOf("llama", False),
        "llava_onevision": TextOf("qwen2", False),
        "mistral3": TextOf("mistral", True),
        "qwen2_5_vl": TextOf("qwen2_5_vl_text", False, is_flat=True),
        "qwen2_vl": TextOf("qwen2_vl_text", False, is_flat=True),
        "qwen3_vl": TextOf("qwen3_vl_text", False),
        "qwen3_vl_moe": TextOf("qwen3_vl_moe_text", False),
        "smolvlm": TextOf("llama", False),
    }
)
"""Models that also read images. Their text models alone are served."""
