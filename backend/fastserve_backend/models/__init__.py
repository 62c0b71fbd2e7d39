"""Models: their configuration, weights, tokenizers and forward passes.

What this package exports imports no torch; the modules that do are `opt`, `layers`, `weights` and
`loader`.
"""

from .config import ModelConfig, load_model_config
from .errors import ModelError
from .tokenizer import TokenizationError, Tokenizer, TokenStream, load_tokenizer

__all__ = [
    "ModelConfig",
    "ModelError",
    "TokenStream",
    "TokenizationError",
    "Tokenizer",
    "load_model_config",
    "load_tokenizer",
]
