"""Speed of the kernels that pass once over their input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from fastserve_kernels import ops
from fastserve_kernels.gpu import activations, cache_writes, kv_int8, norms
from torch import Tensor

from benchmarks.gpu.ceilings import read_rate
from benchmarks.gpu.check_device import Call
from benchmarks.gpu.phase_context import Context

ROWS = (64, 2048)
"""Rows, in tokens: a decode batch, and a prefill."""
HIDDEN, FEED_FORWARD, HEADS, HEAD_DIM, LAYERS = 5120, 20480, 40, 128, 40  # of OPT-13B
VOCABULARY = 50272
BLOCK_SIZE = 16
INT8_BLOCKS = 16
DTYPE = torch.bfloat16

MakeCall = Callable[[], tuple[Call, Sequence[Tensor]]]
"""A call on new random inputs, and the tensors that it reads or writes once."""


def run(context: Context) -> None:
    rate, _ = read_rate(context.device)
    for rows in (3,) if context.tiny else (1, 16, *ROWS):
        _int8_linear_against_dense(context, rows, rate)
    for rows in (3,) if context.tiny else ROWS:
        speed = _Speed(context, rate, rows)
        for name, make in speed.kernels().items():
            speed.measure(name, make)
    speed = _Speed(context, rate, 2 if context.tiny else ROWS[0])
    speed.measure("greedy_tokens", speed.argmax)
    for name, make in _int8(context).items():
        speed.measure(name, make)


class _Speed:
    """Times kernels on ``rows`` rows of OPT-13B's sizes, or of much smaller ones in a dry run."""

    def __init__(self, context: Context, read_bytes_s: float, rows: int) -> None:
        self._context, self._rate, self._rows = context, read_bytes_s, rows
        self._device = context.device.torch_device
        self._hidden, self._wide, self._heads, self._vocabulary = (
            (64, 128, 2, 300) if context.tiny else (HIDDEN, FEED_FORWARD, HEADS, VOCABULARY)
        )

    def measure(self, name: str, make: MakeCall) -> None:
        first, tensors = make()
        num_bytes = sum(one.numel() * one.element_size() for one in tensors)
        calls = [first]
        calls += [make()[0] for _ in range(self._context.device.num_inputs(num_bytes) - 1)]
        timing = self._context.device.time(calls)
        bytes_s = num_bytes / timing.seconds
        self._context.recorder.row(
            "row-wise kernels",
            {"kernel": name, "rows": self._rows, "MB": num_bytes / 1e6},
            {
                "µs": timing.seconds * 1e6,
                "spread": timing.spread,
                "GB/s": bytes_s / 1e9,
                "share of read rate": bytes_s / self._rate,
            },
        )

    def kernels(self) -> dict[str, MakeCall]:
        return {
            "add_layer_norm": self._layer_norm,
            "add_rms_norm": self._rms_norm,
            "bias_relu": self._bias_relu,
            "silu_mul": self._silu_mul,
            "gelu_tanh_mul": self._gelu_tanh_mul,
            "rms_norm_heads": self._rms_norm_heads,
            "kv_write": self._kv_write,
            "rope_kv_write": self._rope_kv_write,
        }

    def argmax(self) -> tuple[Call, Sequence[Tensor]]:
        logits = self._random(self._rows, self._vocabulary)
        return lambda: ops.greedy_tokens(logits), [logits]

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=DTYPE, device=self._device)

    def _layer_norm(self) -> tuple[Call, Sequence[Tensor]]:
        x, residual = self._random(2, self._rows, self._hidden)
        weight, bias = self._random(2, self._hidden)
        return (
            lambda: norms.add_layer_norm(x, residual, weight, bias, 1e-5),
            [x, residual, weight, bias, x, residual],  # two results of x's size
        )

    def _rms_norm(self) -> tuple[Call, Sequence[Tensor]]:
        x, residual = self._random(2, self._rows, self._hidden)
        weight = self._random(self._hidden)
        return (
            lambda: norms.add_rms_norm(x, residual, weight, 1e-5, 0.0),
            [x, residual, weight, x, residual],
        )

    def _bias_relu(self) -> tuple[Call, Sequence[Tensor]]:
        x, bias = self._random(self._rows, self._wide), self._random(self._wide)
        return lambda: activations.bias_relu(x, bias), [x, bias, x]

    def _silu_mul(self) -> tuple[Call, Sequence[Tensor]]:
        x = self._random(self._rows, 2 * self._wide)
        return lambda: activations.silu_mul(x), [x, x[:, : self._wide]]

    def _gelu_tanh_mul(self) -> tuple[Call, Sequence[Tensor]]:
        x = self._random(self._rows, 2 * self._wide)
        return lambda: activations.gelu_tanh_mul(x), [x, x[:, : self._wide]]

    def _rms_norm_heads(self) -> tuple[Call, Sequence[Tensor]]:
        x, weight = self._random(self._rows, self._heads, HEAD_DIM), self._random(HEAD_DIM)
        return lambda: norms.rms_norm_heads(x, weight, 1e-5, 0.0), [x, x]

    def _cache(self) -> tuple[Tensor, Tensor]:
        """A cache with room for the rows, and their slots in random order."""
        num_blocks = -(-self._rows // BLOCK_SIZE)
        kv = self._random(num_blocks, 1, 2, self._heads, BLOCK_SIZE, HEAD_DIM)
        slots = torch.randperm(num_blocks * BLOCK_SIZE)[: self._rows].to(self._device)
        return kv, slots

    def _kv_write(self) -> tuple[Call, Sequence[Tensor]]:
        kv, slots = self._cache()
        key, value = self._random(2, self._rows, self._heads, HEAD_DIM)
        return (
            lambda: cache_writes.kv_write(kv, 0, key, value, slots),
            [key, value, slots, key, value],
        )

    def _rope_kv_write(self) -> tuple[Call, Sequence[Tensor]]:
        kv, slots = self._cache()
        query, key, value = self._random(3, self._rows, self._heads, HEAD_DIM)
        angles = torch.rand(self._rows, HEAD_DIM // 2, device=self._device) * 6
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        return (
            lambda: cache_writes.rope_kv_write(query, key, value, cos_sin, kv, 0, slots),
            [query, key, value, cos_sin, slots, query, key, value],
        )


def _int8_linear_against_dense(context: Context, rows: int, read_bytes_s: float) -> None:
    """The feed-forward layer's first linear, with its weight in INT8 and in 16 bits."""
    device = context.device.torch_device
    hidden, wide = (64, 128) if context.tiny else (HIDDEN, FEED_FORWARD)

    def inputs() -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, hidden, dtype=DTYPE, device=device)
        return x, torch.randn(wide, hidden, dtype=DTYPE, device=device)

    def int8() -> Call:
        x, weight = inputs()
        linear = ops.Int8Linear(weight)
        return lambda: linear(x)

    def dense() -> Call:
        x, weight = inputs()
        return lambda: F.linear(x, weight)

    num_bytes = wide * hidden  # of codes
    ours = context.device.time([int8() for _ in range(context.device.num_inputs(num_bytes))])
    torchs = context.device.time([dense() for _ in range(context.device.num_inputs(2 * num_bytes))])
    context.recorder.row(
        "linear with a weight in INT8",
        {"rows": rows, "matrix": f"{wide} × {hidden}"},
        {
            "µs": ours.seconds * 1e6,
            "spread": ours.spread,
            "share of read rate": num_bytes / ours.seconds / read_bytes_s,
            "in 16 bits, µs": torchs.seconds * 1e6,
            "× as fast": torchs.seconds / ours.seconds,
        },
    )


def _int8(context: Context) -> dict[str, MakeCall]:
    """Rounding and widening of whole blocks of OPT-13B: all layers, K and V."""
    device = context.device.torch_device
    layers, heads, count = (1, 1, 2) if context.tiny else (LAYERS, HEADS, INT8_BLOCKS)
    shape = (count, layers, 2, heads, BLOCK_SIZE, HEAD_DIM)
    block_ids = torch.randperm(count).to(torch.int32).to(device)

    def quantize() -> tuple[Call, Sequence[Tensor]]:
        kv = torch.randn(shape, dtype=DTYPE, device=device)
        results = kv_int8.quantize_blocks(kv, block_ids, BLOCK_SIZE)
        return lambda: kv_int8.quantize_blocks(kv, block_ids, BLOCK_SIZE), [kv, *results]

    def dequantize() -> tuple[Call, Sequence[Tensor]]:
        kv = torch.randn(shape, dtype=DTYPE, device=device)
        codes, parameters = kv_int8.quantize_blocks(kv, block_ids, BLOCK_SIZE)
        return (
            lambda: kv_int8.dequantize_blocks(codes, parameters, kv, block_ids),
            [codes, parameters, kv],
        )

    return {"quantize_blocks": quantize, "dequantize_blocks": dequantize}
