"""Small random OPT checkpoints in every file format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decoder_checkpoints import POSITIONS
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "projected_pre_norm": {"word_embed_proj_dim": 48},
    "untied": {"tie_word_embeddings": False},
    "no_bias": {"enable_bias": False},
    "gelu": {"activation_function": "gelu"},
    "plain_norm": {"layer_norm_elementwise_affine": False},
    "no_final_norm": {"_remove_final_layer_norm": True},
}


def random_opt(**changes: Any) -> OPTForCausalLM:
    """A transformers OPT whose weights, biases and norms are all random."""
    fields: dict[str, Any] = {
        "vocab_size": 301,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "ffn_dim": 80,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": 32,
    }
    torch.manual_seed(7)
    model = OPTForCausalLM(OPTConfig(**{**fields, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
    return model


def save_safetensors(model: OPTForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)


def save_sharded_safetensors(model: OPTForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size="30KB")
    assert (directory / "model.safetensors.index.json").is_file()


def save_bin(model: OPTForCausalLM, directory: Path) -> None:
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def save_legacy_bin(model: OPTForCausalLM, directory: Path) -> None:
    """Saves as torch did before 1.6, in a format that cannot be memory-mapped."""
    model.config.save_pretrained(directory)
    torch.save(
        model.state_dict(), directory / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )


def save_sharded_bin(model: OPTForCausalLM, directory: Path) -> None:
    model.config.save_pretrained(directory)
    weight_map: dict[str, str] = {}
    state = model.state_dict()
    for shard in range(3):
        file = f"pytorch_model-{shard + 1:05d}-of-00003.bin"
        names = sorted(state)[shard::3]
        torch.save({name: state[name].clone() for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Changes the tensors of a saved model.safetensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def save_tied_with_head(directory: Path, *, only_head: bool) -> OPTForCausalLM:
    """Saves a model that its config.json ties, with a head of its own: alone with the table's
    values, or beside the table with others. Returns the model as transformers reads it."""
    random_opt().save_pretrained(directory)

    def change(tensors: dict[str, Tensor]) -> None:
        embedding = "model.decoder.embed_tokens.weight"
        tensors["lm_head.weight"] = tensors[embedding] + (0.0 if only_head else 0.1)
        if only_head:
            del tensors[embedding]

    rewrite(directory, change)
    return OPTForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def save_bare_decoder(model: OPTForCausalLM, directory: Path) -> None:
    """Saves names that begin with "decoder.", as in early OPT checkpoints."""
    model.model.save_pretrained(directory)


FORMATS = {
    "safetensors": save_safetensors,
    "sharded_safetensors": save_sharded_safetensors,
    "bin": save_bin,
    "legacy_bin": save_legacy_bin,
    "sharded_bin": save_sharded_bin,
    "bare_decoder": save_bare_decoder,
}
