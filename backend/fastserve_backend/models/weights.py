"""Where weights come from, checkpoint files or a random generator, and how they reach a model.

A source names its tensors and reads of each what is asked for, so that a rank never has more than
its part of the model. They travel one at a time to the building block that owns them, which
converts and packs them at once: there is never a second full copy.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.load_config import WEIGHT_FILES
from fastserve_backend.checkpoints.weight_index import read_weight_index

DUMMY_STD = 0.02  # standard deviation of OPT's own initial weights

# Random values drawn for dummy weights: few enough to draw in a fraction of a second, and just over
# 2**24, the largest matrix of OPT-1.3B. A prime, so that rows of larger ones do not repeat.
_DUMMY_POOL = 16_777_259
_CPU = torch.device("cpu")

Shard = tuple[slice, ...]
"""A part of a tensor: a slice of each dimension, from the first on."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a source, not read yet.

    `dtype` is for messages. `read` gives a part of it as a CPU tensor, which may be memory-mapped,
    or, of random weights, as one of the model's device; nobody writes to it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_floating_point: bool
    read: Callable[[Shard], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StoredTensor:
        """A tensor that is in memory, or mapped, already."""
        floating = tensor.is_floating_point()
        return cls(name, tuple(tensor.shape), str(tensor.dtype), floating, tensor.__getitem__)


WeightSource = Iterable[StoredTensor]


@dataclass(frozen=True)
class Parameter:
    """One tensor that a model wants: its shape in the checkpoint, who takes it and which part.

    `load` may keep the tensor or its memory, so nobody writes to it afterwards. `shard` is the part
    of this rank, () the whole. `is_scale` marks the weights of normalisations, which are near 1,
    not 0.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor], object]
    shard: Shard = ()
    is_scale: bool = False


def load_parameters(
    parameters: Mapping[str, Parameter], source: WeightSource, elsewhere: Collection[str] = ()
) -> None:
    """Hand every parameter its part of its tensor. Tensors of the names in `elsewhere`, which other
    ranks want, are left, and so are unexpected biases of zeros.

    Raises ModelError for a tensor that is unexpected, there twice, not floating point or of a wrong
    shape, and for parameters that got none.
    """
    waiting = dict(parameters)
    for stored in source:
        parameter = waiting.pop(stored.name, None)
        if parameter is None:
            is_known = stored.name in parameters
            if not is_known and (stored.name in elsewhere or _adds_nothing(stored)):
                continue
            problem = "twice" if is_known else "unexpected"
            raise ModelError(
                f"checkpoint tensor {stored.name} is {problem}; does config.json match the weights?"
            )
        check_tensor(stored, parameter.shape)
        parameter.load(stored.read(parameter.shard))
    if waiting:
        raise ModelError(
            f"checkpoint lacks {some_of(waiting)}; does config.json match the weights, "
            "and are all weight files there?"
        )


def _adds_nothing(stored: StoredTensor) -> bool:
    """A bias of zeros, as some programs write them for layers that have none."""
    is_bias = stored.name.endswith(".bias") and len(stored.shape) == 1
    return is_bias and not bool(stored.read(()).any())


def some_of(names: Collection[str]) -> str:
    """Names for a message, which is not to be as long as the model is deep."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more


def check_tensor(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless the tensor is floating point and of `shape`."""
    if stored.shape != shape:
        raise ModelError(
            f"checkpoint tensor {stored.name} has shape {stored.shape}, but config.json asks for "
            f"{shape}"
        )
    if not stored.is_floating_point:
        raise ModelError(
            f"checkpoint tensor {stored.name} is {stored.dtype}; only floating-point weights are "
            "supported"
        )


def dummy_tensors(
    parameters: Mapping[str, Parameter],
    num_elements: int,
    dtype: torch.dtype,
    device: torch.device = _CPU,
) -> Iterator[StoredTensor]:
    """Random weights in `dtype`: normal with `DUMMY_STD`, around 1 for scales and 0 for the rest.

    The same for every process that asks for the same parameters, however the model is
    divided and whatever the device: `num_elements` are those of the whole model. Each tensor is a
    stretch, chosen by its name, of one pool of random values, because drawing billions of values
    would take minutes, and sending them to a GPU nearly as long: the pool is drawn on the CPU, but
    the tensors are made of it on `device`.
    """
    size = min(_DUMMY_POOL, num_elements)
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(size).normal_(0.0, DUMMY_STD, generator=generator).to(device, dtype)
    for name, parameter in parameters.items():
        read = partial(_read_dummy, pool, name, parameter)
        yield StoredTensor(name, parameter.shape, str(dtype), True, read)


def _read_dummy(pool: Tensor, name: str, parameter: Parameter, shard: Shard) -> Tensor:
    shape, count = parameter.shape, numel(parameter.shape)
    if count <= len(pool):
        start = zlib.crc32(name.encode()) % (len(pool) - count + 1)
        values = pool[start : start + count].view(shape)[shard]
        if pool.device.type != "cpu":
            # Memory of its own, as real weights have: all in the pool, they would fit in a cache.
            values = values.clone(memory_format=torch.contiguous_format)
        # On a CPU no copy: touching fresh memory is what would cost most.
    else:
        rows = range(shape[0])[shard[0]] if shard else range(shape[0])
        width = numel(shape[1:])
        stretch = _stretch(pool, rows.start * width % len(pool), len(rows) * width)
        within = (slice(None), *shard[1:])
        # Of a part of the columns, not the memory of all.
        values = stretch.view(len(rows), *shape[1:])[within].contiguous()
    return values + 1.0 if parameter.is_scale else values


def _stretch(pool: Tensor, start: int, count: int) -> Tensor:
    """`count` values of the pool from `start` on, which after its end begins anew."""
    values = torch.empty(count, dtype=pool.dtype, device=pool.device)
    done = 0
    while done < count:
        piece = pool[start : start + count - done]
        values[done : done + len(piece)] = piece
        done, start = done + len(piece), 0
    return values


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of that shape."""
    return torch.Size(shape).numel()


def checkpoint_tensors(directory: Path) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint, file by file; the first of `WEIGHT_FILES` that is there.

    Of a divided checkpoint each tensor is read from the file that the index names for it.

    Raises ModelError for missing, damaged or unsafe files.
    """
    found = next((directory / name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if found is None:
        raise ModelError(f"{directory} holds no weights (model.safetensors or pytorch_model.bin)")
    if found.suffix != ".json":
        yield from _file_tensors(found)
        return
    index = read_weight_index(found)
    files = {directory / name: index[name] for name in sorted(index)}
    for file in files:
        if not file.is_file():
            raise ModelError(f"weight file {file} is missing; download it again")
    for file, names in files.items():
        yield from (stored for stored in _file_tensors(file) if stored.name in names)


def _file_tensors(file: Path) -> Iterator[StoredTensor]:
    return _safetensors(file) if file.suffix == ".safetensors" else _torch_file(file)


def _safetensors(file: Path) -> Iterator[StoredTensor]:
    with _damage_of(file), safe_open(file, framework="pt", device="cpu") as tensors:
        described = []
        for name in tensors.keys():  # noqa: SIM118 - safe_open is no dict
            part = tensors.get_slice(name)
            described.append((name, tuple(part.get_shape()), part.get_dtype()))
    for name, shape, dtype in described:
        read = partial(_read_safetensors, file, name)
        yield StoredTensor(name, shape, dtype, dtype.startswith(("F", "BF")), read)


def _read_safetensors(file: Path, name: str, shard: Shard) -> Tensor:
    """Maps the file anew for each tensor: pages that were read count as memory of the process for
    as long as they are mapped, and would add up to the whole model."""
    with _damage_of(file), safe_open(file, framework="pt", device="cpu") as tensors:
        tensor: Tensor = tensors.get_slice(name)[shard] if shard else tensors.get_tensor(name)
        return tensor


@contextmanager
def _damage_of(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"weight file {file} is damaged or incomplete ({error}); download it again"
        ) from error


def _torch_file(file: Path) -> Iterator[StoredTensor]:
    tensors = _torch_load(file)
    if not isinstance(tensors, dict):
        raise ModelError(f"weight file {file} holds a {type(tensors).__name__}, not named tensors")
    while tensors:
        name, tensor = tensors.popitem()
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelError(f"weight file {file} holds {name!r}, which is no named tensor")
        yield StoredTensor.of(name, tensor)


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
    except Exception as error:  # torch's reader fails in as many ways as a pickle can be damaged
        raise ModelError(
            f"weight file {file} is damaged or incomplete ({error!r}); download it again"
        ) from error
