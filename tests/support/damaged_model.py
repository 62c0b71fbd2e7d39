"""A checkpoint that loads, but makes the model compute NaN."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_model import TINY_OPT
from transformers import OPTConfig, OPTForCausalLM


def save_damaged_opt(directory: Path) -> None:
    model = OPTForCausalLM(OPTConfig(**TINY_OPT))
    torch.nn.init.constant_(model.model.decoder.final_layer_norm.weight, float("nan"))
    model.save_pretrained(directory)
