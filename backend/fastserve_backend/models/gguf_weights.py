"""The weights of a model in its GGUF file, which is mapped and never copied as a whole.

Rows may be in another order in the file, experts together, or norms 1 too large; see
`MappedTensor`.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from fastserve_kernels.quantized_weight import QuantizedWeight, rows_in_turns
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_index import (
    FileTensor,
    MappedTensor,
    read_index,
    unchanged_sources,
)
from fastserve_backend.models.gguf_quants import QUANTS
from fastserve_backend.models.weights import Shard, StoredTensor, StoredWeight

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_log = logging.getLogger(__name__)


def gguf_tensors(directory: Path) -> Iterator[StoredTensor]:
    """The tensors of the model that `directory` describes.

    Raises:
        ModelError: the GGUF file is gone, or has changed; or, while a part is read, a rank's part
            ends within a block.
    """
    index = read_index(directory)
    files = unchanged_sources(directory, index)
    if others := index.dequantized_types():
        _log.warning("%s: matrices in %s are dequantized", files[0].name, ", ".join(others))
    for tensor in index.tensors:
        shape = _shape(tensor)
        kind = tensor.sources[0].kind
        if "{expert}" not in tensor.name:
            yield StoredTensor(tensor.name, shape, kind, True, partial(_read, files, tensor))
            continue
        for expert in range(shape[0]):
            name = tensor.name.format(expert=expert)
            read = partial(_read_expert, files, tensor, expert)
            yield StoredTensor(name, shape[1:], kind, True, read)


def _shape(tensor: MappedTensor) -> tuple[int, ...]:
    first, *rest = tensor.sources[0].shape
    if len(tensor.sources) > 1:
        rest[0] *= len(tensor.sources)
    if tensor.transposed:
        rest[-2:] = reversed(rest[-2:])
    return first, *rest


def _read_expert(
    files: Sequence[Path], tensor: MappedTensor, expert: int, shard: Shard
) -> StoredWeight:
    (source,) = tensor.sources
    return _MappedSource(files[source.part], source).read((expert, *shard))


def _read(files: Sequence[Path], tensor: MappedTensor, shard: Shard) -> StoredWeight:
    sources = [_MappedSource(files[source.part], source) for source in tensor.sources]
    if tensor.transposed and tensor.is_kept and shard and _is_one(shard[0]):
        # Of one expert: its matrix, which is not transposed.
        matrices = [source.read((shard[0].start,)) for source in sources]
        return rows_in_turns([one for one in matrices if isinstance(one, QuantizedWeight)])
    if len(sources) > 1 or tensor.transposed:
        parts = [source.dequantized(shard[:1]) for source in sources]
        values = torch.stack(parts, dim=2).flatten(1, 2)
        if tensor.transposed:
            values = values.transpose(-1, -2)
        return values[(slice(None), *shard[1:])]
    if tensor.offset:
        return sources[0].dequantized(shard) - tensor.offset
    if tensor.heads is None:
        return sources[0].read(shard)
    rows, *columns = shard or (slice(None),)
    pairs = torch.arange(_shape(tensor)[0]).view(tensor.heads, -1, 2)
    return sources[0].read((pairs.transpose(1, 2).flatten()[rows], *columns))


def _is_one(part: slice) -> bool:
    return part.start is not None and part.stop == part.start + 1


@dataclass(frozen=True)
class _MappedSource:
    """Reads parts of a tensor. Each time the file is mapped anew: pages that were read count as the
    process's memory while they are mapped."""

    file: Path
    tensor: FileTensor

    def read(self, part: tuple[int | slice | Tensor, ...]) -> StoredWeight:
        """`part`: indices of its first dimensions. If it is no matrix in a known type, it is
        dequantized."""
        tensor = self.tensor
        quant, (*rows, size) = QUANTS.get(tensor.kind), tensor.shape
        if quant is None or len(rows) != 1 + sum(isinstance(one, int) for one in part):
            return self.dequantized(part)
        columns = part[len(rows)] if len(part) > len(rows) else slice(None)
        assert isinstance(columns, slice)
        start, stop, _ = columns.indices(size)
        if start % quant.columns or stop % quant.columns:
            raise ModelError(
                f"tensor {tensor.name!r} ({tensor.kind}) is stored in blocks of {quant.columns} "
                f"columns, but a rank's part is from {start} to {stop} of {size}; lower "
                "tensor_parallel_size, or set quantization int8"
            )
        blocks = self._mapped().view(*rows, -1, quant.num_bytes)[part[: len(rows)]]
        return quant.weight(tensor.kind, blocks[:, start // quant.columns : stop // quant.columns])

    def dequantized(self, part: tuple[int | slice | Tensor, ...]) -> Tensor:
        """The same in float32; in its own type if that is none of few bits."""
        tensor, raw = self.tensor, self._mapped()
        if tensor.kind in _PLAIN:
            return raw.view(_PLAIN[tensor.kind]).view(tensor.shape)[part]
        num_leading = len(tensor.shape) - 1
        data = raw.view(*tensor.shape[:-1], -1)[part[:num_leading]]
        values: Tensor = _dequantize(tensor.kind, data)[(..., *part[num_leading:])]
        return values

    def _mapped(self) -> Tensor:
        start, size = self.tensor.start, self.tensor.num_bytes
        before = start % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb") as file:
            # Copy on write, because torch knows no memory that is read alone.
            mapped = mmap.mmap(
                file.fileno(), before + size, access=mmap.ACCESS_COPY, offset=start - before
            )
        return torch.frombuffer(mapped, dtype=torch.uint8, offset=before, count=size)


def _dequantize(kind: str, data: Tensor) -> Tensor:
    """float32 [..., columns] of the bytes of rows, uint8 [..., n]."""
    if quant := QUANTS.get(kind):
        blocks = data.unflatten(-1, (-1, quant.num_bytes))
        weight = quant.weight(kind, blocks.flatten(0, -3))
        return weight.dequantized(torch.float32).view(*data.shape[:-1], -1)
    import gguf  # few files need it

    values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(values)
