"""Small copies between a GPU and pinned host memory, by a kernel.

A GPU's copy engines, one a direction, take what is ready in the order in which it came, whatever
its stream and priority: behind a gigabyte of KV blocks a step's inputs and tokens would wait for
tens of milliseconds. A kernel's own loads and stores do not pass through them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import cdiv

# 4-byte words of a program: so many lines of 128 bytes are under way at a time as the link needs.
_BLOCK = 1024


def copy_words(source: Tensor, target: Tensor) -> None:
    """target = source, on the current stream.

    source, target: contiguous, equally many bytes, a multiple of 4, under 8 GiB; on the device or
    in pinned host memory. What is on the host must stay as it is until the stream has come past
    this, and torch's allocator does not know of it: hold the tensor until then.
    Grid: (blocks of 4 KiB,).
    """
    num_words = source.numel() * source.element_size() // 4
    if num_words:
        _copy_words[(cdiv(num_words, _BLOCK),)](
            source.view(torch.int32), target.view(torch.int32), num_words,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


# What is copied differs from step to step: serving must not wait for a compiler.
@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["source", "target"])
def _copy_words(source, target, num_words, BLOCK: tl.constexpr):
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = words < num_words
    tl.store(target + words, tl.load(source + words, inside), inside)
