"""A model with a generation_config.json, and with a chat template that refuses system messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from byte_tokenizer import save_byte_tokenizer
from tiny_model import TINY_OPT

GENERATION_FILE = "generation_config.json"
DEFAULTS = {"do_sample": False, "top_k": 1, "temperature": 2.5}
"""Tokens are the most likely ones; with another top_k, many are unlikely ones."""
REFUSAL = "the model's chat template refuses: System role not supported"

_VOCAB_SIZE = 260  # that of the tokenizer: each token has a text
_TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{{ messages[-1].content }}"
)


def save_opinionated_model(directory: Path, defaults: dict[str, Any]) -> Path:
    """Saves the files of the model, which has random weights; returns ``directory``."""
    save_byte_tokenizer(directory)
    for name, fields in (
        ("config.json", {**TINY_OPT, "vocab_size": _VOCAB_SIZE}),
        ("tokenizer_config.json", {"chat_template": _TEMPLATE}),
        (GENERATION_FILE, defaults),
    ):
        (directory / name).write_text(json.dumps(fields), encoding="utf-8")
    return directory
