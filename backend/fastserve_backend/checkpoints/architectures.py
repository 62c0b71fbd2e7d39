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
from typing import Any

from fastserve_backend.checkpoints.families import (
    cohere,
    gemma,
    glm,
    granite,
    layer_norm,
    llama,
    mistral,
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
        "arcee": Architecture(llama.read_arcee),
        "cohere": Architecture(cohere.read_cohere),
        "cohere2": Architecture(cohere.read_cohere2),
        "cwm": Architecture(llama.read_cwm),
        "ernie4_5": Architecture(llama.read_ernie4_5),
        "exaone4": Architecture(olmo.read_exaone4),
        "gemma": Architecture(gemma.read_gemma),
        "gemma2": Architecture(gemma.read_gemma2),
        "gemma3_text": Architecture(gemma.read_gemma3, builtin=gemma.GEMMA3),
        "glm": Architecture(glm.read_glm),
        "glm4": Architecture(glm.read_glm4),
        "gpt_neox": Architecture(
            GPTNeoXConfig.from_hf, "gpt_neox:GPTNeoXModel", GPTNeoXConfig.builtin
        ),
        "granite": Architecture(granite.read_granite),
        "helium": Architecture(llama.read_helium),
        "llama": Architecture(llama.read_llama, builtin=llama.BUILTIN),
        "ministral": Architecture(mistral.read_ministral),
        "ministral3": Architecture(mistral.read_ministral3),
        "mistral": Architecture(mistral.read_mistral, builtin=mistral.MISTRAL),
        "nemotron": Architecture(layer_norm.read_nemotron),
        "olmo": Architecture(olmo.read_olmo),
        "olmo2": Architecture(olmo.read_olmo2),
        "olmo3": Architecture(olmo.read_olmo3),
        "opt": Architecture(OPTConfig.from_hf, "opt:OPTModel", OPTConfig.builtin),
        "phi3": Architecture(phi.read_phi3),
        "qwen2": Architecture(qwen.read_qwen2, builtin=qwen.QWEN2),
        "qwen3": Architecture(qwen.read_qwen3, builtin=qwen.QWEN3),
        "seed_oss": Architecture(llama.read_seed_oss),
        "smollm3": Architecture(smollm.read_smollm3),
        "stablelm": Architecture(layer_norm.read_stablelm),
        "starcoder2": Architecture(layer_norm.read_starcoder2),
        "vaultgemma": Architecture(gemma.read_vaultgemma),
    }
)

TEXT_OF: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text", "mistral3": "mistral"})
"""Models that also read images -> the type of their text model, if ``text_config`` names none. The
text model alone is served."""
