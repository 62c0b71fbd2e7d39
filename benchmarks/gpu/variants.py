"""Compares launch parameters; to be deleted when it has given its answer.

    python3 -m benchmarks.gpu.run_phase benchmarks.gpu.variants --records FILE --scratch DIR \
        --dataset sharegpt --seconds 60
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from fastserve_kernels import ops
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.launch_parameters import (
    DecodeParameters,
    LinearParameters,
    QuantizedParameters,
)

from benchmarks.gpu import linear_speed
from benchmarks.gpu.attention_speed import decode_shapes, time_decode
from benchmarks.gpu.phase_context import Context, one_line

# The first of each list is in use.
LINEARS = [
    LinearParameters(64, 64, 128, 4, 4),
    LinearParameters(64, 128, 128, 8, 3),
    LinearParameters(64, 128, 64, 8, 4),
    LinearParameters(64, 128, 128, 4, 3),
]
FEW_ROWS = [
    QuantizedParameters(16, 64, 2, 4, 8),
    QuantizedParameters(16, 64, 2, 4, 10),
    QuantizedParameters(16, 64, 4, 4, 5),
    QuantizedParameters(16, 32, 2, 4, 10),
]
MORE_ROWS = [
    QuantizedParameters(64, 128, 8, 4, 2),
    QuantizedParameters(64, 128, 4, 4, 2),
    QuantizedParameters(64, 64, 4, 3, 4),
]
HEADS = [
    DecodeParameters(16, 4, 6, 5),
    DecodeParameters(32, 4, 6, 4),
    DecodeParameters(16, 4, 6, 8),
    DecodeParameters(32, 8, 6, 3),
]
GROUPS = [
    DecodeParameters(32, 4, 5, 3),
    DecodeParameters(64, 4, 5, 2),
    DecodeParameters(32, 4, 7, 3),
    DecodeParameters(32, 8, 5, 2),
]


@torch.inference_mode()
def run(context: Context) -> None:
    device = context.device.torch_device
    out, size = linear_speed.OUT, linear_speed.IN
    count = context.device.num_inputs(out * size)
    weights = [torch.randn(out, size, dtype=torch.bfloat16, device=device) for _ in range(count)]
    int8 = [ops.Int8Linear(weight) for weight in weights]
    del weights
    for linear_variant in LINEARS:
        launch_parameters.LINEAR[2, 90][1] = linear_variant
        _linear(context, "INT8", int8, (64,), linear_variant)
    del int8
    first = linear_speed._linear("Q4_1", out, size, device)
    linears = [first]
    for _ in range(context.device.num_inputs(first.nbytes) - 1):
        linears.append(linear_speed._linear("Q4_1", out, size, device))
    for place, rows, few_bits in ((0, (1, 16), FEW_ROWS), (1, (64, 256), MORE_ROWS)):
        for quantized_variant in few_bits:
            launch_parameters.QUANTIZED[2, 90][place] = quantized_variant
            _linear(context, "Q4_1", linears, rows, quantized_variant)
    shapes = decode_shapes(context)[:2]  # head dimension 128
    for shape, table, of_decode in (
        (shapes[0], launch_parameters.INT8_DECODE_HEADS, HEADS),
        (shapes[1], launch_parameters.INT8_DECODE_GROUPS, GROUPS),
    ):
        for variant in of_decode:
            table[128, 2, 90] = variant
            try:
                timing = time_decode(context, shape, int8=True).timing
            except Exception as error:
                print(f"  {variant}: {one_line(error)}", flush=True)
                continue
            _record(context, f"decode {shape.heads}/{shape.kv_heads}", variant, timing)


def _linear(
    context: Context, name: str, linears: Sequence[Any], counts: tuple[int, ...], variant: object
) -> None:
    for rows in counts:
        try:
            x = torch.randn(
                rows, linear_speed.IN, dtype=torch.bfloat16, device=context.device.torch_device
            )
            timing = context.device.time([partial(linear, x) for linear in linears])
        except Exception as error:
            print(f"  {variant}: {one_line(error)}", flush=True)
            continue
        _record(context, f"{name}, {rows} rows", variant, timing)


def _record(context: Context, what: str, variant: object, timing: Any) -> None:
    context.recorder.row(
        "variants",
        {"what": what, "parameters": str(variant)},
        {"µs": timing.seconds * 1e6, "spread": timing.spread},
    )
