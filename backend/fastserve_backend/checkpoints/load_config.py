"""Finds a model, fetches its files if needed, and reads its configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fastserve_backend.checkpoints.architectures import ARCHITECTURES, REFUSED, TEXT_OF
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL, embedded_file
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf import converted_gguf
from fastserve_backend.checkpoints.gguf_index import is_conversion, read_index
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.hub import download, is_hub_id
from fastserve_backend.checkpoints.limits import PARAMETERS, check, check_file
from fastserve_backend.checkpoints.model_config import (
    DTYPE_BYTES,
    DType,
    KVDType,
    LoadFormat,
    ModelConfig,
    Quantization,
)
from fastserve_backend.checkpoints.quantization_config import (
    MXFP4_MORE_BYTES,
    is_mxfp4,
    read_quantization,
)
from fastserve_backend.checkpoints.weight_index import read_weight_index

_log = logging.getLogger(__name__)

_EOS = "eos_token_id"
_TIED = "tie_word_embeddings"
# Fields of a model that also reads images, which count for its text model.
_OF_TEXT = (_EOS, _TIED, "dtype", "torch_dtype", "quantization_config", "compression_config")

GENERATION_FILE = "generation_config.json"

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""The first of these files that exists has the weights, or is the index of several files."""


def builtin_names() -> tuple[str, ...]:
    """Names of the configurations that need no files. They have only random weights."""
    return tuple(_builtins())


def load_model_config(
    model: str,
    *,
    load_format: LoadFormat,
    device: str = "cpu",
    dtype: DType | Literal["auto"] = "auto",
    quantization: Quantization | None = None,
    kv_dtype: KVDType = "same",
    max_model_len: int | None = None,
) -> ModelConfig:
    """Describe `model`: a local directory in Hugging Face format, a GGUF file, a hub id, the
    embedded model or a built-in name.

    This downloads a hub id (with its weights unless `load_format` is "dummy"), and converts the
    metadata of a GGUF file, so that every rank finds the files in the cache.

    Args:
        device: "cpu" or "cuda".
        dtype: "auto" is the checkpoint's, but bfloat16 instead of float16 on a CPU, which computes
            float16 slowly.
        max_model_len: in tokens; None: all positions that the model has.

    Raises:
        ModelError: it names what is wrong and the remedy.
    """
    try:
        raw, directory = _read(model, load_format)
    except OSError as error:  # such as a directory on the way that may not be searched
        raise ModelError(f"model {model!r} cannot be read: {error.strerror}") from None
    # Those of `TEXT_OF` are replaced by their text model's; they are listed for the message.
    for refused, reason in REFUSED.items():
        if raw.states("model_type", [refused]):
            raise raw.error("model_type", f"another: such models are not supported, since {reason}")
    model_type = raw.choice("model_type", None, tuple(sorted((*ARCHITECTURES, *TEXT_OF))))
    if model_type in TEXT_OF:
        raise raw.error("text_config", "an object with the fields of the text model")
    architecture = ARCHITECTURES[model_type]
    stored = read_quantization(raw, model_type)
    config = architecture.read(
        raw,
        name=model,
        directory=directory,
        load_format=load_format,
        dtype=_resolve_dtype(raw, dtype, device),
        quantization=None if quantization == "as_stored" else quantization,
        kv_dtype=kv_dtype,
    )
    check(f"{raw.source}: the number of parameters", config.num_parameters, PARAMETERS)
    config = replace(config, stored_quantization=stored)
    if config.quantization is None and load_format == "auto":
        config = _as_stored(config, has_mxfp4=is_mxfp4(raw, model_type))
    # If no file has the field, the ids are the architecture's default.
    if config.eos_token_ids != raw.token_ids(_EOS, ()):
        config = replace(config, eos_is_default=True)
    positions = config.max_model_len
    if max_model_len is not None:
        if max_model_len > positions:
            raise ModelError(
                f"max_model_len is {max_model_len}, but the model has {positions} positions; "
                f"set max_model_len to at most {positions}"
            )
        config = replace(config, max_model_len=max_model_len)
    beyond = [one for one in config.eos_token_ids if one >= config.vocab_size]
    if beyond:
        _log.warning(
            "%s: end tokens %s are not in the vocabulary of %d; ignored",
            raw.source,
            ", ".join(map(str, beyond)),
            config.vocab_size,
        )
        ids = tuple(one for one in config.eos_token_ids if one not in beyond)
        config = replace(config, eos_token_ids=ids)
    return config


def _as_stored(config: ModelConfig, *, has_mxfp4: bool) -> ModelConfig:
    """The same, with weights that stay in few bits if they are stored so.

    has_mxfp4: whether experts are in MXFP4.
    """
    if config.directory is None:
        return config
    directory = Path(config.directory)
    if is_conversion(directory):
        index = read_index(directory)
        if not index.is_quantized:
            return config
        num_bytes = index.memory_bytes(config.dtype)
    elif config.stored_quantization is not None:
        num_bytes = _weight_file_bytes(directory)
        if config.stored_quantization.orders_columns:
            experts = config.num_expert_parameters  # these are dequantized
            num_bytes = round(num_bytes * (1 - experts / config.num_parameters))
            num_bytes += experts * DTYPE_BYTES[config.dtype]
    elif has_mxfp4:
        num_bytes = _weight_file_bytes(directory)
        num_bytes += round(config.num_expert_parameters * MXFP4_MORE_BYTES)
    else:
        return config
    return replace(config, quantization="as_stored", stored_weight_bytes=num_bytes)


