"""Converts GGUF files to safetensors. It needs torch, so the server runs it as `gguf_process`.

The `gguf` library reads and dequantises tensor by tensor, so the model is never in memory as a
whole. transformers can load GGUF files too, but only whole, and it ignores the rotary scaling of
LLaMA models, which changes their answers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_tokenizer import save_tokenizer
from fastserve_backend.models.gguf_config import hf_config
from fastserve_backend.models.gguf_families import Family, family_of
from fastserve_backend.models.gguf_file import GGUFFile
from fastserve_backend.models.gguf_tensors import Sizes, TensorRule, sizes, weight

# Weights are gathered up to so many bytes before they are written to a file.
_SHARD_BYTES = 2 * 2**30


def convert(path: Path, directory: Path) -> None:
    """Write the model of a GGUF file to `directory`, which must not exist.

    Raises:
        ModelError: the file is damaged, its model cannot be served, or the disk is too full.
    """
    console = Console(stderr=True, highlight=False)
    console.print(f"converting {path.name}, once: reading", soft_wrap=True, markup=False)
    file = GGUFFile(path)
    family = family_of(file)
    config = hf_config(file, family)
    rules = _rules(family, config)
    model_sizes = sizes(config)
    _check_tensors(file, family, rules, model_sizes)
    needed = 2 * sum(prod(shape) for shape in file.shapes.values())
    free = shutil.disk_usage(directory.parent).free
    if free < needed:
        raise ModelError(
            f"converting it takes {needed / 2**30:.1f} GiB in {directory.parent.parent}, where "
            f"{free / 2**30:.1f} are free; free some, or set XDG_CACHE_HOME to a larger disk"
        )
    directory.mkdir()
    _write_json(directory / "config.json", config)
    save_tokenizer(file, directory)
    _save_tensors(file, rules, model_sizes, directory)


def _rules(family: Family, config: dict[str, Any]) -> list[TensorRule]:
    """The rules of all tensors of a model, with their full names."""
    rules = [
        weight("token_embd", "model.embed_tokens", "vocab", "hidden"),
        *family.norm,
        *(
            replace(
                rule,
                target=f"model.layers.{layer}.{rule.target}",
                sources=tuple(f"blk.{layer}.{source}" for source in rule.sources),
            )
            for layer in range(config["num_hidden_layers"])
            for rule in family.layer
        ),
    ]
    if not config["tie_word_embeddings"]:
        rules.append(weight("output", "lm_head", "vocab", "hidden"))
    return [rule for rule in rules if rule.condition is None or config[rule.condition]]


def _check_tensors(
    file: GGUFFile, family: Family, rules: list[TensorRule], model_sizes: Sizes
) -> None:
    """Raise ModelError unless the file has all tensors of the model, and no others, in the right
    shapes."""
    missing = {
        source: tuple(model_sizes[size] for size in rule.shape)
        for rule in rules
        for source in rule.sources
    }
    for name, shape in file.shapes.items():
        if name in family.tensors_of_config:
            continue
        wanted = missing.pop(name, None)
        if wanted is None:
            raise ModelError(
                f"tensor {name!r} belongs to no {family.class_name} that is known here; use the "
                "model's Hugging Face checkpoint"
            )
        if shape != wanted:
            raise ModelError(
                f"tensor {name!r} has shape {shape}, but its metadata asks for {wanted}"
            )
    if missing:
        first, *others = missing
        more = f" and {len(others)} more" if others else ""
        raise ModelError(
            f"it lacks tensor {first!r}{more}, which its metadata and its other tensors ask "
            "for; use the model's Hugging Face checkpoint"
        )


def _converted(
    file: GGUFFile, rule: TensorRule, model_sizes: Sizes
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a rule, in bfloat16, with their names."""
    sources = [
        (file.tensor(source) - rule.offset if rule.offset else file.tensor(source)).to(
            torch.bfloat16
        )
        for source in rule.sources
    ]
    tensor = rule.change(*sources, model_sizes)
    if "{expert}" in rule.target:
        for expert, one in enumerate(tensor):
            yield rule.target.format(expert=expert), one.clone()
    else:
        yield rule.target, tensor.contiguous()


def _save_tensors(
    file: GGUFFile, rules: list[TensorRule], model_sizes: Sizes, directory: Path
) -> None:
    """Write model-00001.safetensors and so on, and their index."""
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    num_files = total_bytes = 0

    def write() -> None:
        nonlocal num_files, total_bytes
        num_files += 1
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        name = f"model-{num_files:05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    with Progress(console=Console(stderr=True)) as progress:
        for rule in progress.track(rules, description="dequantising to bfloat16"):
            shard.update(_converted(file, rule, model_sizes))
            if sum(tensor.nbytes for tensor in shard.values()) >= _SHARD_BYTES:
                write()
    if shard:
        write()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
