"""Phase "flex": our decode attention against torch's paged FlexAttention."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu import attention_baselines as baselines
from benchmarks.gpu.attention_speed import against, decode_shapes, time_decode
from benchmarks.gpu.phase_context import Context


@torch.inference_mode()
def run(context: Context) -> None:
    for shape in decode_shapes(context):
        decode = time_decode(context, shape)
        make = partial(
            baselines.paged_flex,
            decode.query,
            shape.kv_heads,
            shape.context,
            compiled=not context.tiny,
        )
        ratios, note = against(context, decode.timing.seconds, {"paged Flex": [make]})
        context.recorder.row("paged FlexAttention", shape.case(), ratios, note)
