"""The rank's KV blocks on the host, and how blocks get there and back."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal

import psutil
import torch
from fastserve_kernels.kv_quantization import dequantize, quantize
from torch import Tensor

from fastserve_backend.errors import ConfigError
from fastserve_backend.models.config import ModelConfig

# Blocks that are quantized at once: their float32 copies fit in a processor's cache or need little
# of a GPU's memory.
_QUANTIZED_AT_ONCE = 4


class HostStore(ABC):
    """Blocks in host memory. Copies in one direction are made by one thread, on a device's current
    stream; the caller waits for it."""

    def __init__(self, num_device_blocks: int, num_blocks: int, block_bytes: int) -> None:
        self.num_device_blocks = num_device_blocks
        self.block_bytes = block_bytes
        self._num_blocks = num_blocks

    def __len__(self) -> int:
        """Number of blocks."""
        return self._num_blocks

    @abstractmethod
    def copy_out(
        self, device_blocks: Sequence[int], host_blocks: Sequence[int], num_last_tokens: int
    ) -> None:
        """Copy blocks from the device; the last one has ``num_last_tokens`` tokens."""

    @abstractmethod
    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks to the device."""


class PlainStore(HostStore):
    """The same bytes as on the device."""

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        super().__init__(len(kv), num_blocks, kv[0].numel() * kv.element_size())
        self._kv = kv.view(len(kv), -1).view(torch.uint8)
        memory = _host_memory(num_blocks * self.block_bytes, kv.device)
        self._blocks = memory.view(num_blocks, self.block_bytes)
        # A thread of torch's copies would start threads of its own; NumPy's are plain memcpy.
        self._on_cpu = (self._kv.numpy(), self._blocks.numpy()) if kv.device.type == "cpu" else None

    def copy_out(
        self, device_blocks: Sequence[int], host_blocks: Sequence[int], num_last_tokens: int
    ) -> None:
        for device, host in _runs(device_blocks, host_blocks):
            if self._on_cpu is not None:
                self._on_cpu[1][host] = self._on_cpu[0][device]
            else:
                self._blocks[host].copy_(self._kv[device], non_blocking=True)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in _runs(device_blocks, host_blocks):
            if self._on_cpu is not None:
                self._on_cpu[0][device] = self._on_cpu[1][host]
            else:
                self._kv[device].copy_(self._blocks[host], non_blocking=True)


class Int8Store(HostStore):
    """INT8 codes, a scale and an offset for each channel of a block; lossy."""

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        code_bytes = kv[0].numel()
        parameter_shape = (*kv.shape[1:4], 2, kv.shape[5])
        parameter_bytes = 2 * torch.Size(parameter_shape).numel()
        super().__init__(len(kv), num_blocks, code_bytes + parameter_bytes)
        self._kv = kv
        memory = _host_memory(num_blocks * self.block_bytes, kv.device)
        split = num_blocks * code_bytes
        self._codes = memory[:split].view(torch.int8).view(num_blocks, *kv.shape[1:])
        self._parameters = memory[split:].view(torch.float16).view(num_blocks, *parameter_shape)

    def copy_out(
        self, device_blocks: Sequence[int], host_blocks: Sequence[int], num_last_tokens: int
    ) -> None:
        block_size = self._kv.shape[4]
        for first in range(0, len(device_blocks), _QUANTIZED_AT_ONCE):
            part = slice(first, first + _QUANTIZED_AT_ONCE)
            has_last = part.stop >= len(device_blocks)
            codes, parameters = quantize(
                self._kv[list(device_blocks[part])], num_last_tokens if has_last else block_size
            )
            for index, host in enumerate(host_blocks[part]):
                self._codes[host].copy_(codes[index], non_blocking=True)
                self._parameters[host].copy_(parameters[index], non_blocking=True)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        device = self._kv.device
        for device_block, host_block in zip(device_blocks, host_blocks, strict=True):
            codes = self._codes[host_block].to(device, non_blocking=True)
            parameters = self._parameters[host_block].to(device, non_blocking=True)
            block = dequantize(codes[None], parameters[None], self._kv.dtype)
            self._kv[device_block].copy_(block[0])


def make_host_store(
    config: ModelConfig,
    kv: Tensor,
    swap_space_gib: float,
    host_dtype: Literal["same", "int8"],
    num_local_ranks: int = 1,
) -> HostStore:
    """As many blocks as ``swap_space_gib`` GiB hold; each rank of a host has so much.

    Raises:
        ConfigError: the host has less memory.
    """
    wanted = int(swap_space_gib * 2**30)
    memory = psutil.virtual_memory()
    # Pinned memory is taken at once, other memory as it is used.
    limit = (memory.available if kv.device.type == "cuda" else memory.total) // num_local_ranks
    if wanted > limit:
        raise ConfigError(
            f"kv_cache.swap_space_gib: got {swap_space_gib:g}; the host has "
            f"{limit / 2**30:.1f} GiB{' a rank' if num_local_ranks > 1 else ''}, lower it"
        )
    num_blocks = wanted // config.host_kv_bytes_per_block(kv.shape[4], host_dtype)
    return (PlainStore if host_dtype == "same" else Int8Store)(kv, num_blocks)


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed memory, uint8 ``[num_bytes]``; a GPU copies to and from it without a detour.

    mmap and registering, because torch's pinned allocator rounds up to powers of two.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    if device.type == "cuda":
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
    return memory


def _runs(
    device_blocks: Sequence[int], host_blocks: Sequence[int]
) -> Iterator[tuple[slice, slice]]:
    """The pairs of blocks, those that are neighbours on both sides together: one copy each."""
    begin = 0
    for end in range(1, len(device_blocks) + 1):
        if (
            end < len(device_blocks)
            and device_blocks[end] == device_blocks[end - 1] + 1
            and host_blocks[end] == host_blocks[end - 1] + 1
        ):
            continue
        count = end - begin
        device, host = device_blocks[begin], host_blocks[begin]
        yield slice(device, device + count), slice(host, host + count)
        begin = end
