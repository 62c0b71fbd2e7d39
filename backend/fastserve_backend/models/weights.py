"""Brings weights from checkpoint files, or a random generator, to a model.

A source names its tensors and reads only the part of each that is asked for. So a rank never holds
more than its part of the model. Each tensor goes to the building block that owns it, which converts
and packs it at once. So there is never a second full copy.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastserve_kernels.quantized_weight import QuantizedWeight
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.limits import SAFETENSORS_HEADER_BYTES, check
from fastserve_backend.checkpoints.load_config import WEIGHT_FILES
from fastserve_backend.checkpoints.weight_index import read_weight_index

DUMMY_STD = 0.02  # the standard deviation of OPT's initial weights

# How many random values are drawn for dummy weights: few enough for a fraction of a second, and
# just over 2**24, the largest matrix of OPT-1.3B. A prime, so that larger ones do not repeat rows.
_DUMMY_POOL = 16_777_259
_CPU = torch.device("cpu")
_HEADER_SIZE_BYTES = 8  # at the beginning of a safetensors file

Shard = tuple[slice, ...]
"""A part of a tensor: slices of its first dimensions; () is the whole."""

StoredWeight = Tensor | QuantizedWeight
"""What a source reads: a tensor, or a matrix in few bits."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a source that has not been read yet.

    dtype: its name, for messages.
    read: returns a part of the tensor, which nobody may write to. It is on the CPU, perhaps
        memory-mapped; random weights are on the model's device.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_floating_point: bool
    read: Callable[[Shard], StoredWeight]

    def read_dequantized(self, shard: Shard) -> Tensor:
        """As `read`, in float32 if the weight is quantized."""
        weight = self.read(shard)
        return weight if isinstance(weight, Tensor) else weight.dequantized(torch.float32)

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> StoredTensor:
        """A tensor that is already in memory, or mapped."""
        floating = tensor.is_floating_point()
        return cls(name, tuple(tensor.shape), str(tensor.dtype), floating, tensor.__getitem__)


WeightSource = Iterable[StoredTensor]


@dataclass(frozen=True)
class Parameter:
    """One tensor that a model needs.

    shape: that of the whole tensor in the checkpoint.
    load: takes this rank's part. It may keep the memory, so nobody may write to it afterwards.
    shard: this rank's part; () is the whole.
    is_scale: whether it is the weight of a normalisation, whose values are near 1 and not 0.
    takes_quantized: whether `load` also takes a `QuantizedWeight`; others get it in float32.
    """

    shape: tuple[int, ...]
    load: Callable[[Any], object]
    shard: Shard = ()
    is_scale: bool = False
    takes_quantized: bool = False


def reordered(weight: StoredWeight, rows: Tensor) -> StoredWeight:
    """The weight with its rows in another order. rows: int64, the row that becomes each."""
    return weight[rows] if isinstance(weight, Tensor) else weight.part(rows)


def split_rows(stored: StoredTensor, parts: Mapping[str, int]) -> Iterator[StoredTensor]:
    """Divide a tensor into parts, name -> rows, which are read one by one.

    Raises:
        ModelError: the tensor has another number of rows.
    """
    check_tensor(stored, (sum(parts.values()), *stored.shape[1:]))
    start = 0
    for name, count in parts.items():
        read = partial(_read_rows, stored, range(start, start + count))
        yield replace(stored, name=name, shape=(count, *stored.shape[1:]), read=read)
        start += count


def _read_rows(stored: StoredTensor, rows: range, shard: Shard) -> StoredWeight:
    """The part ``shard`` of these rows."""
    own = rows[shard[0]] if shard else rows
    return stored.read((slice(own.start, own.stop), *shard[1:]))


