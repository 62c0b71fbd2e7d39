"""The rank's KV blocks on the host, and how blocks get there and back."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch
from fastserve_kernels.int8_cache import is_int8
from fastserve_kernels.kv_quantization import dequantize, quantize
from torch import Tensor

from fastserve_backend.checkpoints.model_config import KVDType, ModelConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.worker.block_copies import runs
from fastserve_backend.worker.host_memory import host_memory
from fastserve_backend.worker.staging import Uploads

# Blocks that are quantized at once on a CPU: their float32 copies fit in its cache.
_QUANTIZED_AT_ONCE = 4
# Of a GPU's memory, for each direction: enough that a kernel's launch is short against its copies.
_STAGING_BYTES = 32 * 2**20


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
        for device, host in runs(device_blocks, host_blocks):
            if self._on_cpu is not None:
                self._on_cpu[1][host] = self._on_cpu[0][device]
            else:
                self._blocks[host].copy_(self._kv[device], non_blocking=True)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in runs(device_blocks, host_blocks):
            if self._on_cpu is not None:
                self._on_cpu[0][device] = self._on_cpu[1][host]
            else:
                self._kv[device].copy_(self._blocks[host], non_blocking=True)


class Int8Store(HostStore):
    """INT8 codes, a scale and an offset for each channel of a block; lossy. Of a cache on the
    CPU."""

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        code_bytes = kv[0].numel()
        super().__init__(len(kv), num_blocks, code_bytes + _parameter_bytes(kv))
        self._kv = kv
        memory = _host_memory(num_blocks * self.block_bytes, kv.device)
        self._blocks = memory.view(num_blocks, self.block_bytes)
        self._codes, self._parameters = _int8_parts(self._blocks, kv)

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
                self._codes[host].copy_(codes[index])
                self._parameters[host].copy_(parameters[index])

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in zip(device_blocks, host_blocks, strict=True):
            codes, parameters = self._codes[host, None], self._parameters[host, None]
            self._kv[device] = dequantize(codes, parameters, self._kv.dtype)[0]


class StagedInt8Store(Int8Store):
    """The same of a cache on a GPU: its kernels quantize into a staging buffer, whose blocks go to
    the host by DMA, and the other way around. Nothing here waits for the device."""

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        super().__init__(kv, num_blocks)
        # Triton is not there for a CPU's torch.
        from fastserve_kernels.gpu import kv_int8

        self._kernels = kv_int8
        self._at_once = max(1, min(num_blocks, _STAGING_BYTES // self.block_bytes))
        # One for each direction, whose thread's stream orders what is done with it.
        shape = (2, self._at_once, self.block_bytes)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=kv.device)
        # What a direction's thread brought for its latest copy, for whose end it has to wait.
        self._uploads = [Uploads(kv.device) for _ in range(2)]

    def copy_out(
        self, device_blocks: Sequence[int], host_blocks: Sequence[int], num_last_tokens: int
    ) -> None:
        staging = self._staging[0]
        block_ids = self._bring(0, device_blocks)
        for part in self._parts(len(device_blocks)):
            is_last = part.stop == len(device_blocks)
            self._kernels.quantize_blocks(
                self._kv,
                block_ids[part],
                num_last_tokens if is_last else self._kv.shape[4],
                out=_int8_parts(staging[: part.stop - part.start], self._kv),
            )
            for staged, host in runs(range(part.stop - part.start), host_blocks[part]):
                self._blocks[host].copy_(staging[staged], non_blocking=True)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        staging = self._staging[1]
        block_ids = self._bring(1, device_blocks)
        for part in self._parts(len(device_blocks)):
            for staged, host in runs(range(part.stop - part.start), host_blocks[part]):
                staging[staged].copy_(self._blocks[host], non_blocking=True)
            codes, parameters = _int8_parts(staging[: part.stop - part.start], self._kv)
            self._kernels.dequantize_blocks(codes, parameters, self._kv, block_ids[part])

    def _bring(self, direction: int, blocks: Sequence[int]) -> Tensor:
        """int32, past the copy engines, which have blocks to move."""
        self._uploads[direction] = Uploads(self._kv.device)
        return self._uploads[direction].bring(np.asarray(blocks, dtype=np.int32))

    def _parts(self, count: int) -> Iterator[slice]:
        """As many blocks as the staging buffer holds."""
        for start in range(0, count, self._at_once):
            yield slice(start, min(start + self._at_once, count))


def _parameter_bytes(kv: Tensor) -> int:
    """Of a block's scales and offsets, in float16."""
    return kv[0].numel() // kv.shape[4] * 2 * torch.float16.itemsize


def _int8_parts(blocks: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and parameters in the bytes [n, block_bytes] of blocks: a block's lie together, so that
    one copy takes both."""
    count, code_bytes = len(blocks), kv[0].numel()
    codes = blocks[:, :code_bytes].view(torch.int8)
    parameters = blocks[:, code_bytes:].view(torch.float16)
    shape = (count, *kv.shape[1:4])
    return codes.view(*shape, *kv.shape[4:]), parameters.view(*shape, 2, kv.shape[5])


def check_swap_space(swap_space_gib: float, device: torch.device, num_local_ranks: int) -> None:
    """To be called before any rank of the host makes its store, which leaves less to see.

    Raises:
        ConfigError: the host, or its container, has no ``swap_space_gib`` GiB for each rank.
    """
    memory = host_memory()
    # Pinned memory is taken at once, other memory as it is used.
    limit = (memory.available if device.type == "cuda" else memory.total) // num_local_ranks
    if swap_space_gib * 2**30 > limit:
        raise ConfigError(
            f"kv_cache.swap_space_gib: got {swap_space_gib:g}; the host or its container has "
            f"{limit / 2**30:.1f} GiB{' a rank' if num_local_ranks > 1 else ''}, lower it"
        )


def make_host_store(
    config: ModelConfig, kv: Tensor, swap_space_gib: float, host_dtype: KVDType
) -> HostStore:
    """As many blocks as ``swap_space_gib`` GiB hold; each rank of a host has so much.

    Raises:
        ConfigError: so much memory cannot be pinned.
    """
    num_bytes = int(swap_space_gib * 2**30)
    num_blocks = num_bytes // config.host_kv_bytes_per_block(kv.shape[4], host_dtype)
    if host_dtype == "same" or is_int8(kv):
        return PlainStore(kv, num_blocks)
    return (StagedInt8Store if kv.is_cuda else Int8Store)(kv, num_blocks)


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed memory, uint8 ``[num_bytes]``; a GPU copies to and from it without a detour.

    mmap and registering, because torch's pinned allocator rounds up to powers of two.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A device's copies are for this process alone. Shared memory, Python's default, has small pages
    # only, which take several times as long to make and to register.
    pages.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # of a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        # Registering would make the pages on one thread, 16 s for 24 GiB; torch has several.
        memory.zero_()
        runtime = torch.cuda.cudart()
        try:
            torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), num_bytes, 0))
        except torch.cuda.CudaError as error:
            raise ConfigError(
                f"kv_cache.swap_space_gib: {num_bytes / 2**30:.1f} GiB of host memory could not be "
                f"pinned ({error}); lower it, or raise the container's limits"
            ) from None
    return memory
