"""Reads the header of a GGUF file: its metadata, and where its tensors are.

The format is that of ggml's docs/gguf.md. `gguf.GGUFReader` reads it too, but takes seconds for the
names of a vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_index import FileTensor, part_files
from fastserve_backend.checkpoints.limits import (
    GGUF_ALIGNMENT,
    GGUF_DIMENSIONS,
    GGUF_FIELDS,
    GGUF_HEADER_BYTES,
    GGUF_NESTED_ARRAYS,
    GGUF_PARTS,
    GGUF_TENSORS,
    GGUF_TEXT_BYTES,
    GGUF_VALUES,
    check,
)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # unless general.alignment says otherwise
_PART, _NUM_PARTS = "split.no", "split.count"
_STRING, _ARRAY, _BOOL = 8, 9, 7
# The other types of values, by their numbers.
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class GGUFFile:
    """A GGUF file with a whole model, or the first one of several. The constructor raises
    ModelError for anything else."""

    def __init__(self, path: Path) -> None:
        self._fields, tensors = _read_file(path)
        if self.field(_PART, 0) != 0:
            raise ModelError(
                f"part {self.field(_PART) + 1} of a model in several files; give the first one"
            )
        self.paths = part_files(path, _num_parts(self.field(_NUM_PARTS, 1)))
        """Of all parts."""
        self.tensors = tensors
        for number, part in enumerate(self.paths[1:], start=1):
            self.tensors |= self._tensors_of(part, number)
        self.architecture: str = self.required("general.architecture")

    tensors: dict[str, FileTensor]
    """By name."""

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata field."""
        return self._fields.get(key, default)

    def required(self, key: str) -> Any:
        """The value of a metadata field; ModelError if it is missing."""
        value = self.field(key)
        if value is None:
            raise ModelError(f"metadata field {key} is missing")
        return value

    def key(self, name: str) -> str:
        """The full name of a field that the architecture's name begins."""
        return f"{self.architecture}.{name}"

    def own(self, name: str, default: Any = None) -> Any:
        """The value of a field that the architecture's name begins."""
        return self.field(self.key(name), default)

    def values(self, name: str) -> list[float]:
        """The elements of a tensor."""
        tensor = self.tensors[name]
        path = self.paths[tensor.part]
        raw = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.start)
        values = gguf.dequantize(raw, gguf.GGMLQuantizationType[tensor.kind])
        return [float(one) for one in values.ravel()]

    def _tensors_of(self, path: Path, number: int) -> dict[str, FileTensor]:
        """The tensors of another part."""
        try:
            fields, tensors = _read_file(path)
        except OSError as error:
            raise ModelError(f"{path.name}, beside it, cannot be read: {error.strerror}") from None
        except ModelError as error:
            raise ModelError(f"{path.name}, beside it: {error}") from None
        if (fields.get(_PART), fields.get(_NUM_PARTS)) != (number, len(self.paths)):
            raise ModelError(f"{path.name}, beside it, is no part of the same model")
        return {name: replace(tensor, part=number) for name, tensor in tensors.items()}


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    """The metadata and the tensors of a file. Raises OSError and ModelError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _read_header(data)
    except (ModelError, OSError):
        raise
    except Exception as error:  # damage can show as any kind of error
        raise ModelError(
            f"damaged, incomplete, or no GGUF file ({error}); download it again"
        ) from error


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], dict[str, FileTensor]]:
    if data[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor = _Cursor(data, len(_MAGIC))
    version = cursor.number("<u4")
    if version not in _VERSIONS:
        raise ValueError(f"its version is {version}")
    num_tensors = check("the number of tensors", cursor.number("<u8"), GGUF_TENSORS)
    num_fields = check("the number of metadata fields", cursor.number("<u8"), GGUF_FIELDS)
    fields: dict[str, Any] = {}
    for index in range(num_fields):
        key = cursor.string(f"the name of metadata field {index}")
        fields[key] = cursor.value(f"metadata field {key}", cursor.number("<u4"))
    described = []
    for index in range(num_tensors):
        name = cursor.string(f"the name of tensor {index}")
        rank = check(f"tensor {name!r}: its dimensions", cursor.number("<u4"), GGUF_DIMENSIONS)
        sizes = cursor.numbers("<u8", rank)
        described.append((name, sizes[::-1], cursor.number("<u4"), cursor.number("<u8")))
    alignment = _alignment(fields.get("general.alignment", _ALIGNMENT))
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in described:
        tensors[name] = tensor = _tensor(name, tuple(shape), kind, start + offset)
        if tensor.start + tensor.num_bytes > len(data):
            raise ValueError(f"tensor {name!r} ends beyond its end")
    return fields, tensors


def _num_parts(stated: Any) -> int:
    if type(stated) is not int or stated < 1:
        raise ModelError(f"metadata field {_NUM_PARTS} is {stated!r}, expected a number of files")
    return check(f"metadata field {_NUM_PARTS}", stated, GGUF_PARTS)


def _alignment(stated: Any) -> int:
    if type(stated) is not int or stated < 1 or stated & (stated - 1):
        raise ModelError(
            f"metadata field general.alignment is {stated!r}, expected a power of 2; download the "
            "file again"
        )
    return check("metadata field general.alignment", stated, GGUF_ALIGNMENT)


def _tensor(name: str, shape: tuple[int, ...], kind: int, start: int) -> FileTensor:
    try:
        known = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise ModelError(
            f"tensor {name!r} is of type {kind}, which is not known here; use the model's Hugging "
            "Face checkpoint"
        ) from None
    elements, size = gguf.GGML_QUANT_SIZES[known]
    if not shape or shape[-1] % elements:
        raise ValueError(f"tensor {name!r} ({known.name}) has shape {shape}")
    return FileTensor(name, known.name, shape, start, prod(shape) // elements * size)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def number(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0]

    def numbers(self, dtype: str, count: int) -> list[Any]:
        """Raises ValueError beyond the file's end."""
        found = np.frombuffer(self._data, dtype, count, self.at)
        self._move_to(self.at + found.nbytes)
        values: list[Any] = found.tolist()
        return values

    def string(self, what: str) -> str:
        return self.strings(what, 1)[0]

    def strings(self, what: str, count: int) -> list[str]:
        found = []
        for _ in range(count):
            (size,) = struct.unpack_from("<Q", self._data, self.at)
            start = self.at + 8
            self._move_to(start + check(f"{what}: its length in bytes", size, GGUF_TEXT_BYTES))
            found.append(self._data[start : self.at].decode())
        return found

    def value(self, what: str, kind: int, depth: int = 0) -> Any:
        """
        Args:
            what: whose value it is, for messages.
            depth: of how many arrays it is a part.
        """
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        depth = check(f"{what}: its depth of arrays", depth + 1, GGUF_NESTED_ARRAYS)
        of = self.number("<u4")
        count = check(f"{what}: its number of values", self.number("<u8"), GGUF_VALUES)
        if of == _STRING:
            return self.strings(what, count)
        if of == _ARRAY:
            return [self.value(what, of, depth) for _ in range(count)]
        return self.numbers(_NUMBERS[of], count)

    def _move_to(self, at: int) -> None:
        if at > len(self._data):
            raise ValueError("a value ends beyond its end")
        self.at = check("the header's size in bytes", at, GGUF_HEADER_BYTES)
