"""Which tensors of a GGUF file become which tensors of a model: a file beside config.json.

A rank finds its weights in the GGUF file by it, and need not read the file's header. Imports
neither torch nor `gguf`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import msgspec

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.model_config import DTYPE_BYTES, DType
from fastserve_backend.checkpoints.quantization_config import MXFP4_MORE_BYTES
from fastserve_backend.errors import ConfigError
from fastserve_backend.system.cache_directory import cache_directory

INDEX_FILE = "gguf.json"
SOURCE_FILE = "source"
"""The path of the GGUF file. Its bytes may be no text."""

PLAIN_TYPES = ("F32", "F16", "BF16")
KEPT_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types of matrices that stay in few bits. Others are dequantized."""


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a GGUF file.

    kind: the name of its type, such as Q4_K.
    shape: in torch's order.
    start: where its bytes begin in the file.
    part: the number of the file, of those that have the model.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    part: int = 0


@dataclass(frozen=True)
class FileState:
    """How a file was when its tensors were found."""

    num_bytes: int
    changed_ns: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """Raises OSError."""
        stat = file.stat()
        return cls(stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class MappedTensor:
    """How a tensor of a model is read from the file.

    name: the checkpoint's. With {expert} there is one tensor for each expert, without the first
        dimension.
    sources: two tensors give their rows, behind the first dimension, by turns.
    heads: llama.cpp rotates neighbouring rows of each of so many heads as pairs, where Hugging
        Face pairs the halves of a head. None: rows are in Hugging Face's order.
    offset: what is subtracted.
    transposed: the last two dimensions change places.
    """

    name: str
    sources: tuple[FileTensor, ...]
    heads: int | None = None
    offset: float = 0.0
    transposed: bool = False

    @property
    def is_kept(self) -> bool:
        """Whether it stays in few bits: if it is a matrix, or has one for each expert."""
        kinds = {source.kind for source in self.sources}
        return len(kinds) == 1 and kinds <= set(KEPT_TYPES) and len(self.sources[0].shape) > 1


@dataclass(frozen=True)
class GGUFIndex:
    """The tensors of a model, and its files."""

    files: tuple[FileState, ...]
    tensors: tuple[MappedTensor, ...]

    @property
    def is_quantized(self) -> bool:
        """Whether there is a matrix that stays in few bits."""
        return any(tensor.is_kept for tensor in self.tensors)

    def memory_bytes(self, dtype: DType) -> int:
        """Bytes of all weights in memory. Those that are not kept as they are have `dtype`."""
        num_bytes = 0.0
        for tensor in self.tensors:
            for source in tensor.sources:
                size = prod(source.shape)
                num_bytes += source.num_bytes if tensor.is_kept else size * DTYPE_BYTES[dtype]
                if tensor.is_kept and source.kind == "MXFP4":
                    num_bytes += size * MXFP4_MORE_BYTES
        return round(num_bytes)

    def dequantized_types(self) -> list[str]:
        """The types of matrices that are dequantized when they are loaded."""
        kinds = {source.kind for tensor in self.tensors for source in tensor.sources}
        return sorted(kinds.difference(PLAIN_TYPES, KEPT_TYPES))

    def write(self, directory: Path, file: Path) -> None:
        (directory / SOURCE_FILE).write_bytes(os.fsencode(file.absolute()))
        (directory / INDEX_FILE).write_bytes(msgspec.json.encode(self))


def conversions_directory() -> Path:
    """Where all conversions are. Raises ConfigError: see ``cache_directory``."""
    return cache_directory("gguf")


def is_conversion(directory: Path) -> bool:
    """Whether `directory` is a conversion in this user's cache. Anywhere else an index and a source
    may come with a checkpoint, so they do not count: they could name any file of this machine."""
    if not (directory / INDEX_FILE).is_file():
        return False
    try:
        return directory.resolve().parent == conversions_directory().resolve()
    except ConfigError:  # whoever looks for weights says that there are none
        return False


def read_index(directory: Path) -> GGUFIndex:
    """Raises ModelError: the index is damaged."""
    try:
        return msgspec.json.decode((directory / INDEX_FILE).read_bytes(), type=GGUFIndex)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(
            f"{directory / INDEX_FILE} is damaged ({error}); remove {directory}"
        ) from error


def source_file(directory: Path) -> Path:
    """The GGUF file that `directory` describes. Raises OSError."""
    return Path(os.fsdecode((directory / SOURCE_FILE).read_bytes()))


def unchanged_sources(directory: Path, index: GGUFIndex) -> list[Path]:
    """The model's files. Raises ModelError if one of them is no longer what it was."""
    files = part_files(source_file(directory), len(index.files))
    for file, state in zip(files, index.files, strict=True):
        try:
            is_same = FileState.of(file) == state
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from error
        if not is_same:
            raise ModelError(f"{file} has changed since it was described; start again")
    return files


def part_files(first: Path, count: int) -> list[Path]:
    """The files of a model in ``count`` parts, as llama.cpp's gguf-split names them.

    Raises:
        ModelError: the first one has another name.
    """
    if count == 1:
        return [first]
    end = f"-00001-of-{count:05}.gguf"
    if not first.name.endswith(end):
        raise ModelError(
            f"one part of a model in {count} files; give the first one, whose name ends in {end}, "
            "and keep the others beside it"
        )
    begin = first.name.removesuffix(end)
    return [
        first.with_name(f"{begin}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)
    ]
