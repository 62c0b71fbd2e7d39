"""How long a CPU takes for attention of decodes over a cache in bfloat16 and in INT8
(kv_cache.device_dtype: int8).

    python benchmarks/int8_kv_decode.py [--repeats 20]

One layer, 16 jobs of equal contexts, as in OPT-125M (12 heads of 64) and Llama-3-8B (32 heads of
128, four to a KV head). The jobs' blocks are at random places of a cache that no cache of the
processor holds. The sides take turns; medians in ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from fastserve_kernels import ops
from fastserve_kernels.int8_cache import SCALE_BYTES
from rich.console import Console
from rich.table import Table
from torch import Tensor

JOBS, BLOCK_SIZE = 16, 16
CACHE_TOKENS = 2**16
SHAPES = {"12 heads of 64": (12, 12, 64), "32 heads of 128, 8 KV heads": (32, 8, 128)}
CONTEXTS = (128, 512, 2048)


def decode_of(
    heads: int, kv_heads: int, head_dim: int, context: int, int8: bool
) -> Callable[[], Tensor]:
    blocks = CACHE_TOKENS // BLOCK_SIZE
    shape = (blocks, 1, 2, kv_heads, BLOCK_SIZE)
    if int8:
        kv = torch.zeros(*shape, head_dim + SCALE_BYTES, dtype=torch.int8)
    else:
        kv = torch.zeros(*shape, head_dim, dtype=torch.bfloat16)
    rows = torch.randn(2, CACHE_TOKENS, kv_heads, head_dim).bfloat16()
    ops.kv_write(kv, 0, rows[0], rows[1], torch.arange(CACHE_TOKENS))
    per_job = context // BLOCK_SIZE
    tables = torch.randperm(blocks)[: JOBS * per_job].int()
    starts = torch.arange(JOBS, dtype=torch.int32) * per_job
    lengths = torch.full((JOBS,), context, dtype=torch.int32)
    query = torch.randn(JOBS, heads, head_dim).bfloat16()
    return lambda: ops.paged_decode(query, kv, 0, tables, starts, lengths, head_dim**-0.5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    table = Table(title=f"{JOBS} decodes, {ops.cpu_backend()} kernels")
    for heading in ("heads", "context", "bfloat16", "int8", "int8 / bfloat16"):
        table.add_column(heading, justify="right")
    for name, shape in SHAPES.items():
        for context in CONTEXTS:
            sides = [decode_of(*shape, context, int8) for int8 in (False, True)]
            times: list[list[float]] = [[], []]
            for _ in range(repeats):
                for side, of_side in zip(sides, times, strict=True):
                    started = time.perf_counter()
                    side()
                    of_side.append(1e3 * (time.perf_counter() - started))
            plain, rounded = map(statistics.median, times)
            table.add_row(
                name, str(context), f"{plain:.2f}", f"{rounded:.2f}", f"{rounded / plain:.2f}"
            )
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
