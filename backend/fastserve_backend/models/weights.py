"""Where weights come from, checkpoint files or a random generator, and how they reach a model.

Tensors travel one at a time from a source to the building block that owns them, which converts and
packs them at once: there is never a second full copy of the model.
"""

from __future__ import annotations

import json
import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import ModelError

NamedTensors = Iterable[tuple[str, Tensor]]

DUMMY_STD = 0.02  # standard deviation of OPT's own initial weights

# Random values drawn for dummy weights: few enough to draw in a fraction of a second, and just over
# 2**24, the largest matrix of OPT-1.3B. A prime, so that rows of larger ones do not repeat.
_DUMMY_POOL = 16_777_259


@dataclass(frozen=True)
class Parameter:
    """One tensor that a model wants: its shape in the checkpoint and who takes it.

    `load` may keep the tensor or its memory, so nobody writes to it afterwards. `is_scale` marks
    the weights of normalisations, which are near 1, not 0.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], None]
    is_scale: bool = False


def load_parameters(parameters: Mapping[str, Parameter], tensors: NamedTensors) -> None:
    """Hand every tensor to its parameter.

    Raises ModelError for a tensor that is unexpected, there twice, not floating point or of a wrong
    shape, and for parameters that got none.
    """
    waiting = dict(parameters)
    for name, tensor in tensors:
        parameter = waiting.pop(name, None)
        if parameter is None:
            problem = "twice" if name in parameters else "unexpected"
            raise ModelError(
                f"checkpoint tensor {name} is {problem}; does config.json match the weights?"
            )
        check_tensor(name, tensor, parameter.shape)
        parameter.load(tensor)
    if waiting:
        names = sorted(waiting)
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ModelError(
            f"checkpoint lacks {', '.join(names[:4])}{more}; does config.json match the weights, "
            "and are all weight files there?"
        )


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless `tensor` is floating point and of `shape`."""
    if tuple(tensor.shape) != shape:
        raise ModelError(
            f"checkpoint tensor {name} has shape {tuple(tensor.shape)}, but config.json asks for "
            f"{shape}"
        )
    if not tensor.is_floating_point():
        raise ModelError(
            f"checkpoint tensor {name} is {tensor.dtype}; only floating-point weights are supported"
        )


def dummy_tensors(
    parameters: Mapping[str, Parameter], seed: int, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Random weights in `dtype`: normal with `DUMMY_STD`, around 1 for scales and 0 for the rest.

    The same for every process that asks for the same parameters and seed. Each tensor is a stretch,
    chosen by its name, of one pool of random values, because drawing billions of values would take
    minutes.
    """
    size = min(_DUMMY_POOL, sum(_numel(parameter.shape) for parameter in parameters.values()))
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(size).normal_(0.0, DUMMY_STD, generator=generator).to(dtype)
    for name, parameter in parameters.items():
        count = _numel(parameter.shape)
        if count <= size:  # no copy: touching fresh memory is what would cost most
            start = zlib.crc32(name.encode()) % (size - count + 1)
            flat = pool[start : start + count]
        else:
            flat = pool.repeat(-(-count // size))[:count]
        yield name, (flat + 1.0 if parameter.is_scale else flat).view(parameter.shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def checkpoint_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and CPU tensors of a checkpoint, file by file; safetensors before `pytorch_model*.bin`.

    Tensors may be memory-mapped. Raises ModelError for missing, damaged or
    unsafe files.
    """
    if (directory / "model.safetensors").is_file():
        yield from _safetensors(directory / "model.safetensors")
    elif (index := directory / "model.safetensors.index.json").is_file():
        for file in _shards(index):
            yield from _safetensors(file)
    elif (directory / "pytorch_model.bin").is_file():
        yield from _torch_file(directory / "pytorch_model.bin")
    elif (index := directory / "pytorch_model.bin.index.json").is_file():
        for file in _shards(index):
            yield from _torch_file(file)
    else:
        raise ModelError(f"{directory} holds no weights (model.safetensors or pytorch_model.bin)")


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is no index of weight files: {error!r}") from error
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} names {name!r}, which is no file beside it")
        if not (index.parent / name).is_file():
            raise ModelError(f"weight file {index.parent / name} is missing; download it again")
        files.append(index.parent / name)
    return files


def _safetensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open is no dict
                yield name, tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"weight file {file} is damaged or incomplete ({error}); download it again"
        ) from error


def _torch_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    tensors = _torch_load(file)
    if not isinstance(tensors, dict):
        raise ModelError(f"weight file {file} holds a {type(tensors).__name__}, not named tensors")
    while tensors:
        name, tensor = tensors.popitem()
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(f"weight file {file} holds {name!r}, which is no named tensor")
        yield name, tensor


def _torch_load(file: Path) -> object:
    try:
        # Only the zip format, torch's own since 1.6, can be mapped.
        mapped = zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"weight file {file} is refused: it holds more than tensors, and loading it could run "
            "code; use a safetensors checkpoint"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ModelError(
            f"weight file {file} is damaged or incomplete ({error}); download it again"
        ) from error
