"""The model architectures. Adding one takes a configuration file, a model file and a line here.

Model classes are named by import path and imported on use. So reading this table, or a
configuration, never imports torch: the engine's process must stay free of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from fastserve_backend.checkpoints.gpt_neox_config import GPTNeoXConfig
from fastserve_backend.checkpoints.llama_config import LlamaConfig
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.opt_config import OPTConfig


@dataclass(frozen=True)
class Architecture:
    """The two classes that make an architecture."""

    config: type[ModelConfig]
    """Its module must not import torch."""
    model_path: str
    """"module:class" of the model class, in ``fastserve_backend.models``."""

    def model_class(self) -> Any:
        """The `CausalLM` subclass. Importing it imports torch."""
        module, _, name = self.model_path.partition(":")
        return getattr(import_module(f"fastserve_backend.models.{module}"), name)


# Keyed by the `model_type` of Hugging Face's config.json.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "opt": Architecture(OPTConfig, "opt:OPTModel"),
        "llama": Architecture(LlamaConfig, "llama:LlamaModel"),
        "gpt_neox": Architecture(GPTNeoXConfig, "gpt_neox:GPTNeoXModel"),
    }
)
