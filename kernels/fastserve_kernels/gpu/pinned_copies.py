"""Small copies between a GPU and pinned host memory, by a kernel.

A GPU has one copy engine for each direction, which makes copies in the order of arrival, whatever
their stream and priority. Behind a gigabyte of KV blocks a step's inputs and tokens would wait for
tens of milliseconds. A kernel's loads and stores bypass the copy engines.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastserve_kernels.gpu.launch_parameters import cdiv

# 4-byte words for one program. This keeps enough lines of 128 bytes under way to fill the link.
_BLOCK = 1024


def copy_words(source: Tensor, target: Tensor) -> None:
    """target = source, on the current stream.

    source, target: contiguous, of equal size: a multiple of 4 bytes, under 8 GiB. Each is on the
        device or in pinned host memory.

    Keep the host's tensor alive and unchanged until the stream has passed this copy: torch's
    allocator does not know that the kernel uses it.
    Grid: (blocks of 4 KiB,).
    """
    num_words = source.numel() * source.element_size() // 4
    if num_words:
        _copy_words[(cdiv(num_words, _BLOCK),)](
            source.view(torch.int32), target.view(torch.int32), num_words,
            BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip


# Sizes and addresses differ from step to step, and serving must not wait for a compiler.
@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["source", "target"])
def _copy_words(source, target, num_words, BLOCK: tl.constexpr):
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = words < num_words
    tl.store(target + words, tl.load(source + words, inside), inside)
