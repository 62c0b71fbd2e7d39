"""The rank's KV blocks in host memory, and how blocks get there and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from fastserve_kernels.int8_cache import is_int8
from fastserve_kernels.kv_quantization import dequantize, quantize
from torch import Tensor

from fastserve_backend.checkpoints.model_config import KVDType, ModelConfig
from fastserve_backend.worker.host_pool import HostPool
from fastserve_backend.worker.kv_store import neighbour_runs
from fastserve_backend.worker.staging import Uploads

# How many blocks a CPU quantizes at once: their float32 copies fit in its cache.
_QUANTIZED_AT_ONCE = 4
# Staging memory on a GPU, for each direction. A kernel's launch is short against copying so much.
_STAGING_BYTES = 32 * 2**20


class HostStore(ABC):
    """Blocks in host memory.

    One thread makes all copies in one direction, on its current stream. The methods only start a
    copy; the caller waits for the stream.
    """

    def __init__(self, kv: Tensor, num_blocks: int, block_bytes: int) -> None:
        self.num_device_blocks = len(kv)
        self.block_bytes = block_bytes
        self._pool = HostPool(num_blocks, block_bytes, kv.device)
        self.blocks = self._pool.blocks
        """uint8 ``[num_blocks, block_bytes]``."""

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @abstractmethod
    def copy_out(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        num_last_tokens: int,
        num_last: int = 1,
    ) -> None:
        """Copy blocks from the device. Each of the last ``num_last`` blocks has
        ``num_last_tokens`` tokens; the others are full."""

    @abstractmethod
    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        """Copy blocks to the device."""

    def close(self) -> None:
        """Unpin the memory. No copy may be under way or follow."""
        self._pool.close()

    def _runs(
        self, others: Sequence[int], host_blocks: Sequence[int]
    ) -> Iterator[tuple[slice, slice]]:
        """Runs that one copy moves each, see `neighbour_runs`."""
        return neighbour_runs(others, host_blocks, self._pool.blocks_per_piece)


class PlainStore(HostStore):
    """Keeps blocks byte for byte as they are on the device."""

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        super().__init__(kv, num_blocks, kv[0].numel() * kv.element_size())
        self._kv = kv.view(len(kv), -1).view(torch.uint8)
        # NumPy's copies are plain memcpy; torch's would start threads of their own.
        self._on_cpu = (self._kv.numpy(), self.blocks.numpy()) if kv.device.type == "cpu" else None

    def copy_out(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        num_last_tokens: int,
        num_last: int = 1,
    ) -> None:
        for device, host in self._runs(device_blocks, host_blocks):
            if self._on_cpu is not None:
                self._on_cpu[1][host] = self._on_cpu[0][device]
            else:
                self.blocks[host].copy_(self._kv[device], non_blocking=True)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in self._runs(device_blocks, host_blocks):
            if self._on_cpu is not None:
                self._on_cpu[0][device] = self._on_cpu[1][host]
            else:
                self._kv[device].copy_(self.blocks[host], non_blocking=True)


class Int8Store(HostStore):
    """Keeps INT8 codes with a scale and an offset for each channel of a block; lossy. For a cache
    on the CPU."""

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        super().__init__(kv, num_blocks, kv[0].numel() + _parameter_bytes(kv))
        self._kv = kv
        self._codes, self._parameters = _int8_parts(self.blocks, kv)

    def copy_out(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        num_last_tokens: int,
        num_last: int = 1,
    ) -> None:
        for part, num_tokens in self._quantized_parts(
            len(device_blocks), _QUANTIZED_AT_ONCE, num_last_tokens, num_last
        ):
            codes, parameters = quantize(self._kv[list(device_blocks[part])], num_tokens)
            for index, host in enumerate(host_blocks[part]):
                self._codes[host].copy_(codes[index])
                self._parameters[host].copy_(parameters[index])

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        for device, host in zip(device_blocks, host_blocks, strict=True):
            codes, parameters = self._codes[host, None], self._parameters[host, None]
            self._kv[device] = dequantize(codes, parameters, self._kv.dtype)[0]

    def _quantized_parts(
        self, count: int, at_once: int, num_last_tokens: int, num_last: int
    ) -> Iterator[tuple[slice, int]]:
        """Slices of ``count`` blocks, ``at_once`` at most, and the tokens in each slice's last
        block; arguments as of `copy_out`. The slice's other blocks are full."""
        block_size = self._kv.shape[4]
        if num_last_tokens == block_size:
            num_last = 1
        num_together = count - num_last + 1  # all but the first of the last blocks are full
        for part in _parts(num_together, at_once):
            yield part, num_last_tokens if part.stop == num_together else block_size
        for index in range(num_together, count):
            yield slice(index, index + 1), num_last_tokens


