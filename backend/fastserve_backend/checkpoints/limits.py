"""What is plausible in the files of a model: one place for all limits. Imports no torch.

A damaged or malicious file can state any number, such as a vocabulary of 10**12 tokens. A number is
compared with its limit before anything of that size is computed or takes memory. The largest
published models stay far below each limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from fastserve_backend.checkpoints.errors import ModelError

_FIELDS: Mapping[str, int] = MappingProxyType(
    {
        "num_hidden_layers": 1 << 10,
        "hidden_size": 1 << 17,
        "word_embed_proj_dim": 1 << 17,
        "num_attention_heads": 1 << 12,
        "num_key_value_heads": 1 << 12,
        "head_dim": 1 << 12,
        "intermediate_size": 1 << 20,
        "ffn_dim": 1 << 20,
        "moe_intermediate_size": 1 << 20,
        "shared_expert_intermediate_size": 1 << 20,
        "vocab_size": 1 << 22,
        "shared_intermediate_size": 1 << 20,
        "n_shared_experts": 1 << 10,
        "moe_num_shared_experts": 1 << 10,
        "n_routed_experts": 1 << 14,
        "moe_num_experts": 1 << 14,
        "num_experts": 1 << 14,
        "num_local_experts": 1 << 14,
    }
)
# Others, most of which count tokens or layers: models of ten million positions are published.
_OTHER_FIELD = 1 << 24
LEAST_NUMBER, MOST_NUMBER = 1e-30, 1e30
"""Of a field that is no integer, such as the base of a rotation. Beyond these, its powers and
logarithms overflow."""
PARAMETERS = 10**14
"""Of a model. Each size may be plausible where their product is not."""
END_TOKENS = 1 << 10

_FILE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "config.json": 16 << 20,
        "generation_config.json": 16 << 20,
        "tokenizer_config.json": 64 << 20,
        "special_tokens_map.json": 64 << 20,
        "added_tokens.json": 64 << 20,
        "chat_template.json": 4 << 20,
    }
)
# Others: tokenizer.json, vocab.json, merges.txt, and the indices of weight files. Vocabularies of
# 262,144 tokens take 35 MB.
_OTHER_FILE_BYTES = 128 << 20
TEMPLATE_BYTES = 1 << 20
"""Of a chat template. The gateway gets it, too."""

SAFETENSORS_HEADER_BYTES = 32 << 20
"""About 130 bytes for each tensor. Mixtures of experts have up to 100,000 tensors."""

GGUF_HEADER_BYTES = 256 << 20
"""Mostly the vocabulary and its merges."""
GGUF_FIELDS = 1 << 14
GGUF_TENSORS = 1 << 17
GGUF_PARTS = 1 << 10
GGUF_DIMENSIONS = 4
"""As in ggml."""
GGUF_TEXT_BYTES = 16 << 20
GGUF_VALUES = 1 << 22
"""Of an array, such as the tokens of a vocabulary."""
GGUF_NESTED_ARRAYS = 4
GGUF_ALIGNMENT = 1 << 20

TOKEN_CHARS = 1 << 12
"""Of one token. The ways to divide a token into two are as many as its characters."""
VOCABULARY_CHARS = 16 << 20
"""Of all tokens together."""


def most_of_field(key: str) -> int:
    """The limit of an integer field of config.json."""
    return _FIELDS.get(key, _OTHER_FIELD)


def check(what: str, value: int, most: int) -> int:
    """`value`. Raises ModelError if it is more than `most`."""
    if value > most:
        raise ModelError(
            f"{what} is {value}, but at most {most} is plausible; the file is damaged, download it "
            "again"
        )
    return value


def check_file(path: Path) -> None:
    """Raise ModelError if a file that is read as a whole is too large. OSError: there is none."""
    most = _FILE_BYTES.get(path.name, _OTHER_FILE_BYTES)
    if path.suffix == ".jinja":
        most = TEMPLATE_BYTES
    check(f"{path}: its size in bytes", path.stat().st_size, most)