def load_parameters(
    parameters: Mapping[str, Parameter], source: WeightSource, elsewhere: Collection[str] = ()
) -> None:
    """Give every parameter its part of its tensor.

    Tensors named in `elsewhere`, which other ranks need, are skipped, and so are unexpected biases
    that are all zero.

    Raises:
        ModelError: a tensor is missing, unexpected, there twice, not floating point, or of a wrong
            shape.
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
        read = stored.read if parameter.takes_quantized else stored.read_dequantized
        parameter.load(read(parameter.shard))
    if waiting:
        raise ModelError(
            f"checkpoint lacks {some_of(waiting)}; does config.json match the weights, "
            "and are all weight files there?"
        )


def _adds_nothing(stored: StoredTensor) -> bool:
    """Whether it is a bias of zeros. Some programs write one for layers without a bias."""
    is_bias = stored.name.endswith(".bias") and len(stored.shape) == 1
    return is_bias and not bool(stored.read_dequantized(()).any())


def some_of(names: Collection[str]) -> str:
    """At most four names, for a message that must not be as long as the model is deep."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(sorted(names)[:4]) + more


def check_tensor(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raise ModelError unless the tensor is floating point and has `shape`."""
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

    They depend on the parameters alone, not on the device or on how the model is divided. Each
    tensor is a stretch, chosen by its name, of one pool of random values. Drawing billions of
    values would take minutes, and sending them to a GPU nearly as long. So the pool is drawn on the
    CPU, and the tensors are cut from it on `device`.

    Args:
        num_elements: elements of the whole model.
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
            # Own memory, as real weights have: the pool alone would fit in the GPU's cache.
            values = values.clone(memory_format=torch.contiguous_format)
        # No copy on a CPU, where touching fresh memory would cost most.
    else:
        rows = range(shape[0])[shard[0]] if shard else range(shape[0])
        width = numel(shape[1:])
        stretch = _stretch(pool, rows.start * width % len(pool), len(rows) * width)
        within = (slice(None), *shard[1:])
        # A part of the columns must not hold the memory of all.
        values = stretch.view(len(rows), *shape[1:])[within].contiguous()
    return values + 1.0 if parameter.is_scale else values


def _stretch(pool: Tensor, start: int, count: int) -> Tensor:
    """`count` values of the pool from `start` on. After its end it starts again."""
    values = torch.empty(count, dtype=pool.dtype, device=pool.device)
    done = 0
    while done < count:
        piece = pool[start : start + count - done]
        values[done : done + len(piece)] = piece
        done, start = done + len(piece), 0
    return values


def numel(shape: tuple[int, ...]) -> int:
    """Elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def checkpoint_tensors(directory: Path) -> Iterator[StoredTensor]:
    """The tensors of a checkpoint: of the first of `WEIGHT_FILES` that exists.

    If that is an index, each tensor comes from the file that the index names for it.

    Raises:
        ModelError: files are missing, damaged or unsafe.
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
    with _damage_of(file):
        _check_header_size(file)
    with _damage_of(file), safe_open(file, framework="pt", device="cpu") as tensors:
        described = []
        for name in tensors.keys():  # noqa: SIM118 - safe_open is not a dict
            part = tensors.get_slice(name)
            described.append((name, tuple(part.get_shape()), part.get_dtype()))
    for name, shape, dtype in described:
        read = partial(_read_safetensors, file, name)
        yield StoredTensor(name, shape, dtype, dtype.startswith(("F", "BF")), read)


def _check_header_size(file: Path) -> None:
    """The library checks the rest of a header: that types are known, that shapes fit the tensors'
    bytes, and that these follow each other and end where the file ends."""
    with file.open("rb") as opened:
        num_bytes = int.from_bytes(opened.read(_HEADER_SIZE_BYTES), "little")
    check(f"weight file {file}: its header's size in bytes", num_bytes, SAFETENSORS_HEADER_BYTES)


def _read_safetensors(file: Path, name: str, shard: Shard) -> Tensor:
    """Map the file anew for each tensor. Pages that were read count as the process's memory while
    they are mapped, and would add up to the whole model."""
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
        # Only the zip format, torch's default since 1.6, can be mapped.
        mapped = zipfile.is_zipfile(file)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ModelError(
            f"weight file {file} is refused: it holds more than tensors, and loading it could run "
            "code; use a safetensors checkpoint"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise ModelError(
            f"weight file {file} is damaged or incomplete ({error!r}); download it again"
        ) from error
