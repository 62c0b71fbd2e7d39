"""Converts what a GGUF file says about its model to Hugging Face's format. Weights stay there.

transformers can load GGUF files too, but only whole, and it ignores the rotary scaling of LLaMA
models, which changes their answers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_config import hf_config
from fastserve_backend.checkpoints.gguf_families import Family, family_of
from fastserve_backend.checkpoints.gguf_file import GGUFFile
from fastserve_backend.checkpoints.gguf_index import (
    KEPT_TYPES,
    PLAIN_TYPES,
    FileState,
    GGUFIndex,
    MappedTensor,
)
from fastserve_backend.checkpoints.gguf_tensors import Sizes, TensorRule, sizes, weight
from fastserve_backend.checkpoints.gguf_tokenizer import save_tokenizer


def convert(path: Path, directory: Path) -> None:
    """Write config.json, the tokenizer's files, the chat template and the index of a GGUF file's
    tensors to `directory`, which must not exist.

    Raises:
        ModelError: the file is damaged, or its model cannot be served.
        OSError: it cannot be read, or `directory` cannot be written.
    """
    try:
        _convert(path, directory)
    except (ModelError, OSError, KeyboardInterrupt, SystemExit):
        raise
    # Fields of wrong types can show as any kind of error, and a panic in `tokenizers` is none.
    except BaseException as error:
        raise ModelError(
            f"its metadata is damaged or incomplete ({error!r}); download it again"
        ) from error


def _convert(path: Path, directory: Path) -> None:
    file = GGUFFile(path)
    states = tuple(map(FileState.of, file.paths))
    family = family_of(file)
    config = hf_config(file, family)
    rules = _rules(family, config)
    model_sizes = sizes(config)
    _check_tensors(file, family, rules, model_sizes)
    directory.mkdir(mode=0o700)
    text = json.dumps(config, indent=1)
    (directory / "config.json").write_text(f"{text}\n", encoding="utf-8")
    save_tokenizer(file, directory)
    mapped = tuple(_mapped(file, rule, model_sizes) for rule in rules)
    GGUFIndex(states, mapped).write(directory, path)


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
    shapes and in types that are known."""
    missing = {
        source: tuple(model_sizes[size] for size in rule.shape)
        for rule in rules
        for source in rule.sources
    }
    known = {*PLAIN_TYPES, *KEPT_TYPES}
    for name, tensor in file.tensors.items():
        if name in family.tensors_of_config:
            continue
        wanted = missing.pop(name, None)
        if wanted is None:
            raise ModelError(
                f"tensor {name!r} belongs to no {family.class_name} that is known here; use the "
                "model's Hugging Face checkpoint"
            )
        if tensor.shape != wanted:
            raise ModelError(
                f"tensor {name!r} has shape {tensor.shape}, but its metadata asks for {wanted}"
            )
        if tensor.kind not in known:
            _check_dequantizes(name, tensor.kind)
            known.add(tensor.kind)
    if missing:
        first, *others = missing
        more = f" and {len(others)} more" if others else ""
        raise ModelError(
            f"it lacks tensor {first!r}{more}, which its metadata and its other tensors ask "
            "for; use the model's Hugging Face checkpoint"
        )


def _check_dequantizes(name: str, kind: str) -> None:
    """Raise ModelError unless the `gguf` library can dequantize the type."""
    known = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[known]
    try:
        gguf.dequantize(np.zeros(size, np.uint8), known)
    except (NotImplementedError, ValueError) as error:
        raise ModelError(f"tensor {name!r} ({kind}) cannot be read: {error}") from error


def _mapped(file: GGUFFile, rule: TensorRule, model_sizes: Sizes) -> MappedTensor:
    return MappedTensor(
        rule.target,
        tuple(file.tensors[source] for source in rule.sources),
        None if rule.heads is None else model_sizes[rule.heads],
        rule.offset,
        rule.transposed,
    )
