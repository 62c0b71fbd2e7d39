"""Phase "kernels": how fast each kernel is."""

from __future__ import annotations

import torch

from benchmarks.gpu import attention_speed, linear_speed, rowwise_speed
from benchmarks.gpu.phase_context import Context


@torch.inference_mode()
def run(context: Context) -> None:
    linear_speed.run(context)
    rowwise_speed.run(context)
    attention_speed.run(context)
