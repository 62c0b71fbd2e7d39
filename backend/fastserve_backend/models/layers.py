"""Building blocks that the architectures share: linear layers, embeddings, norms.

Activations are token-major, [T, ...], with all jobs' tokens flattened. A block names the checkpoint
tensors that it needs (`parameters`) and is usable when it has got all of them. For inference only:
the caller runs everything under `torch.inference_mode`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from fastserve_kernels import ops
from fastserve_kernels.quantized_weight import QuantizedWeight
from fastserve_kernels.weight_quantization import row_magnitudes
from torch import Tensor

from fastserve_backend.models.int4_rounding import int4_group
from fastserve_backend.models.model_part import ModelPart
from fastserve_backend.models.weights import Parameter, StoredWeight


class Linear:
    """A linear layer, whole on every rank. It is packed for the device when its tensors are there.

    Args:
        parts: checkpoint layers, name -> out features. They are stacked in this order, so that one
            multiplication computes them all (such as query, key and value).
        relu: apply ReLU to the output.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        part: ModelPart,
        relu: bool = False,
    ) -> None:
        self._in_features = in_features
        self._parts = dict(parts)
        self._part = part
        self._has_bias, self._relu = bias, relu
        self._waiting = len(parts) * (2 if bias else 1)
        self._weights: dict[str, StoredWeight] = {}
        """This rank's part of the checkpoint layers, by name."""
        self._bias: Tensor | None = None
        self._magnitudes: Tensor | None = None
        """Of whole rows, if the weight has only some of their columns."""
        self._packed: Callable[[Tensor], Tensor] | None = None
        self._group = 0
        if part.quantization == "int4":
            self._group = int4_group(parts, self._columns())

    def parameters(self) -> dict[str, Parameter]:
        """The needed tensors: "part.weight" [out, in] and "part.bias" [out]."""
        wanted: dict[str, Parameter] = {}
        columns = self._columns()
        start = 0
        for part, size in self._parts.items():
            rows = self._rows(size)
            count = rows.stop - rows.start
            target = slice(start, start + count)
            wanted[f"{part}.weight"] = Parameter(
                (size, self._in_features),
                partial(self._take_weight, part, target),
                shard=(rows, columns),
                takes_quantized=True,
            )
            if self._has_bias:
                wanted[f"{part}.bias"] = Parameter(
                    (size,), partial(self._take_bias, target), shard=(rows,)
                )
            start += count
        return wanted

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        assert self._packed is not None, "weights are not loaded"
        return self._packed(x)

    def tie(self, table: Tensor | ops.QuantizedLinear) -> None:
        """Use `table` [out, in] as the weight. It is shared if the device allows that, and the
        embedding's own copy stays as it is."""
        if isinstance(table, ops.QuantizedLinear):
            self._packed = table
        else:
            self._packed = self._pack([table], None)

    def _rows(self, size: int) -> slice:
        """This rank's part of `size` out features."""
        return slice(0, size)

    def _columns(self) -> slice:
        """This rank's part of the in features."""
        return slice(0, self._in_features)

    def _empty(self, *more: int) -> Tensor:
        rows = [self._rows(size) for size in self._parts.values()]
        height = sum(one.stop - one.start for one in rows)
        return torch.empty(height, *more, dtype=self._part.dtype, device=self._part.device)

    def _take_weight(self, name: str, rows: slice, weight: StoredWeight) -> None:
        """rows: where the part is in the stacked weight."""
        if isinstance(weight, QuantizedWeight) and self._part.rounds_weights:
            weight = weight.dequantized(self._part.dtype)
        if isinstance(weight, Tensor):
            weight = weight.to(self._part.device, self._part.dtype)
        self._weights[name] = weight
        self._pack_when_complete()

    def _take_bias(self, rows: slice, tensor: Tensor) -> None:
        if self._bias is None:
            self._bias = self._empty()
        self._bias[rows] = tensor
        self._pack_when_complete()

    def _pack_when_complete(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._packed = self._pack([self._weights[name] for name in self._parts], self._bias)
            # Only the packed form stays.
            self._weights.clear()
            self._bias = self._magnitudes = None

    def _pack(
        self, weights: Sequence[StoredWeight], bias: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        part = self._part
        plain = [one for one in weights if isinstance(one, Tensor)]
        if part.quantization == "int4":
            weights, plain = [part.int4_rounding(one, self._group) for one in plain], []
        if len(plain) < len(weights):
            weights, order = _in_one_order(weights, part)
            packed = ops.QuantizedLinear(
                weights, bias, self._relu, dtype=part.dtype, device=part.device
            )
            return packed if order is None else lambda x: packed(ops.take_columns(x, order))
        weight = plain[0] if len(plain) == 1 else torch.cat(plain)
        if part.quantization == "int8":
            return ops.Int8Linear(weight, bias, self._relu, self._magnitudes)
        return ops.PackedLinear(weight, bias, self._relu)


def _in_one_order(
    weights: Sequence[StoredWeight], part: ModelPart
) -> tuple[Sequence[StoredWeight], Tensor | None]:
    """The weights, with columns in one order of x's. If theirs differ, reordered ones are
    dequantized. Layers with the same input are mostly quantized in the same order."""
    orders = [None if isinstance(one, Tensor) else one.order for one in weights]
    first, *others = orders
    if first is not None and all(one is not None and torch.equal(one, first) for one in others):
        same = [replace(one, order=None) for one in weights if isinstance(one, QuantizedWeight)]
        return same, first.to(part.device)
    return [
        one
        if isinstance(one, Tensor) or one.order is None
        else one.dequantized(part.dtype).to(part.device)
        for one in weights
    ], None


class ColumnLinear(Linear):
    """A linear layer whose out features are divided among the ranks: x [T, in] -> this rank's
    [T, out / ranks].

    Each of `parts` is divided by itself. Query, key and value must be divided between heads
    (`partition.check_parallel`).
    """

    def _rows(self, size: int) -> slice:
        return self._part.tensor.part(size)


class RowLinear(Linear):
    """A linear layer whose in features are divided among the ranks: this rank's [T, in / ranks] ->
    [T, out], summed over the ranks.

    It follows a `ColumnLinear`, which divides its out features in the same way. Only the first rank
    adds the bias, so that the sum has it once. To quantize, each rank reads whole rows, so that
    their scales are those of an undivided layer.

    Args:
        reduce: False leaves the sum to the caller.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool,
        part: ModelPart,
        reduce: bool = True,
    ) -> None:
        super().__init__(in_features, parts, bias=bias, part=part)
        self._reduce = reduce

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        return self._part.tensor.sum(y) if self._reduce else y

    def _columns(self) -> slice:
        if self._reads_whole_rows:
            return super()._columns()
        return self._part.tensor.part(self._in_features)

    @property
    def _reads_whole_rows(self) -> bool:
        return self._part.quantization == "int8" and self._part.tensor.size > 1

    def _take_weight(self, name: str, rows: slice, weight: StoredWeight) -> None:
        if self._reads_whole_rows:
            if isinstance(weight, QuantizedWeight):
                weight = weight.dequantized(self._part.dtype)
            if self._magnitudes is None:
                self._magnitudes = self._empty()
            self._magnitudes[rows] = row_magnitudes(weight.to(self._part.dtype))
            weight = weight[:, self._part.tensor.part(self._in_features)]
        super()._take_weight(name, rows, weight)

    def _take_bias(self, rows: slice, tensor: Tensor) -> None:
        if self._part.tensor.is_first:
            super()._take_bias(rows, tensor)
        else:
            self._pack_when_complete()


class Embedding:
    """A table of rows, [rows, width], whole on every rank.

    Args:
        first_id: the id of the first row.
    """

    def __init__(self, rows: int, width: int, *, part: ModelPart, first_id: int = 0) -> None:
        self._shape = (rows, width)
        self._first_id = first_id
        self._part = part
        self._table: Tensor | ops.QuantizedLinear | None = None

    def parameters(self) -> dict[str, Parameter]:
        return {"weight": Parameter(self._shape, self._take, takes_quantized=True)}

    @property
    def table(self) -> Tensor | ops.QuantizedLinear:
        """[rows, width]. A quantized table is a linear layer too, so that a tied LM head needs no
        copy of it."""
        assert self._table is not None, "weights are not loaded"
        return self._table

    def __call__(self, ids: Tensor) -> Tensor:
        """ids int64 [T] -> [T, width]."""
        table = self.table
        if isinstance(table, Tensor):
            return ops.lookup_rows(table, ids, self._first_id)
        return table.rows(ids, self._first_id or None)

    def _take(self, weight: StoredWeight) -> None:
        part = self._part
        if isinstance(weight, QuantizedWeight) and (
            part.rounds_weights or weight.order is not None
        ):
            weight = weight.dequantized(part.dtype)
        if isinstance(weight, QuantizedWeight):
            self._table = ops.QuantizedLinear([weight], dtype=part.dtype, device=part.device)
        else:
            # A copy, because lookups in a mapped file would wait for its pages while serving.
            self._table = weight.to(part.device, part.dtype, copy=True)


class VocabEmbedding(Embedding):
    """An embedding whose rows are divided among the ranks. `table` is this rank's part."""

    def __init__(self, rows: int, width: int, *, part: ModelPart) -> None:
        self._rows = part.tensor.part(rows)
        super().__init__(rows, width, part=part)

    def parameters(self) -> dict[str, Parameter]:
        rows = (self._rows,)
        return {"weight": Parameter(self._shape, self._take, rows, takes_quantized=True)}

    def __call__(self, ids: Tensor) -> Tensor:
        if self._part.tensor.size == 1:
            return super().__call__(ids)
        table, first = self.table, self._rows.start
        if isinstance(table, Tensor):
            return self._part.tensor.sum(ops.lookup_part(table, ids, first))
        return self._part.tensor.sum(table.rows(ids, first))


class LayerNorm:
    """Layer normalisation of a sum, [T, width], with a weight and a bias if it has them.

    Args:
        plus_one: the checkpoint has the weight less 1.
    """

    def __init__(
        self,
        width: int,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
        plus_one: bool = False,
        part: ModelPart,
        eps: float = 1e-5,
    ) -> None:
        self._eps = eps
        self._plus_one = plus_one
        empty = partial(torch.empty, width, dtype=part.dtype, device=part.device)
        self._weight = empty() if has_weight else None
        self._bias = empty() if has_bias else None

    def parameters(self) -> dict[str, Parameter]:
        wanted: dict[str, Parameter] = {}
        if self._weight is not None:
            shape = tuple(self._weight.shape)
            wanted["weight"] = Parameter(shape, self._take, is_scale=not self._plus_one)
        if self._bias is not None:
            wanted["bias"] = Parameter(tuple(self._bias.shape), self._bias.copy_)
        return wanted

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, width] -> (their sum, the normalised sum), both [T, width]."""
        return ops.add_layer_norm(x, residual, self._weight, self._bias, self._eps)

    def _take(self, tensor: Tensor) -> None:
        assert self._weight is not None
        self._weight.copy_(tensor)
        if self._plus_one:
            self._weight.add_(1.0)  # rounded to the model's dtype, as in transformers


class RMSNorm:
    """Root-mean-square normalisation.

    Args:
        plus_one: the checkpoint has the weight less 1. It stays so: the sum would be rounded.
        shard: this rank's part of the weight; () is the whole.
    """

    def __init__(
        self,
        width: int,
        *,
        part: ModelPart,
        eps: float,
        plus_one: bool = False,
        shard: tuple[slice, ...] = (),
    ) -> None:
        self._eps, self._width = eps, width
        self._shift = 1.0 if plus_one else 0.0
        self._shard = shard
        self._tensor = part.tensor
        own = len(range(width)[shard[0]]) if shard else width
        self._weight = torch.empty(own, dtype=part.dtype, device=part.device)

    def parameters(self) -> dict[str, Parameter]:
        is_scale = self._shift == 0.0
        return {"weight": Parameter((self._width,), self._weight.copy_, self._shard, is_scale)}

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, width] -> (their sum, the normalised sum), both [T, width]."""
        return ops.add_rms_norm(x, residual, self._weight, self._eps, self._shift)

    def in_place(self, x: Tensor) -> Tensor:
        """x [T, n], rows contiguous: normalise each stretch of ``width`` elements in place. If the
        ranks share the weight, a row is this rank's part of one stretch."""
        own = len(self._weight)
        if own == self._width:
            ops.rms_norm_heads(x.unflatten(1, (-1, own)), self._weight, self._eps, self._shift)
            return x
        squares = self._tensor.sum(x.float().square().sum(dim=1, keepdim=True))
        inverse = (squares / self._width + self._eps).rsqrt()
        return x.copy_(x.float() * inverse * (self._weight.float() + self._shift))


def prefixed(prefix: str, parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The same parameters with `prefix` and a dot in front of their names."""
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}
