"""Bring a step's small arrays to the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
_ALIGNMENT = 64
_TORCH_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


@dataclass(frozen=True)
class Places:
    """Where the arrays of a call go: in each of the host's buffers, and on the device."""

    host: tuple[list[Array], ...]
    device: list[Tensor]
    num_bytes: int


class Staging:
    """Arrays to tensors on the device, by one copy that the host does not wait for.

    The tensors are good until the next call.

    Args:
        num_bytes: room for the arrays of one call (`size_of`).
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        # Two, because the copy of the call before may not have ended.
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        ]
        self._copied = [_event() for _ in range(2)] if pinned else []
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._turn = 0

    def places(self, arrays: Sequence[Array]) -> Places:
        """For arrays of these shapes, of int32 or int64. Finding them takes longer than filling
        them, so they can be kept for the next arrays of the same shapes."""
        host: tuple[list[Array], ...] = ([], [])
        device = []
        end = 0
        for array in arrays:
            begin, end = end, end + array.nbytes
            for views, buffer in zip(host, self._buffers, strict=True):
                views.append(buffer.numpy()[begin:end].view(array.dtype).reshape(array.shape))
            place = self._on_device[begin:end].view(_TORCH_DTYPES[array.dtype])
            device.append(place.view(array.shape))
            end += -end % _ALIGNMENT
        return Places(host, device, end)

    def bring(self, arrays: Sequence[Array], places: Places) -> list[Tensor]:
        """A tensor for each array, on the current stream."""
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        for array, place in zip(arrays, places.host[self._turn], strict=True):
            place[...] = array
        buffer = self._buffers[self._turn]
        self._on_device[: places.num_bytes].copy_(buffer[: places.num_bytes], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return places.device

    @staticmethod
    def size_of(arrays: Sequence[Array]) -> int:
        """Bytes that a call with arrays of these shapes needs."""
        return sum(array.nbytes + _ALIGNMENT for array in arrays)


def to_device(values: Array, device: torch.device) -> Tensor:
    """A tensor of its own for an array that comes now and then, without waiting for what the device
    has been given before."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()
