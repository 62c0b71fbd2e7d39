"""Brings a step's small arrays to the device."""

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
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


@dataclass(frozen=True)
class Places:
    """Where `Staging` puts arrays of given shapes: in each host buffer, and on the device."""

    host: tuple[list[Array], ...]
    device: list[Tensor]
    last_begin: int
    """Where the last array begins, in bytes."""


class Staging:
    """Brings arrays to the device by one copy. The host waits neither for it nor for copies of KV
    blocks.

    The tensors are valid until the next call of `bring`.

    Args:
        num_bytes: room for the arrays of one call (see `size_of`).
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        # Two buffers, because the copy from the last call may still run.
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event(blocking=True) for _ in range(2)] if pinned else []
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._turn = 0

    def places(self, arrays: Sequence[Array]) -> Places:
        """Places for arrays of these shapes, of int32 or int64.

        Finding places takes longer than filling them. So the caller may keep them for later arrays
        of the same shapes, of which the last may be shorter.
        """
        host: tuple[list[Array], ...] = ([], [])
        device = []
        begin = end = 0
        for array in arrays:
            begin, end = end, end + array.nbytes
            for views, buffer in zip(host, self._buffers, strict=True):
                views.append(buffer.numpy()[begin:end].view(array.dtype).reshape(array.shape))
            place = self._on_device[begin:end].view(_TORCH_DTYPES[array.dtype])
            device.append(place.view(array.shape))
            end += -end % _ALIGNMENT
        return Places(host, device, begin)

    def bring(self, arrays: Sequence[Array], places: Places) -> list[Tensor]:
        """A tensor for each array, copied on the current stream.

        If the last array is shorter than its place, the rest of the place keeps its old content.
        """
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        *all_but_last, (last, place_of_last) = zip(arrays, places.host[self._turn], strict=True)
        for array, place in all_but_last:
            place[...] = array
        place_of_last[: len(last)] = last
        used = slice(places.last_begin + last.nbytes)
        _copy(self._buffers[self._turn][used], self._on_device[used])
        if self._copied:
            self._copied[self._turn].record()
        return places.device

    @staticmethod
    def size_of(arrays: Sequence[Array]) -> int:
        """Bytes that a call of `bring` with arrays of these shapes needs."""
        return sum(array.nbytes + _ALIGNMENT for array in arrays)


class Uploads:
    """Brings arrays that only some steps have, each to a tensor of its own.

    It holds the host memory that the copies read. Keep it until the device has done them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned: list[Tensor] = []

    def bring(self, values: Array) -> Tensor:
        """Copy ``values``, of a type of 4 or 8 bytes, on the current stream, without a wait."""
        on_gpu = self._device.type == "cuda"
        on_host = torch.empty(values.shape, dtype=_TORCH_DTYPES[values.dtype], pin_memory=on_gpu)
        on_host.numpy()[...] = values
        if not on_gpu:
            return on_host
        self._pinned.append(on_host)
        on_device = torch.empty(on_host.shape, dtype=on_host.dtype, device=self._device)
        _copy(on_host, on_device)
        return on_device


def _copy(source: Tensor, target: Tensor) -> None:
    # torch for a CPU comes without Triton.
    from fastserve_kernels.gpu.pinned_copies import copy_words

    copy_words(source, target)
