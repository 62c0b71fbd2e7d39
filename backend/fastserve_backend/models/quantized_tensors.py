"""Reads the linear layers of quantized checkpoints: joins each layer's tensors to its weight.

A weight [out, in] has a scale and a zero point for each row and each group of columns:
``weight = scale · (code - zero)``. A layer's tensors are, by `StoredQuantization.layout`, with P
codes in a word of 32 bits (the first in the lowest bits) and G groups:

- awq: ``qweight`` [in, out / P], ``scales`` [G, out], ``qzeros`` [G, out / P].
- gptq: ``qweight`` [in / P, out], ``scales`` and ``qzeros`` as above, ``g_idx`` [in], the group of
  each column; without it groups are neighbours.
- packed: ``weight_packed`` [out, in / P], ``weight_scale`` [out, G], ``weight_zero_point``,
  ``weight_shape`` (out and in), ``weight_g_idx``.
- plain: ``weight`` [out, in] in INT8 or FP8, ``weight_scale`` or ``weight_scale_inv`` [out, G],
  ``weight_zero_point``. Several rows, or all, may share a scale.

AWQ puts the outputs of a word in the order 0, 2, 4, 6, 1, 3, 5, 7. In the last two layouts codes
and zero points are signed; in words they have half of their range added. Zero points are
[out / P, G] in words, or [out, G] in INT8.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from math import gcd

import torch
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from torch import Tensor

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.quantization_config import Layout, StoredQuantization
from fastserve_backend.models.weights import (
    Shard,
    StoredTensor,
    StoredWeight,
    WeightSource,
    some_of,
)

_log = logging.getLogger(__name__)

_WORD = 32  # bits
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in a word

_PARTS: Mapping[Layout, frozenset[str]] = {
    "awq": frozenset(("qweight", "qzeros", "scales")),
    "gptq": frozenset(("qweight", "qzeros", "scales", "g_idx")),
    "packed": frozenset(
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    ),
    "plain": frozenset(("weight", "weight_scale", "weight_scale_inv", "weight_zero_point")),
}
# Scales for activations and for caches of few bits, which this package does not round to them.
_OF_ACTIVATIONS = (
    ".input_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
)
# Names of types in safetensors' and torch's words.
_INT32 = ("I32", "torch.int32")
_INT8 = ("I8", "torch.int8")
_FP8 = ("F8_E4M3", "torch.float8_e4m3fn")
_SCALES = ("F16", "BF16", "F32", "torch.float16", "torch.bfloat16", "torch.float32")


def joined_weights(source: WeightSource, stored: StoredQuantization) -> Iterator[StoredTensor]:
    """The source's tensors; those of a quantized layer as one, "<layer>.weight".

    It reads a `QuantizedWeight`, or a tensor if the shard has parts of groups that are not
    neighbours. Tensors of layers that are not quantized pass through.

    Raises:
        ModelError: a layer's tensors are not of the format, or one is missing.
    """
    names = _PARTS[stored.layout]
    layers: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for tensor in source:
        layer, _, part = tensor.name.rpartition(".")
        if part in names:
            layers[layer][part] = tensor
        elif not tensor.name.endswith(_OF_ACTIVATIONS):
            yield tensor
    cut: list[str] = []
    for layer, parts in layers.items():
        weight = parts.get("weight")
        if len(parts) == 1 and weight is not None and weight.dtype not in (*_INT8, *_FP8):
            yield weight
        else:
            yield _Layer(layer, parts, stored, cut).joined()
    if cut:
        _log.warning(
            "columns of a group are spread over all ranks in %s, as in all checkpoints with "
            "desc_act; their weights take as much memory here as unquantized ones",
            some_of(cut),
        )


class _Layer:
    """The tensors of one linear layer.

    Args:
        cut: a list for all layers. Those whose shards are dequantized add their names.
    """

    def __init__(
        self,
        name: str,
        parts: Mapping[str, StoredTensor],
        stored: StoredQuantization,
        cut: list[str],
    ) -> None:
        self._name, self._parts, self._stored, self._cut = name, parts, stored, cut
        self._per_word = _WORD // stored.bits
        self._is_transposed = stored.layout in ("awq", "gptq")
        self._codes = self._codes_tensor()
        self._out, self._in = self._shape()
        self._rows = stored.rows or self._out
        self._columns = stored.columns or self._in
        self._num_groups = -(-self._in // self._columns)
        self._scales = self._scales_tensor()
        self._zeros = self._zeros_tensor()
        self._groups = parts.get("g_idx", parts.get("weight_g_idx"))
        if self._groups is not None:
            self._check(self._groups, (self._in,), _INT32)

    def joined(self) -> StoredTensor:
        name, shape = f"{self._name}.weight", (self._out, self._in)
        return StoredTensor(name, shape, self._stored.format, True, self._read)

    def _read(self, shard: Shard) -> StoredWeight:
        of_rows, of_columns = (*shard, slice(None), slice(None))[:2]
        rows, columns = range(self._out)[of_rows], range(self._in)[of_columns]
        codes = self._read_codes(rows, columns)
        groups = torch.arange(columns.start, columns.stop) // self._columns
        order = None
        # A shard that begins or ends within a group has smaller ones.
        size = gcd(self._columns, columns.start, len(columns))
        if self._num_groups == 1:
            size = len(columns) or 1
        if self._groups is not None:
            own = self._read_groups(columns)
            if not torch.equal(own, groups):
                order = own.argsort(stable=True)
                if not torch.equal(own[order], groups):  # groups have different sizes here
                    self._cut.append(self._name)
                    return self._weight(codes, rows, own, 1, None).dequantized(torch.float32)
                codes = codes[:, order]
        return self._weight(codes, rows, groups[::size], size, order)

    def _weight(
        self, codes: Tensor, rows: range, groups: Tensor, size: int, order: Tensor | None
    ) -> QuantizedWeight:
        """groups: whose numbers each `size` neighbouring columns have."""
        first = int(groups.min()) if len(groups) else 0
        span = range(first, int(groups.max()) + 1 if len(groups) else first)
        scales = self._read_scales(rows, span)[:, groups - first]
        center, offsets = self._center, None
        if self._zeros is not None:
            zeros = self._read_zeros(rows, span)
            center = int(zeros.flatten()[0]) if zeros.numel() else 0
            if not bool((zeros == center).all()):
                center = 0
                offsets = GroupNumbers(-scales.float() * zeros[:, groups - first])
        return QuantizedWeight(
            self._stored.format,
            codes.contiguous(),
            self._stored.bits,
            size,
            GroupNumbers(scales),
            offsets,
            center,
            order,
        )

    @property
    def _center(self) -> int:
        """The zero point of signed codes."""
        return 0 if self._stored.is_float else 1 << (self._stored.bits - 1)

    def _read_codes(self, rows: range, columns: range) -> Tensor:
        """uint8 or FP8 [rows, columns]."""
        read, of_rows = self._codes.read_dequantized, slice(rows.start, rows.stop)
        of_columns = slice(columns.start, columns.stop)
        layout = self._stored.layout
        if layout == "plain":
            codes = read((of_rows, of_columns))
            return codes if self._stored.is_float else codes.view(torch.uint8) ^ 0x80
        if layout == "awq":
            return self._unpacked(lambda words: read((of_columns, words)).T, rows, 0)
        if layout == "gptq":
            return self._unpacked(lambda words: read((words, of_rows)).T, columns, 1)
        return self._unpacked(lambda words: read((of_rows, words)), columns, 1)

    def _read_scales(self, rows: range, groups: range) -> Tensor:
        """[rows, groups]."""
        of_groups = slice(groups.start, groups.stop)
        own = slice(rows.start // self._rows, -(-rows.stop // self._rows))
        if len(self._scales.shape) < 2:
            scales = self._scales.read_dequantized(()).view(-1, 1)[own]
        elif self._is_transposed:
            scales = self._scales.read_dequantized((of_groups, own)).T
        else:
            scales = self._scales.read_dequantized((own, of_groups))
        if self._rows == 1:
            return scales
        return scales[torch.arange(rows.start, rows.stop) // self._rows - own.start]

    def _read_zeros(self, rows: range, groups: range) -> Tensor:
        """int16 [rows, groups], of unsigned codes."""
        assert self._zeros is not None
        read, of_groups = self._zeros.read_dequantized, slice(groups.start, groups.stop)
        if self._zeros.dtype in _INT8:
            return read((slice(rows.start, rows.stop), of_groups)).short() + self._center
        if not self._is_transposed:
            return self._unpacked(lambda words: read((words, of_groups)), rows, 0).short()
        # Added to whole words: carries undo the borrows that the subtraction had.
        ones = sum(1 << bit for bit in range(0, _WORD, self._stored.bits))
        more = ones if self._stored.zeros_less_one else 0
        return self._unpacked(lambda words: read((of_groups, words)).T + more, rows, 0).short()

    def _read_groups(self, columns: range) -> Tensor:
        """int64 [columns]."""
        assert self._groups is not None
        stored = self._groups.read_dequantized((slice(columns.start, columns.stop),))
        groups = stored.long()
        if bool(((groups < 0) | (groups >= self._num_groups)).any()):
            raise ModelError(
                f"checkpoint tensor {self._groups.name} names groups that are not among the "
                f"{self._num_groups} of the layer; does config.json match the weights?"
            )
        return groups

    def _unpacked(self, read: Callable[[slice], Tensor], part: range, dim: int) -> Tensor:
        """Some of the numbers that are packed in dimension `dim` of a matrix, uint8.

        read: reads some words of that dimension.
        """
        first = part.start // self._per_word
        words = read(slice(first, -(-part.stop // self._per_word)))
        words = words.clone(memory_format=torch.contiguous_format)
        by_byte = words.view(torch.uint8).unflatten(1, (-1, 4))  # the lowest byte is first
        numbers = []
        for place in _AWQ_PLACES if self._stored.layout == "awq" else range(self._per_word):
            byte = by_byte[..., place * self._stored.bits // 8]
            if self._stored.bits == 4:
                byte = byte >> 4 if place % 2 else byte & 15
            numbers.append(byte)
        unpacked = torch.stack(numbers, dim + 1).flatten(dim, dim + 1)
        return unpacked.narrow(dim, part.start - first * self._per_word, len(part))

    def _codes_tensor(self) -> StoredTensor:
        layout = self._stored.layout
        if layout == "plain":
            codes = self._part("weight")
            return self._check(codes, None, _FP8 if self._stored.is_float else _INT8)
        codes = self._part("weight_packed" if layout == "packed" else "qweight")
        return self._check(codes, None, _INT32)

    def _shape(self) -> tuple[int, int]:
        """(out, in)."""
        height, width = self._codes.shape
        if self._stored.layout == "awq":
            return width * self._per_word, height
        if self._stored.layout == "gptq":
            return width, height * self._per_word
        if self._stored.layout == "plain":
            return height, width
        # The last word of a row may have fewer codes.
        stored = self._check(self._part("weight_shape"), (2,), None)
        out, size = map(int, stored.read_dequantized(()).tolist())
        self._check(self._codes, (out, -(-size // self._per_word)), _INT32)
        return out, size

    def _scales_tensor(self) -> StoredTensor:
        if self._is_transposed:
            scales = self._part("scales")
        else:
            scales = self._part("weight_scale", "weight_scale_inv")
        shape = (-(-self._out // self._rows), self._num_groups)
        if shape[1] == 1 and scales.shape in ((), shape[:1]):
            return self._check(scales, scales.shape, _SCALES)
        return self._check(scales, shape[::-1] if self._is_transposed else shape, _SCALES)

    def _zeros_tensor(self) -> StoredTensor | None:
        words = -(-self._out // self._per_word)
        if self._is_transposed:
            return self._check(self._part("qzeros"), (self._num_groups, words), _INT32)
        if not self._stored.has_zeros:
            return None
        zeros = self._part("weight_zero_point")
        if zeros.dtype in _INT8:
            return self._check(zeros, (self._out, self._num_groups), _INT8)
        return self._check(zeros, (words, self._num_groups), _INT32)

    def _part(self, *names: str) -> StoredTensor:
        found = next((self._parts[name] for name in names if name in self._parts), None)
        if found is None:
            raise ModelError(
                f"checkpoint lacks {self._name}.{names[0]}, which {self._stored.format} has beside "
                f"{min(self._parts)}; does config.json match the weights, and are all weight files "
                "there?"
            )
        return found

    def _check(
        self, tensor: StoredTensor, shape: tuple[int, ...] | None, dtypes: tuple[str, ...] | None
    ) -> StoredTensor:
        """The tensor, if it has `shape` (None: two dimensions of any size) and one of `dtypes`."""
        if dtypes is not None and tensor.dtype not in dtypes:
            raise ModelError(
                f"checkpoint tensor {tensor.name} is {tensor.dtype}, but {self._stored.format} has "
                f"{' or '.join(dtypes[: len(dtypes) // 2])} there; does config.json match the "
                "weights?"
            )
        fits = len(tensor.shape) == 2 if shape is None else tensor.shape == shape
        if not fits:
            stored = self._stored
            raise ModelError(
                f"checkpoint tensor {tensor.name} has shape {tensor.shape}, but {stored.format} "
                f"with {stored.bits} bits and groups of {stored.columns or 'all'} columns asks for "
                f"{'two dimensions' if shape is None else shape}"
            )
        return tensor
