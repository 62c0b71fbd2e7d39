"""Reads the metadata and the tensors of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.gguf_reader import ReaderTensor
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError


class GGUFFile:
    """A GGUF file with a whole model. The constructor raises ModelError for anything else."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        # For missing bytes the library raises numpy's errors.
        except Exception as error:
            raise ModelError(f"damaged, or no GGUF file ({error})") from error
        if self.field("split.count", 1) > 1:
            raise ModelError(
                "one part of a model in several files; join them with `llama-gguf-split --merge`"
            )
        self.architecture: str = self.required("general.architecture")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
        }
        """The shapes of the tensors, by name, in torch's order."""

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata field."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

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

    def tensor(self, name: str) -> Tensor:
        """A tensor, dequantised to float32. Raises ModelError if its format is not supported."""
        stored: ReaderTensor = self._tensors[name]
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(
                f"tensor {name!r} ({stored.tensor_type.name}) cannot be read: {error}"
            ) from error
        # torch must own the memory; this copies only if the library returns a view of the file.
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))
