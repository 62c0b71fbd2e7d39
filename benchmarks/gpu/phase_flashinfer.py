"""Phase "flashinfer": our attention beside FlashInfer's, where that package is installed."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import attention_baselines as baselines
from benchmarks.gpu.attention_speed import (
    BLOCK_SIZE,
    Shape,
    against,
    decode_shapes,
    dtype_of,
    prefill_shapes,
    time_decode,
    time_prefill,
)
from benchmarks.gpu.phase_context import Context


@torch.inference_mode()
def run(context: Context) -> None:
    for shape in decode_shapes(context):
        _decode(context, shape)
    for shape in prefill_shapes(context):
        _prefill(context, shape)


def _decode(context: Context, shape: Shape) -> None:
    decode = time_decode(context, shape)
    ways = [
        partial(
            baselines.flashinfer_decode,
            decode.query,
            shape.kv_heads,
            shape.context,
            BLOCK_SIZE,
            tensor_cores=tensor_cores,
        )
        for tensor_cores in (False, True)
    ]
    ratios, note = against(context, decode.timing.seconds, {"FlashInfer": ways})
    context.recorder.row("paged decode and FlashInfer", shape.case(), ratios, note)


def _prefill(context: Context, shape: Shape) -> None:
    timing = time_prefill(context, shape)
    size = (shape.context, shape.heads, shape.head_dim)
    query = torch.randn(size, dtype=dtype_of(context), device=context.device.torch_device)
    way = partial(baselines.flashinfer_prefill, query, shape.kv_heads, BLOCK_SIZE)
    ratios, note = against(context, timing.seconds, {"FlashInfer": [way]})
    context.recorder.row("paged prefill and FlashInfer", shape.case(), ratios, note)
