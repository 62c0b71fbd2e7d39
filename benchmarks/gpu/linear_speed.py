"""Speed of a linear layer with its weight in few bits and in 16, and with bias and ReLU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from fastserve_kernels import ops
from fastserve_kernels.gpu.activations import bias_relu
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from torch import Tensor

from benchmarks.gpu.ceilings import read_rate
from benchmarks.gpu.check_device import Call, Timing
from benchmarks.gpu.phase_context import Context

OUT, IN = 20480, 5120  # the feed-forward layer's first linear, of OPT-13B
ROWS = (1, 16, 64, 2048)
DTYPE = torch.bfloat16
FORMATS = ("Q4_1", "4 bits, groups of 128", "Q4_K", "Q6_K", "FP8, blocks of 128")


@torch.inference_mode()
def run(context: Context) -> None:
    rate, _ = read_rate(context.device)
    out, size = (64, 256) if context.tiny else (OUT, IN)
    counts = (1, 64) if context.tiny else ROWS
    dense = _dense_times(context, out, size, counts)
    for name in FORMATS:
        linears = [_linear(name, out, size, context.device.torch_device)]
        num_bytes = linears[0].nbytes
        for _ in range(context.device.num_inputs(num_bytes) - 1):
            linears.append(_linear(name, out, size, context.device.torch_device))
        for rows, in_16_bits in zip(counts, dense, strict=True):
            timing = _time(context, linears, rows, size)
            context.recorder.row(
                "linear with a quantized weight",
                {"format": name, "rows": rows, "matrix": f"{out} × {size}"},
                {
                    "bits a weight": 8 * num_bytes / (out * size),
                    "µs": timing.seconds * 1e6,
                    "spread": timing.spread,
                    "share of read rate": num_bytes / timing.seconds / rate,
                    "in 16 bits, µs": in_16_bits.seconds * 1e6,
                    "× as fast": in_16_bits.seconds / timing.seconds,
                },
            )

    for rows in (3,) if context.tiny else ROWS:
        _bias_and_relu(context, out, size, rows)


def _bias_and_relu(context: Context, out: int, size: int, rows: int) -> None:
    """As the engine computes it, which is cuBLAS's epilogue on a GPU, and our kernel after the
    product."""
    device = context.device.torch_device
    x, weight, bias = (
        torch.randn(shape, dtype=DTYPE, device=device) for shape in ((rows, size), (out, size), out)
    )
    ways: dict[str, Call] = {
        "the engine's": partial(ops.PackedLinear(weight, bias, relu=True), x),
        "linear, then bias_relu": lambda: bias_relu(F.linear(x, weight), bias),
    }
    figures: dict[str, float] = {}
    for name, call in ways.items():
        timing = context.device.time([call])
        figures |= {f"{name}, µs": timing.seconds * 1e6, f"{name}, spread": timing.spread}
    context.recorder.row(
        "linear, bias and ReLU", {"rows": rows, "matrix": f"{out} × {size}"}, figures
    )


def _dense_times(context: Context, out: int, size: int, counts: Sequence[int]) -> list[Timing]:
    device = context.device
    weights = [
        torch.randn(out, size, dtype=DTYPE, device=device.torch_device)
        for _ in range(device.num_inputs(out * size * DTYPE.itemsize))
    ]
    linears = [ops.PackedLinear(weight) for weight in weights]
    return [_time(context, linears, rows, size) for rows in counts]


def _time(
    context: Context,
    linears: Sequence[ops.PackedLinear | ops.QuantizedLinear],
    rows: int,
    size: int,
) -> Timing:
    x = torch.randn(rows, size, dtype=DTYPE, device=context.device.torch_device)
    return context.device.time([partial(linear, x) for linear in linears])


def _linear(name: str, out: int, size: int, device: torch.device) -> ops.QuantizedLinear:
    return ops.QuantizedLinear([_weight(name, out, size, device)], dtype=DTYPE, device=device)


def _weight(name: str, out: int, size: int, device: torch.device) -> QuantizedWeight:
    """A random weight, with numbers in the form in which the format has them."""

    def integers(end: int, *shape: int) -> Tensor:
        return torch.randint(0, end, shape, dtype=torch.uint8, device=device)

    def halves(groups: int) -> GroupNumbers:
        return GroupNumbers((torch.rand(out, groups, device=device) * 0.01).half())

    def products(groups: int, groups_of_step: int) -> GroupNumbers:
        steps = halves(groups // groups_of_step).values / 64
        return GroupNumbers(integers(64, out, groups), steps)

    if name == "FP8, blocks of 128":
        codes = torch.randn(out, size, device=device).to(torch.float8_e4m3fn)
        return QuantizedWeight(name, codes, 8, 128, GroupNumbers(halves(size // 128).numbers()))
    if name == "Q6_K":
        codes = integers(64, out, size)
        return QuantizedWeight(name, codes, 6, 16, products(size // 16, 16), center=32)
    codes = integers(16, out, size)
    if name == "Q4_K":
        groups = size // 32
        return QuantizedWeight(name, codes, 4, 32, products(groups, 8), products(groups, 8))
    group = 32 if name == "Q4_1" else 128
    return QuantizedWeight(name, codes, 4, group, halves(size // group), halves(size // group))
