"""What a model looks like, read from Hugging Face's config.json without importing torch.

The JSON is read plainly: `transformers.AutoConfig` takes seconds to import and imports torch, which
the engine process must never do.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict, Unpack

from fastserve_backend.models.embedded import EMBEDDED_MODEL, embedded_file
from fastserve_backend.models.errors import ModelError
from fastserve_backend.models.gguf import converted
from fastserve_backend.models.hub import download, is_hub_id
from fastserve_backend.models.registry import ARCHITECTURES

_log = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]
DType = Literal["float32", "bfloat16", "float16"]

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})

# What the attention kernels' vector loads and registers allow.
_HEAD_DIM_STEP, _HEAD_DIM_MAX = 8, 256

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Where weights are looked for, in this order; an index names the files of a divided checkpoint."""


class CommonFields(TypedDict):
    """The fields of a `ModelConfig` that do not come from its config.json."""

    name: str
    directory: str | None
    load_format: LoadFormat
    dtype: DType


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and number format of one model; each architecture adds its own fields in a subclass.

    `name` is what the user asked for; `directory` is the local directory with its files, None for a
    built-in configuration. Sizes count elements, `max_model_len` counts tokens (prompt plus
    output).
    """

    name: str
    directory: str | None
    load_format: LoadFormat
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    dtype: DType
    eos_token_ids: tuple[int, ...]

    # Built-in configurations: name -> the fields of a config.json.
    builtin: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    @classmethod
    def from_hf(cls, raw: HFConfig, **common: Unpack[CommonFields]) -> ModelConfig:
        """Build from the fields of a config.json, with all positions that the model has.

        Raises ModelError where a field is wrong.
        """
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, a tied LM head counted once."""
        raise NotImplementedError

    @property
    def num_layer_parameters(self) -> int:
        """Elements of one layer's weights; all layers have as many."""
        raise NotImplementedError

    @property
    def num_head_parameters(self) -> int:
        """Elements of the LM head's matrix, its own or that of the embedding it is tied to."""
        return self.vocab_size * self.hidden_size

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one KV block of `block_size` tokens: keys and values of every layer."""
        elements = 2 * self.num_layers * self.num_kv_heads * self.head_dim * block_size
        return elements * DTYPE_BYTES[self.dtype]

    def host_kv_bytes_per_block(self, block_size: int, host_dtype: Literal["same", "int8"]) -> int:
        """The same on the host; int8 has a scale and an offset, 4 bytes, for each channel."""
        if host_dtype == "same":
            return self.kv_bytes_per_block(block_size)
        channels = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return channels * (block_size + 4)


class HFConfig:
    """Typed reading of a config.json. Every getter raises ModelError naming file, field, value."""

    def __init__(self, raw: Mapping[str, Any], source: str) -> None:
        self.source = source
        self._raw = raw

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def error(self, key: str, allowed: str) -> ModelError:
        """The error to raise for field `key`, whose value is not `allowed`."""
        return ModelError(f"{self.source}: {key} is {self._raw.get(key)!r}, expected {allowed}")

    def integer(self, key: str, default: int) -> int:
        value = self._raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, "an integer of at least 1")
        return value

    def number(self, key: str, default: float | None) -> float:
        """A finite number above 0, or ``default``; None: it must be there."""
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < float("inf")
        ):
            raise self.error(key, "a number above 0")
        return float(value)

    def mapping(self, *keys: str) -> HFConfig:
        """The fields of the object that has one of these names; none where no such is there.

        An empty object is none. Raises ModelError where two are there that are not equal.
        """
        chosen = HFConfig({}, self.source)
        for key in keys:
            value = self._raw.get(key)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise self.error(key, "an object")
            if chosen._raw and value and chosen._raw != value:
                raise self.error(key, f"the same as in {chosen.source}, or one of them alone")
            if value:
                chosen = HFConfig(value, f"{self.source}, {key}")
        return chosen

    def boolean(self, key: str, default: bool) -> bool:
        value = self._raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, default: str | None, allowed: tuple[str, ...]) -> str:
        value = self._raw.get(key)
        if value is None and default is not None:
            return default
        if value not in allowed:
            raise self.error(key, f"one of {', '.join(allowed)}")
        return str(value)

    def token_ids(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """One id or a list of ids; an explicit null means none."""
        if key not in self._raw:
            return default
        value = self._raw[key]
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.error(key, "a token id, a list of them or null")
        return tuple(values)


def checked_head_dim(raw: HFConfig, head_dim: int) -> int:
    """`head_dim`, the elements of a head, if the attention kernels take it; else ModelError."""
    if head_dim % _HEAD_DIM_STEP or head_dim > _HEAD_DIM_MAX:
        raise ModelError(
            f"{raw.source}: hidden_size / heads is {head_dim}, but the attention kernels "
            f"need a multiple of {_HEAD_DIM_STEP} up to {_HEAD_DIM_MAX}"
        )
    return head_dim


def builtin_names() -> tuple[str, ...]:
    """Names of the configurations that need no files (random weights only)."""
    return tuple(_builtins())


def load_model_config(
    model: str,
    *,
    load_format: LoadFormat,
    device: str = "cpu",
    dtype: str = "auto",
    max_model_len: int | None = None,
) -> ModelConfig:
    """Describe `model`: a local directory in Hugging Face format, a GGUF file, a hub id, the
    embedded model or a built-in name.

    A hub id is downloaded here, weights included unless `load_format` is "dummy", and a GGUF file
    converted, so that every rank finds the files in the cache. `device` is "cpu" or "cuda". `dtype`
    "auto" takes the checkpoint's, except that float16 becomes bfloat16 on a CPU, which computes
    float16 slowly. `max_model_len` in tokens, None for all that the model has positions for.

    Raises ModelError naming what is wrong and the remedy.
    """
    if load_format not in ("auto", "dummy"):
        raise ModelError(f"load_format is {load_format!r}, expected auto or dummy")
    if device not in ("cpu", "cuda"):
        raise ModelError(f"device is {device!r}, expected cpu or cuda")
    if dtype != "auto" and dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype is {dtype!r}, expected one of auto, {', '.join(DTYPE_BYTES)}")
    try:
        raw, directory = _read(model, load_format)
    except OSError as error:  # such as a directory on the way that may not be searched
        raise ModelError(f"model {model!r} cannot be read: {error.strerror}") from None
    model_type = raw.choice("model_type", None, tuple(ARCHITECTURES))
    if "quantization_config" in raw:
        raise ModelError(
            f"{raw.source}: quantization_config is set, but quantized checkpoints are not "
            "supported; use the model's unquantized checkpoint"
        )
    config_class: type[ModelConfig] = ARCHITECTURES[model_type].config_class()
    config = config_class.from_hf(
        raw,
        name=model,
        directory=directory,
        load_format=load_format,
        dtype=_resolve_dtype(raw, dtype, device),
    )
    positions = _limit_model_len(max_model_len, config.max_model_len)
    config = replace(config, max_model_len=positions)
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


def _limit_model_len(requested: int | None, positions: int) -> int:
    """`requested` tokens, None for all `positions`; ModelError if the model has not as many."""
    if requested is None:
        return positions
    if isinstance(requested, bool) or not isinstance(requested, int) or requested < 1:
        raise ModelError(f"max_model_len is {requested!r}, expected an integer of at least 1")
    if requested > positions:
        raise ModelError(
            f"max_model_len is {requested}, but the model has {positions} positions; "
            f"set max_model_len to at most {positions}"
        )
    return requested


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
    raw = _read_json(directory / "config.json", model)
    generation = directory / "generation_config.json"
    if generation.is_file():
        # Where both name end tokens, generation_config.json is the one that generation follows.
        defaults = _read_json(generation, model)
        if defaults.get("eos_token_id") is not None:
            raw["eos_token_id"] = defaults["eos_token_id"]
    if load_format == "auto" and not any((directory / f).is_file() for f in WEIGHT_FILES):
        raise ModelError(
            f"model {model!r}: {directory} holds no weights ({', '.join(WEIGHT_FILES)}); "
            "download them, or use load_format dummy for random weights"
        )
    return HFConfig(raw, str(directory / "config.json")), str(directory)


def _builtins() -> dict[str, Mapping[str, Any]]:
    return {
        name: fields
        for arch in ARCHITECTURES.values()
        for name, fields in arch.config_class().builtin.items()
    }


def _directory(model: str, load_format: LoadFormat) -> Path:
    """The local directory in Hugging Face format that holds the model, made where it is not."""
    path = Path(model).expanduser()
    if model and path.is_dir():  # an empty path would be the working directory
        return path
    if model == EMBEDDED_MODEL:
        return converted(embedded_file())
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model {model!r}: there is no such file")
        return converted(path)
    if is_hub_id(model):
        return download(model, weights=load_format == "auto")
    raise ModelError(
        f"model {model!r} is no directory, no GGUF file, no Hugging Face id (owner/name or "
        f"owner/name@revision) and no built-in name; built-in names are {EMBEDDED_MODEL} and, "
        f"with load_format dummy, {', '.join(builtin_names())}"
    )


def _read_json(path: Path, model: str) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"model {model!r}: {path} does not exist; a model directory in Hugging Face format "
            "needs it"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model!r}: {path} cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"model {model!r}: {path} holds no JSON object")
    return raw


def _resolve_dtype(raw: HFConfig, dtype: str, device: str) -> DType:
    if dtype == "auto":
        # transformers renamed `torch_dtype` to `dtype` in version 5; checkpoints carry either.
        key = "dtype" if "dtype" in raw else "torch_dtype"
        dtype = raw.choice(key, "float32", tuple(DTYPE_BYTES))
        if dtype == "float16" and device == "cpu":
            dtype = "bfloat16"
    return dtype  # type: ignore[return-value]  # checked against DTYPE_BYTES above
