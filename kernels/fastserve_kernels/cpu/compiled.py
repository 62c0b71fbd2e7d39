"""The C++ kernels as Python calls: argument types, pointers and strides, nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastserve_kernels.activations import ACTIVATIONS, Activation
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.common_beginnings import CommonBeginnings
from fastserve_kernels.cpu.builder import BuildError, build
from fastserve_kernels.cpu.operations import Operation, empty, multiple
from fastserve_kernels.cpu.program import Run
from fastserve_kernels.int8_cache import is_int8
from fastserve_kernels.routes import Routes
from fastserve_kernels.routing_rule import RoutingRule

_OPERATIONS = {
    "fs_paged_decode": "2q9P13q2d",
    "fs_paged_prefill": "2q8P13q2d",
    "fs_linear": "q4P5q",
    "fs_int8_linear": "q5P5q",
    "fs_grouped_linear": "q6P6q",
    "fs_grouped_int8_linear": "q7P5q",
    "fs_quantized_linear": "q2Pq2P4q",
    "fs_quantized_rows": "qPq2P3q",
    "fs_sort_choices": "4P4q",
    "fs_sum_choices": "q5P4q",
}
"""Operations and the types of their arguments, see `Operation`."""
_OPERATIONS_BY_ROW = {
    "fs_lookup_rows": "3P5q",
    "fs_take_columns": "q3P3q",
    "fs_zero_rows": "P2q",
    "fs_add": "q3P4q",
    "fs_scale": "qP3qd",
    "fs_scale_rows": "q2P3q",
    "fs_scale_by_sigmoid": "q2P4q",
    "fs_clamp": "qP3qd",
    "fs_soft_cap": "qP3qd",
    "fs_activate": "q2P4q",
    "fs_activate_mul": "q2P4q",
    "fs_clamped_swiglu": "q2P3q2d",
    "fs_kv_write": "4P12q",
    "fs_int8_kv_write": "q4P12q",
    "fs_add_layer_norm": "q6P4qd",
    "fs_add_rms_norm": "q5P4q2d",
    "fs_rms_norm_heads": "q2P5q2d",
    "fs_rotate": "q2P5q",
    "fs_choose": "q4P8q2d",
    "fs_greedy_tokens": "q3P3q",
}
_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "fs_run": (None, [_POINTER, _INT, _POINTER]),
    "fs_thread_ids": (None, [_POINTER, _INT]),
    "fs_packed_size": (_INT, [_INT] * 3),
    "fs_pack_weight": (None, [_INT] + [_POINTER] * 2 + [_INT] * 3),
    "fs_pack_int8_weight": (None, [_INT] + [_POINTER] * 2 + [_INT] * 3),
    "fs_quantized_bytes": (_INT, [_INT, _POINTER, _INT]),
    "fs_pack_quantized": (None, [_INT] + [_POINTER] * 7 + [_INT] * 2),
    "fs_rounds_rows": (_INT, [_INT, _POINTER, _INT, _INT]),
}
_NO_WINDOW = 2**62
_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class CompiledKernels:
    """The loaded library.

    Tensors are on the CPU, and all of one call are float32 or all bfloat16. The cache has that
    dtype or is int8 (see `int8_cache`). Work is divided among torch's own OpenMP threads
    (`torch.set_num_threads`).
    """

    def __init__(self, library: Path) -> None:
        """Raises BuildError if the library cannot be loaded."""
        self.path = library
        try:
            functions = ctypes.CDLL(str(library))
        except OSError as error:
            raise BuildError(f"{library} cannot be loaded: {error}") from error
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(functions, name)
            function.restype, function.argtypes = result, arguments

        def operation(name: str) -> Operation:
            is_by_row = name in _OPERATIONS_BY_ROW
            types = (_OPERATIONS_BY_ROW if is_by_row else _OPERATIONS)[name]
            return Operation(getattr(functions, name), types, is_by_row)

        self.run_program: Run = functions.fs_run
        """For `Program`."""
        self._thread_ids = functions.fs_thread_ids

        self._kv_write = operation("fs_kv_write")
        self._int8_kv_write = operation("fs_int8_kv_write")
        self._paged_decode = operation("fs_paged_decode")
        self._paged_prefill = operation("fs_paged_prefill")
        self._add_layer_norm = operation("fs_add_layer_norm")
        self._add_rms_norm = operation("fs_add_rms_norm")
        self._rms_norm_heads = operation("fs_rms_norm_heads")
        self._rotate = operation("fs_rotate")
        self._lookup_rows = operation("fs_lookup_rows")
        self._take_columns = operation("fs_take_columns")
        self._zero_rows = operation("fs_zero_rows")
        self._add = operation("fs_add")
        self._scale = operation("fs_scale")
        self._scale_rows = operation("fs_scale_rows")
        self._scale_by_sigmoid = operation("fs_scale_by_sigmoid")
        self._clamp = operation("fs_clamp")
        self._soft_cap = operation("fs_soft_cap")
        self._activate = operation("fs_activate")
        self._activate_mul = operation("fs_activate_mul")
        self._clamped_swiglu = operation("fs_clamped_swiglu")
        self._choose = operation("fs_choose")
        self._sort_choices = operation("fs_sort_choices")
        self._sum_choices = operation("fs_sum_choices")
        self._greedy_tokens = operation("fs_greedy_tokens")
        self._packed_size = functions.fs_packed_size
        self._pack_weight = functions.fs_pack_weight
        self._pack_int8_weight = functions.fs_pack_int8_weight
        self._linear = operation("fs_linear")
        self._int8_linear = operation("fs_int8_linear")
        self._grouped_linear = operation("fs_grouped_linear")
        self._grouped_int8_linear = operation("fs_grouped_int8_linear")
        self._quantized_bytes = functions.fs_quantized_bytes
        self._pack_quantized = functions.fs_pack_quantized
        self._rounds_rows = functions.fs_rounds_rows
        self._quantized_linear = operation("fs_quantized_linear")
        self._quantized_rows = operation("fs_quantized_rows")

    @classmethod
    def load(cls) -> CompiledKernels:
        """Load the library. Build it first if the cache has none or a damaged one.

        Raises BuildError.
        """
        library = build()
        try:
            return cls(library)
        except BuildError:
            with suppress(OSError):  # then the build fails too, and says why
                library.unlink()
            return cls(build())

    def thread_ids(self) -> list[int]:
        """See `ops.thread_ids`."""
        ids = (_INT * torch.get_num_threads())()
        self._thread_ids(ids, len(ids))
        return list(ids)

    def kv_write(self, kv: Tensor, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """See `ops.kv_write`."""
        _, layers, _, kv_heads, block_size, width = kv.shape
        tokens, _, key_dim = key.shape
        value_dim = value.size(2)
        key_t, key_h, _ = key.stride()
        value_t, value_h, _ = value.stride()
        if is_int8(kv):
            self._int8_kv_write(
                _DTYPE_CODES[key.dtype], kv.data_ptr(), key.data_ptr(), value.data_ptr(),
                slots.data_ptr(), tokens, kv_heads, key_dim, value_dim, width, block_size,
                layers, layer, key_t, key_h, value_t, value_h,
            )  # fmt: skip
            return
        item = kv.element_size()
        self._kv_write(
            kv.data_ptr(), key.data_ptr(), value.data_ptr(), slots.data_ptr(), tokens,
            kv_heads, key_dim * item, value_dim * item, width * item, block_size, layers, layer,
            key_t * item, key_h * item, value_t * item, value_h * item,
        )  # fmt: skip

    def paged_decode(
        self, query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_starts: Tensor,
        context_lens: Tensor, rule: AttentionRule, out: Tensor,
        beginnings: CommonBeginnings | None = None,
    ) -> None:  # fmt: skip
        """See `ops.paged_decode`."""
        _, layers, _, kv_heads, block_size, width = kv.shape
        tokens, heads, key_dim = query.shape
        stride_t, stride_h, _ = query.stride()
        order, common = beginnings or (None, None)
        self._paged_decode(
            _DTYPE_CODES[query.dtype], _DTYPE_CODES[kv.dtype], query.data_ptr(), kv.data_ptr(),
            out.data_ptr(), block_tables.data_ptr(), table_starts.data_ptr(),
            context_lens.data_ptr(), _address(order), _address(common), _address(rule.sinks),
            tokens, heads, kv_heads, key_dim, out.size(2), width, block_size, layers, layer,
            stride_t, stride_h, out.stride(0),
            rule.window or _NO_WINDOW, rule.scale, rule.soft_cap or 0.0,
        )  # fmt: skip

    def paged_prefill(
        self, query: Tensor, kv: Tensor, layer: int, block_tables: Tensor, table_starts: Tensor,
        context_lens: Tensor, query_starts: Tensor, rule: AttentionRule, out: Tensor,
    ) -> None:  # fmt: skip
        """See `ops.paged_prefill`."""
        _, layers, _, kv_heads, block_size, width = kv.shape
        _, heads, key_dim = query.shape
        stride_t, stride_h, _ = query.stride()
        self._paged_prefill(
            _DTYPE_CODES[query.dtype], _DTYPE_CODES[kv.dtype], query.data_ptr(), kv.data_ptr(),
            out.data_ptr(), block_tables.data_ptr(), table_starts.data_ptr(),
            context_lens.data_ptr(), query_starts.data_ptr(),
            _address(rule.sinks), len(context_lens),
            heads, kv_heads, key_dim, out.size(2), width, block_size, layers, layer,
            stride_t, stride_h, out.stride(0),
            rule.window or _NO_WINDOW, rule.scale, rule.soft_cap or 0.0,
        )  # fmt: skip

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See `ops.add_layer_norm`."""
        rows, size = x.shape
        total, normed = empty((rows, size), x.dtype), empty((rows, size), x.dtype)
        self._add_layer_norm(
            _DTYPE_CODES[x.dtype], x.data_ptr(), residual.data_ptr(),
            _address(weight),
            _address(bias),
            total.data_ptr(), normed.data_ptr(), rows, size, x.stride(0), residual.stride(0), eps,
        )  # fmt: skip
        return total, normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float
    ) -> tuple[Tensor, Tensor]:
        """See `ops.add_rms_norm`."""
        rows, size = x.shape
        total, normed = empty((rows, size), x.dtype), empty((rows, size), x.dtype)
        self._add_rms_norm(
            _DTYPE_CODES[x.dtype], x.data_ptr(), residual.data_ptr(), weight.data_ptr(),
            total.data_ptr(), normed.data_ptr(), rows, size, x.stride(0), residual.stride(0), eps,
            shift,
        )  # fmt: skip
        return total, normed

    def rms_norm_heads(self, x: Tensor, weight: Tensor, eps: float, shift: float) -> None:
        """See `ops.rms_norm_heads`."""
        tokens, heads, head_dim = x.shape
        stride_t, stride_h, _ = x.stride()
        self._rms_norm_heads(
            _DTYPE_CODES[x.dtype], x.data_ptr(), weight.data_ptr(), tokens, heads, head_dim,
            stride_t, stride_h, eps, shift,
        )  # fmt: skip

    def rotate(self, x: Tensor, cos_sin: Tensor) -> None:
        """See `ops.rotate`."""
        tokens, heads, _ = x.shape
        stride_t, stride_h, _ = x.stride()
        self._rotate(
            _DTYPE_CODES[x.dtype], x.data_ptr(), cos_sin.data_ptr(), tokens, heads,
            cos_sin.shape[1] // 2, stride_t, stride_h,
        )  # fmt: skip

    def lookup_rows(self, table: Tensor, ids: Tensor, first: int, *, is_whole: bool) -> Tensor:
        """See `ops.lookup_rows`; without `is_whole` see `ops.lookup_part`."""
        num_rows, size = table.shape
        out = empty((len(ids), size), table.dtype)
        self._lookup_rows(
            out.data_ptr(), table.data_ptr(), ids.data_ptr(), len(ids),
            size * table.element_size(), num_rows, first, is_whole,
        )  # fmt: skip
        return out

    def take_columns(self, x: Tensor, columns: Tensor) -> Tensor:
        """See `ops.take_columns`."""
        rows, size = len(x), len(columns)
        out = empty((rows, size), x.dtype)
        self._take_columns(
            _DTYPE_CODES[x.dtype], out.data_ptr(), x.data_ptr(), columns.data_ptr(), rows, size,
            x.stride(0),
        )  # fmt: skip
        return out

    def zeros_like(self, x: Tensor) -> Tensor:
        """See `ops.zeros_like`."""
        rows, size = x.shape
        out = empty((rows, size), x.dtype)
        self._zero_rows(out.data_ptr(), rows, size * x.element_size())
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """See `ops.add`."""
        rows, size = x.shape
        out = empty((rows, size), x.dtype)
        self._add(
            _DTYPE_CODES[x.dtype], x.data_ptr(), y.data_ptr(), out.data_ptr(), rows, size,
            x.stride(0), y.stride(0),
        )  # fmt: skip
        return out

    def scale_(self, x: Tensor, factor: float) -> Tensor:
        """See `ops.scale_`."""
        return _in_place(self._scale, x, factor)

    def scale_rows_(self, x: Tensor, factors: Tensor) -> Tensor:
        """See `ops.scale_rows_`."""
        rows, size = x.shape
        self._scale_rows(
            _DTYPE_CODES[x.dtype], x.data_ptr(), factors.data_ptr(), rows, size, x.stride(0)
        )
        return x

    def scale_by_sigmoid_(self, x: Tensor, gates: Tensor) -> Tensor:
        """See `ops.scale_by_sigmoid_`."""
        rows, size = x.shape
        self._scale_by_sigmoid(
            _DTYPE_CODES[x.dtype], x.data_ptr(), gates.data_ptr(), rows, size, x.stride(0),
            gates.stride(0),
        )  # fmt: skip
        return x

    def clamp_(self, x: Tensor, limit: float) -> Tensor:
        """See `ops.clamp_`."""
        return _in_place(self._clamp, x, limit)

    def soft_cap_(self, x: Tensor, cap: float) -> Tensor:
        """See `ops.soft_cap_`."""
        return _in_place(self._soft_cap, x, cap)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        """See `ops.activate`."""
        rows, size = x.shape
        out = empty((rows, size), x.dtype)
        self._activate(
            _DTYPE_CODES[x.dtype], x.data_ptr(), out.data_ptr(), rows, size, x.stride(0),
            ACTIVATIONS.index(activation),
        )  # fmt: skip
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        """See `ops.silu_mul`."""
        return self.activate_mul(x, "silu")

    def gelu_tanh_mul(self, x: Tensor) -> Tensor:
        """See `ops.gelu_tanh_mul`."""
        return self.activate_mul(x, "gelu_tanh")

    def activate_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """See `ops.activate_mul`."""
        return _gate_mul(self._activate_mul, x, ACTIVATIONS.index(activation))

    def clamped_swiglu(self, x: Tensor, alpha: float, limit: float) -> Tensor:
        """See `ops.clamped_swiglu`."""
        return _gate_mul(self._clamped_swiglu, x, alpha, limit)

    def choose(
        self, scores: Tensor, choices: int, rule: RoutingRule, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `ops.choose`."""
        rows, count = scores.shape
        weights, chosen = empty((rows, choices), torch.float32), empty((rows, choices), torch.int64)
        self._choose(
            _DTYPE_CODES[scores.dtype], scores.data_ptr(), 0 if bias is None else bias.data_ptr(),
            weights.data_ptr(), chosen.data_ptr(), rows, count, choices, scores.stride(0),
            rule.scoring == "sigmoid", rule.renormalises, rule.groups, rule.chosen_groups,
            rule.factor, -1.0 if rule.margin is None else rule.margin,
        )  # fmt: skip
        return weights, chosen

    def sort_choices(self, experts: Tensor, first: int, count: int) -> Routes:
        """See `ops.sort_choices`. experts: contiguous."""
        num_tokens, choices = experts.shape
        tokens = empty((multiple(num_tokens, choices),), torch.int32)
        starts = empty((count + 1,), torch.int32)
        places = empty((num_tokens, choices), torch.int32)
        self._sort_choices(
            experts.data_ptr(), tokens.data_ptr(), starts.data_ptr(), places.data_ptr(),
            num_tokens, choices, first, count,
        )  # fmt: skip
        return Routes(tokens, starts, places)

    def sum_choices(self, y: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        """See `ops.sum_choices`."""
        num_tokens, choices = weights.shape
        size = y.shape[1]
        out = empty((num_tokens, size), y.dtype)
        self._sum_choices(
            _DTYPE_CODES[y.dtype], y.data_ptr(), weights.data_ptr(), routes.places.data_ptr(),
            routes.starts.data_ptr(), out.data_ptr(), num_tokens, choices, size,
            len(routes.starts) - 1,
        )  # fmt: skip
        return out

    def greedy_tokens(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """See `ops.greedy_tokens`."""
        rows, size = logits.shape
        token_ids, answers = empty((rows,), torch.int64), empty((rows,), torch.int64)
        self._greedy_tokens(
            _DTYPE_CODES[logits.dtype], logits.data_ptr(), token_ids.data_ptr(),
            answers.data_ptr(), rows, size, logits.stride(0),
        )  # fmt: skip
        return token_ids, answers

    def packed_size(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Elements of a packed weight for x of `dtype`."""
        return int(self._packed_size(_DTYPE_CODES[dtype], out_features, in_features))

    def pack_weight(self, weight: Tensor, panels: Tensor | None = None) -> Tensor:
        """Pack weight [out, in], rows contiguous. The result is opaque, for `linear`.

        panels: contiguous, of `packed_size`, to pack into.
        """
        out, size = weight.shape
        if panels is None:
            panels = torch.empty(self.packed_size(out, size, weight.dtype), dtype=weight.dtype)
        self._pack_weight(
            _DTYPE_CODES[weight.dtype], weight.data_ptr(), panels.data_ptr(), out, size,
            weight.stride(0),
        )  # fmt: skip
        return panels

    def linear(
        self, x: Tensor, panels: Tensor, bias: Tensor | None, out_features: int, relu: bool
    ) -> Tensor:
        """Multiply x [T, in], rows contiguous, by the packed weight: [T, out_features]."""
        rows, size = x.shape
        y = empty((rows, out_features), x.dtype)
        self._linear(
            _DTYPE_CODES[x.dtype], x.data_ptr(), panels.data_ptr(),
            _address(bias), y.data_ptr(), rows, size, out_features,
            x.stride(0), relu,
        )  # fmt: skip
        return y

    def pack_int8_weight(
        self, codes: Tensor, dtype: torch.dtype, panels: Tensor | None = None
    ) -> Tensor:
        """Pack int8 codes [out, in] from -127 to 127, rows contiguous. The result is opaque, for
        `int8_linear` with x of `dtype`.

        panels: as in `pack_weight`.
        """
        out, size = codes.shape
        if panels is None:
            panels = torch.empty(self.packed_size(out, size, dtype), dtype=torch.int8)
        self._pack_int8_weight(
            _DTYPE_CODES[dtype], codes.data_ptr(), panels.data_ptr(), out, size, codes.stride(0)
        )
        return panels

    def int8_linear(
        self,
        x: Tensor,
        panels: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        out_features: int,
        relu: bool,
    ) -> Tensor:
        """As `linear`, with a packed int8 weight.

        scale: [out_features], contiguous, of x's dtype, a factor for each row of the weight.
        """
        rows, size = x.shape
        y = empty((rows, out_features), x.dtype)
        self._int8_linear(
            _DTYPE_CODES[x.dtype], x.data_ptr(), panels.data_ptr(), scale.data_ptr(),
            _address(bias), y.data_ptr(), rows, size, out_features,
            x.stride(0), relu,
        )  # fmt: skip
        return y

    def grouped_linear(
        self,
        x: Tensor,
        starts: Tensor,
        rows: Tensor | None,
        pieces: Tensor,
        biases: Tensor | None,
        out_features: int,
    ) -> Tensor:
        """See `GroupedLinear`. x: rows contiguous.

        pieces: int64 [groups, most pieces of a group, 10], contiguous, see `QuantizedPanels`.
            Unused ones are zeros.
        biases: [groups, out_features], contiguous, of x's dtype.
        """
        y = empty((len(x) if rows is None else len(rows), out_features), x.dtype)
        groups, most_pieces, _ = pieces.shape
        self._grouped_linear(
            _DTYPE_CODES[x.dtype], x.data_ptr(), _address(rows), starts.data_ptr(),
            pieces.data_ptr(), _address(biases), y.data_ptr(), len(y), groups, most_pieces,
            x.shape[1], out_features, x.stride(0),
        )  # fmt: skip
        return y

    def grouped_int8_linear(
        self,
        x: Tensor,
        starts: Tensor,
        rows: Tensor | None,
        panels: Tensor,
        scales: Tensor,
        biases: Tensor | None,
    ) -> Tensor:
        """The same with packed int8 weights.

        panels: int8 [groups, packed_size].
        scales: [groups, out_features], contiguous, of x's dtype.
        """
        groups, out_features = scales.shape
        y = empty((len(x) if rows is None else len(rows), out_features), x.dtype)
        self._grouped_int8_linear(
            _DTYPE_CODES[x.dtype], x.data_ptr(), _address(rows), starts.data_ptr(),
            panels.data_ptr(), scales.data_ptr(), _address(biases), y.data_ptr(), len(y), groups,
            x.shape[1], out_features, x.stride(0),
        )  # fmt: skip
        return y

    def quantized_bytes(self, piece: Tensor, in_features: int, dtype: torch.dtype) -> int:
        """Bytes of a packed piece for x of `dtype`. See `quantized_panels` for `piece`."""
        return int(self._quantized_bytes(_DTYPE_CODES[dtype], piece.data_ptr(), in_features))

    def pack_quantized(
        self,
        piece: Tensor,
        codes: Tensor,
        numbers: Sequence[Tensor | None],
        dtype: torch.dtype,
        panels: Tensor,
    ) -> None:
        """Pack a weight into `panels`, of `quantized_bytes`.

        codes: [out, in], bytes, rows contiguous.
        numbers: scales, their steps, offsets, their steps, contiguous, as `piece` tells.
        """
        self._pack_quantized(
            _DTYPE_CODES[dtype], piece.data_ptr(), codes.data_ptr(),
            *(None if one is None else one.data_ptr() for one in numbers),
            panels.data_ptr(), codes.shape[1], codes.stride(0),
        )  # fmt: skip

    def rounds_rows(self, pieces: Tensor, in_features: int, dtype: torch.dtype) -> bool:
        """Whether `quantized_linear` rounds rows of `dtype` for these pieces."""
        code = _DTYPE_CODES[dtype]
        return bool(self._rounds_rows(code, pieces.data_ptr(), len(pieces), in_features))

    def quantized_linear(
        self, x: Tensor, pieces: Tensor, bias: Tensor | None, out_features: int, relu: bool
    ) -> Tensor:
        """As `linear`, with a weight that is pieces of few bits."""
        rows, size = x.shape
        y = empty((rows, out_features), x.dtype)
        self._quantized_linear(
            _DTYPE_CODES[x.dtype], x.data_ptr(), pieces.data_ptr(), len(pieces),
            _address(bias), y.data_ptr(), rows, size, x.stride(0), relu,
        )  # fmt: skip
        return y

    def quantized_rows(
        self, pieces: Tensor, ids: Tensor, in_features: int, dtype: torch.dtype, first: int
    ) -> Tensor:
        """Dequantized rows of a weight that is pieces of few bits: [T, in_features] of `dtype`.

        ids: int64 [T], contiguous. Those of no row give zeros.
        first: the id of the first row.
        """
        y = empty((len(ids), in_features), dtype)
        self._quantized_rows(
            _DTYPE_CODES[dtype], pieces.data_ptr(), len(pieces), ids.data_ptr(), y.data_ptr(),
            len(ids), in_features, first,
        )  # fmt: skip
        return y


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _in_place(operation: Operation, x: Tensor, number: float) -> Tensor:
    rows, size = x.shape
    operation(_DTYPE_CODES[x.dtype], x.data_ptr(), rows, size, x.stride(0), number)
    return x


def _gate_mul(operation: Operation, x: Tensor, *more: float) -> Tensor:
    rows, double = x.shape
    out = empty((rows, double // 2), x.dtype)
    operation(
        _DTYPE_CODES[x.dtype], x.data_ptr(), out.data_ptr(), rows, double // 2, x.stride(0), *more
    )
    return out
