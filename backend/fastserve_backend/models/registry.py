"""Which model architectures there are. Adding one is a configuration and a model file plus one line
here.

Classes are named by import path and imported on use, so that reading this table, or a
configuration, never imports torch: the engine process must stay free of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """Import paths, as "module:class", of the two classes that make an architecture."""

    config_path: str
    model_path: str

    def config_class(self) -> Any:
        """The `ModelConfig` subclass. Importing it must not import torch."""
        return _resolve(self.config_path)

    def model_class(self) -> Any:
        """The model class (see `causal_lm.CausalLM`). Importing it imports torch."""
        return _resolve(self.model_path)


def _resolve(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


_PACKAGE = __package__

# Keyed by the `model_type` of Hugging Face's config.json.
ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "opt": Architecture(f"{_PACKAGE}.opt_config:OPTConfig", f"{_PACKAGE}.opt:OPTModel"),
        "llama": Architecture(
            f"{_PACKAGE}.llama_config:LlamaConfig", f"{_PACKAGE}.llama:LlamaModel"
        ),
        "gpt_neox": Architecture(
            f"{_PACKAGE}.gpt_neox_config:GPTNeoXConfig", f"{_PACKAGE}.gpt_neox:GPTNeoXModel"
        ),
    }
)
