"""Which model architectures there are. Adding one is a configuration and a model file plus one line
here.

Model classes are named by import path and imported on use, so that reading this table, or a
configuration, never imports torch: the engine process must stay free of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from fastserve_backend.models.gpt_neox_config import GPTNeoXConfig
from fastserve_backend.models.llama_config import LlamaConfig
from fastserve_backend.models.model_config import ModelConfig
from fastserve_backend.models.opt_config import OPTConfig


@dataclass(frozen=True)
class Architecture:
    """The two classes that make an architecture."""

    config: type[ModelConfig]
    """Its module must not import torch."""
    model_path: str
    """"module:class" of the model class, in this package."""

    def model_class(self) -> Any:
        """The `CausalLM` subclass. Importing it imports torch."""
        module, _, name = self.model_path.partition(":")
        return getattr(import_module(f"{__package__}.{module}"), name)


# Keyed by the `model_type` of Hugging Face's config.json.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "opt": Architecture(OPTConfig, "opt:OPTModel"),
        "llama": Architecture(LlamaConfig, "llama:LlamaModel"),
        "gpt_neox": Architecture(GPTNeoXConfig, "gpt_neox:GPTNeoXModel"),
    }
)