def _weight_file_bytes(directory: Path) -> int:
    """The size of a checkpoint. Files that are missing, which is an error later, count nothing."""
    first = next(directory / name for name in WEIGHT_FILES if (directory / name).is_file())
    files = [first]
    if first.suffix == ".json":
        files = [directory / name for name in read_weight_index(first)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _read(model: str, load_format: LoadFormat) -> tuple[HFConfig, str | None]:
    builtin = _builtins().get(model)
    if builtin is not None and not Path(model).is_dir():
        if load_format != "dummy":
            raise ModelError(
                f"model {model!r} is a built-in configuration without weights: use load_format "
                "dummy for random weights, or give a local directory or a Hugging Face id"
            )
        return HFConfig(builtin, f"built-in {model}"), None
    directory = _directory(model, load_format)
    raw = read_json(directory / "config.json", model)
    _add_end_tokens(raw, directory, model)
    has_weights = any((directory / name).is_file() for name in WEIGHT_FILES)
    if load_format == "auto" and not has_weights and not is_conversion(directory):
        raise ModelError(
            f"model {model!r}: {directory} holds no weights ({', '.join(WEIGHT_FILES)}); "
            "download them, or use load_format dummy for random weights"
        )
    return HFConfig(_text_model(raw, model), str(directory / "config.json")), str(directory)


def _text_model(raw: dict[str, Any], model: str) -> dict[str, Any]:
    """The fields of the text model, if the model also reads images."""
    defaults = TEXT_OF.get(str(raw.get("model_type")))
    if defaults is None:
        return raw
    text = raw.get("text_config")
    if text is None and defaults.is_flat:
        text = {name: value for name, value in raw.items() if name != "model_type"}
    if not isinstance(text, dict):
        return raw
    _log.warning("model %r also reads images: only its text model is served", model)
    whole = {name: raw[name] for name in _OF_TEXT if name in raw}
    own = {"model_type": defaults.model_type, _TIED: defaults.is_tied}
    return {**own, **text, **whole}


def _add_end_tokens(raw: dict[str, Any], directory: Path, model: str) -> None:
    """Add the end tokens of generation_config.json to those of config.json. Authors correct one of
    the files and not the other, and an end token too many costs nothing."""
    generation = directory / GENERATION_FILE
    if not generation.is_file():
        return
    named = HFConfig(read_json(generation, model), str(generation)).token_ids(_EOS, ())
    if named:
        own = HFConfig(raw, str(directory / "config.json")).token_ids(_EOS, ())
        raw[_EOS] = list(dict.fromkeys([*own, *named]))


def _builtins() -> dict[str, Mapping[str, Any]]:
    return {
        name: fields for arch in ARCHITECTURES.values() for name, fields in arch.builtin.items()
    }


def _directory(model: str, load_format: LoadFormat) -> Path:
    """The local directory with the model in Hugging Face format, created if needed."""
    path = Path(model).expanduser()
    if model and path.is_dir():  # an empty path would be the working directory
        return path
    if model == EMBEDDED_MODEL:
        return converted_gguf(embedded_file())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {model!r}: there is no such file")
        return converted_gguf(path)
    if is_hub_id(model):
        return download(model, weights=load_format == "auto")
    if path.is_file():
        raise ModelError(
            f"model {model!r} is a file whose name does not end in .gguf; give a GGUF file, or a "
            "directory in Hugging Face format"
        )
    if model.startswith((".", "/", "~")):
        raise ModelError(f"model {model!r}: there is no such directory or file")
    raise ModelError(
        f"model {model!r} is no directory, no GGUF file, no Hugging Face id (owner/name or "
        f"owner/name@revision) and no built-in name; built-in names are {EMBEDDED_MODEL} and, "
        f"with load_format dummy, {', '.join(builtin_names())}"
    )


def read_json(path: Path, model: str) -> dict[str, Any]:
    """The JSON object in a file of `model`. Raises ModelError."""
    try:
        check_file(path)
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"model {model!r}: {path} does not exist; a model directory in Hugging Face format "
            "needs it"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"model {model!r}: {path} cannot be read as JSON ({error}); download it again"
        ) from error
    if not isinstance(raw, dict):
        raise ModelError(f"model {model!r}: {path} holds no JSON object")
    return raw


def _resolve_dtype(raw: HFConfig, dtype: DType | Literal["auto"], device: str) -> DType:
    if dtype != "auto":
        return dtype
    # transformers renamed `torch_dtype` to `dtype` in version 5; checkpoints carry either.
    key = "dtype" if "dtype" in raw else "torch_dtype"
    stored = raw.choice(key, "float32", tuple(DTYPE_BYTES))
    return "bfloat16" if stored == "float16" and device == "cpu" else stored
