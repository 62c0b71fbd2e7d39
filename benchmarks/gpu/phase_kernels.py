"""Phase "kernels": how fast each is."""

from __future__ import annotations

import attention_speed
import rowwise_speed
import torch
from phase_context import Context


@torch.inference_mode()
def run(context: Context) -> None:
    rowwise_speed.run(context)
    attention_speed.run(context)