class StagedInt8Store(Int8Store):
    """The same for a cache on a GPU.

    On the way out kernels quantize into a staging buffer on the GPU, and DMA copies that to the
    host. On the way in it is the reverse. Nothing here waits for the device.
    """

    def __init__(self, kv: Tensor, num_blocks: int) -> None:
        super().__init__(kv, num_blocks)
        # torch for a CPU comes without Triton.
        from fastserve_kernels.gpu import kv_int8

        self._kernels = kv_int8
        self._at_once = max(1, min(num_blocks, _STAGING_BYTES // self.block_bytes))
        # A buffer for each direction; the stream of its thread orders all uses.
        shape = (2, self._at_once, self.block_bytes)
        self._staging = torch.empty(shape, dtype=torch.uint8, device=kv.device)
        # Host memory of each direction's latest copy, to be kept until that copy has ended.
        self._uploads = [Uploads(kv.device) for _ in range(2)]

    def copy_out(
        self,
        device_blocks: Sequence[int],
        host_blocks: Sequence[int],
        num_last_tokens: int,
        num_last: int = 1,
    ) -> None:
        staging = self._staging[0]
        block_ids = self._bring(0, device_blocks)
        for part, num_tokens in self._quantized_parts(
            len(device_blocks), self._at_once, num_last_tokens, num_last
        ):
            self._kernels.quantize_blocks(
                self._kv,
                block_ids[part],
                num_tokens,
                out=_int8_parts(staging[: part.stop - part.start], self._kv),
            )
            for staged, host in self._runs(range(part.stop - part.start), host_blocks[part]):
                self.blocks[host].copy_(staging[staged], non_blocking=True)

    def copy_in(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        staging = self._staging[1]
        block_ids = self._bring(1, device_blocks)
        for part in _parts(len(device_blocks), self._at_once):
            for staged, host in self._runs(range(part.stop - part.start), host_blocks[part]):
                staging[staged].copy_(self.blocks[host], non_blocking=True)
            codes, parameters = _int8_parts(staging[: part.stop - part.start], self._kv)
            self._kernels.dequantize_blocks(codes, parameters, self._kv, block_ids[part])

    def _bring(self, direction: int, blocks: Sequence[int]) -> Tensor:
        """Block ids as int32 on the device. A kernel copies them, because the copy engines are
        busy with blocks."""
        self._uploads[direction] = Uploads(self._kv.device)
        return self._uploads[direction].bring(np.asarray(blocks, dtype=np.int32))


def _parts(count: int, at_once: int) -> Iterator[slice]:
    """Slices of ``count`` blocks, ``at_once`` at most."""
    for start in range(0, count, at_once):
        yield slice(start, min(start + at_once, count))


def _parameter_bytes(kv: Tensor) -> int:
    """Bytes of a block's scales and offsets, in float16."""
    return kv[0].numel() // kv.shape[4] * 2 * torch.float16.itemsize


def _int8_parts(blocks: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the codes and parameters in the bytes [n, block_bytes] of blocks. Those of one block
    lie together, so that one copy moves both."""
    count, code_bytes = len(blocks), kv[0].numel()
    codes = blocks[:, :code_bytes].view(torch.int8)
    parameters = blocks[:, code_bytes:].view(torch.float16)
    shape = (count, *kv.shape[1:4])
    return codes.view(*shape, *kv.shape[4:]), parameters.view(*shape, 2, kv.shape[5])


def make_host_store(
    config: ModelConfig, kv: Tensor, swap_space_gib: float, host_dtype: KVDType
) -> HostStore:
    """A store of as many blocks as ``swap_space_gib`` GiB hold. Each rank of a host has that much.

    Raises:
        ConfigError: that much memory cannot be mapped or pinned.
    """
    num_bytes = int(swap_space_gib * 2**30)
    num_blocks = num_bytes // config.host_kv_bytes_per_block(kv.shape[4], host_dtype)
    if host_dtype == "same" or is_int8(kv):
        return PlainStore(kv, num_blocks)
    return (StagedInt8Store if kv.is_cuda else Int8Store)(kv, num_blocks)
