"""Cases of the GPU's attention kernels: inputs, launchers and expected results.

Tests without a GPU run the launchers in Triton's interpreter; the GPU check runs them on a GPU. The
CPU's implementations are tested on the same caches, lengths and shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import kernel_reference as reference
import numpy as np
import torch
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.gpu import launch_parameters, paged_decode, paged_prefill, work_lists
from fastserve_kernels.gpu.device import capability, multiprocessors
from kernel_cases import DTYPES, NAN, Case, Comparison, in_int8, near
from torch import Tensor

LAYERS, LAYER = 3, 1
SPARE_ITEMS = 3
"""Unused items of a decode work list, as in CUDA graphs."""
SPARE_ROWS = 2
"""Rows of a prefill that belong to no job."""
NO_BLOCK, SPARE_ENTRIES = 2**30, 2
"""An id of no block, and how often block tables hold it after a job's blocks."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16

    def __str__(self) -> str:
        return f"{self.heads}x{self.kv_heads}x{self.head_dim}-blocks of {self.block_size}"


DECODE: list[tuple[list[int], Shape]] = [
    ([], Shape(2, 2, 64)),
    ([0, 0], Shape(2, 2, 64)),
    ([1, 15, 16, 17, 255, 256, 257], Shape(4, 4, 64)),
    ([255, 0, 256, 257], Shape(2, 2, 128)),
    ([1, 2048, 3], Shape(1, 1, 64)),
    ([33, 513], Shape(3, 3, 80)),
    ([31, 1, 290], Shape(2, 2, 96, block_size=32)),
    ([40, 259], Shape(1, 1, 256, block_size=8)),
    ([7, 50], Shape(3, 3, 8, block_size=8)),
    ([7, 50], Shape(3, 3, 16, block_size=4)),
    ([21, 40], Shape(2, 2, 72, block_size=4)),
    ([20, 5], Shape(40, 40, 64)),
    ([300, 0, 17, 255, 1], Shape(8, 2, 64)),
    ([255, 256, 257], Shape(8, 1, 128)),
    ([257, 16], Shape(6, 1, 128)),
    ([1, 2048], Shape(4, 1, 128)),
    ([33, 64, 65], Shape(4, 2, 80)),
    ([16, 515], Shape(6, 2, 80, block_size=32)),
    ([31, 95], Shape(2, 1, 128, block_size=32)),
    ([66, 12, 300], Shape(2, 1, 256)),
    ([280], Shape(24, 1, 64)),
]
"""Tokens of each row's context (0: padding)."""

PREFILL: list[tuple[list[tuple[int, int]], Shape]] = [
    ([], Shape(2, 2, 64)),
    ([(1, 1)], Shape(2, 2, 64)),
    ([(1, 1), (15, 15), (0, 9), (16, 16), (17, 17)], Shape(2, 2, 64)),
    ([(255, 255), (64, 64), (300, 300)], Shape(1, 1, 128)),
    ([(130, 130), (5, 300)], Shape(8, 1, 64)),
    ([(15, 40), (60, 130), (1, 9)], Shape(4, 2, 64)),
    ([(9, 2048)], Shape(1, 1, 128)),
    ([(70, 70), (17, 17)], Shape(4, 1, 128, block_size=32)),
    ([(16, 272), (1, 257), (65, 70)], Shape(2, 1, 64, block_size=32)),
    ([(70, 150)], Shape(3, 3, 80)),
    ([(128, 128)], Shape(4, 2, 80)),
    ([(33, 33), (20, 90)], Shape(4, 2, 96, block_size=8)),
    ([(1, 257), (12, 64), (13, 65), (31, 95)], Shape(6, 3, 72, block_size=4)),
    ([(66, 100), (100, 101), (2, 300)], Shape(2, 1, 256)),
    ([(65, 65)], Shape(2, 2, 8, block_size=8)),
    ([(19, 50)], Shape(2, 2, 16, block_size=4)),
]
"""Rows of each job, and the tokens of its context including them."""

INT8_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of queries to a cache in INT8. float32 would take the same path."""
INT8_DECODE, INT8_PREFILL = DECODE[2::3], PREFILL[2::3]
"""These need fewer shapes, as only reading a token differs."""
SHARED_DECODE = [Shape(4, 4, 64), Shape(16, 4, 64)]
ITEMS_OF_A_PROGRAM = 3
FIRST_CONTEXTS = [300, 256, 0, 31]
"""Contexts of the rows that are also decoded alone. Others are shorter, for the reference's
speed."""
SHARED_PREFILL = [(90, 300), (17, 17), (130, 130)], Shape(2, 1, 64)


@dataclass(frozen=True)
class Cache:
    """Jobs at random places of a cache that holds NaN wherever no token is."""

    kv: Tensor
    block_tables: Tensor
    table_starts: Tensor

    @staticmethod
    def filled(
        lengths: Sequence[int], shape: Shape, dtype: torch.dtype, is_int8: bool = False
    ) -> Cache:
        size = shape.block_size
        needed = [-(-length // size) for length in lengths]
        total = sum(needed) + 3
        block = (LAYERS, 2, shape.kv_heads, size, shape.head_dim)
        kv = torch.full((total, *block), NAN, dtype=dtype)
        free = torch.randperm(total).tolist()
        tables: list[int] = []
        starts = []
        for length, count in zip(lengths, needed, strict=True):
            starts.append(len(tables))
            for i in range(count):
                tables.append(block_id := free.pop())
                used = min(size, length - i * size)
                tokens = torch.randn(2, shape.kv_heads, used, shape.head_dim)
                kv[block_id, LAYER, :, :, :used] = tokens.to(dtype)
            tables += [NO_BLOCK] * SPARE_ENTRIES
        return Cache(
            in_int8(kv) if is_int8 else kv,
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
        )

    def in_int8(self) -> Cache:
        """The same tokens in INT8."""
        return replace(self, kv=in_int8(self.kv))

    def of(self, jobs: slice) -> Cache:
        """The cache of these jobs alone."""
        return Cache(self.kv, self.block_tables, self.table_starts[jobs])

    def decode(self, query: Tensor, contexts: Sequence[int], scale: float) -> Tensor:
        """Expected results for one row of each job."""
        return self._attention(query, list(enumerate(contexts)), scale)

    def prefill(self, query: Tensor, jobs: Sequence[tuple[int, int]], scale: float) -> Tensor:
        """Expected results for the rows of jobs, each (rows, context)."""
        of_rows = [
            (job, context - rows + row + 1)
            for job, (rows, context) in enumerate(jobs)
            for row in range(rows)
        ]
        return self._attention(query, of_rows, scale)

    def _attention(self, query: Tensor, of_rows: Sequence[tuple[int, int]], scale: float) -> Tensor:
        """``of_rows`` holds each row's job and the number of tokens that it attends to."""
        jobs, contexts = torch.tensor(of_rows, dtype=torch.int32).view(-1, 2).T
        starts = self.table_starts[jobs]
        return reference.paged_attention(
            query, self.kv, LAYER, self.block_tables, starts, contexts, scale
        )


def queries(rows: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """A view of a fused projection, as the model makes it."""
    width = shape.heads + 2 * shape.kv_heads
    return torch.randn(rows, width, shape.head_dim).to(dtype)[:, : shape.heads]


def run_decode(
    cache: Cache, query: Tensor, contexts: Sequence[int], scale: float, device: torch.device
) -> Tensor:
    heads, head_dim = query.shape[1:]
    capacity = int(work_lists.num_splits(contexts).sum()) + SPARE_ITEMS
    work = torch.from_numpy(work_lists.decode_work(contexts, capacity))
    scratch = paged_decode.decode_scratch(capacity, heads, head_dim, device).fill_(NAN)
    out = torch.full(query.shape, NAN, dtype=query.dtype, device=device)
    paged_decode.paged_decode(
        _moved(query, device), cache.kv.to(device), LAYER, cache.block_tables.to(device),
        cache.table_starts.to(device), torch.tensor(contexts, dtype=torch.int32).to(device),
        work.to(device), AttentionRule(scale), out, scratch,
    )  # fmt: skip
    return out.cpu()


def run_prefill(
    cache: Cache, query: Tensor, jobs: Sequence[tuple[int, int]], scale: float, device: torch.device
) -> Tensor:
    """``query`` holds the jobs' rows, then rows of no job."""
    rows, contexts = [pair[0] for pair in jobs], [pair[1] for pair in jobs]
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    tile = paged_prefill.query_tile(query.shape[2], query.dtype, device)
    work = torch.from_numpy(work_lists.prefill_work(rows, tile, contexts))
    out = torch.full(query.shape, NAN, dtype=query.dtype, device=device)
    paged_prefill.paged_prefill(
        _moved(query, device), cache.kv.to(device), LAYER, cache.block_tables.to(device),
        cache.table_starts.to(device), torch.tensor(contexts, dtype=torch.int32).to(device),
        torch.from_numpy(starts).to(device), work.to(device), AttentionRule(scale), out,
    )  # fmt: skip
    return out.cpu()


def _moved(view: Tensor, device: torch.device) -> Tensor:
    """Copies to the device with the same strides."""
    moved = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device)
    return moved.copy_(view)


def cases(interpreted: bool = False) -> Iterator[Case]:
    """If ``interpreted``, dot products in bfloat16 are left out: Triton's interpreter gets them
    wrong."""
    caches = [(dtype, False) for dtype in DTYPES] + [(dtype, True) for dtype in INT8_DTYPES]
    for dtype, is_int8 in caches:
        no_dots = interpreted and dtype == torch.bfloat16
        name = "int8 cache" if is_int8 else ""
        for contexts, shape in INT8_DECODE if is_int8 else DECODE:
            if not no_dots or shape.heads == shape.kv_heads:
                yield Case("paged_decode", (dtype, contexts, shape, is_int8), _decode, name)
        if not no_dots:
            for jobs, shape in INT8_PREFILL if is_int8 else PREFILL:
                yield Case("paged_prefill", (dtype, jobs, shape, is_int8), _prefill, name)
    for dtype in DTYPES:
        no_dots = interpreted and dtype == torch.bfloat16
        for shape in SHARED_DECODE:
            if not no_dots or shape.heads == shape.kv_heads:
                label = "several items a program"
                yield Case("paged_decode", (dtype, shape), _shared_decode, label)
        if not no_dots:
            yield Case("paged_prefill", (dtype, *SHARED_PREFILL), _shared_prefill, "each alone")


def _decode(
    dtype: torch.dtype, contexts: list[int], shape: Shape, is_int8: bool, device: torch.device
) -> Iterator[Comparison]:
    cache = Cache.filled(contexts, shape, dtype, is_int8)
    query, scale = queries(len(contexts), shape, dtype), shape.head_dim**-0.5
    actual = run_decode(cache, query, contexts, scale, device)
    yield near("rows", actual, cache.decode(query, contexts, scale), dtype)


def _shared_decode(dtype: torch.dtype, shape: Shape, device: torch.device) -> Iterator[Comparison]:
    """With this many rows every program of the device takes several items in turn. Some of the rows
    also run alone, with the same bits."""
    group = shape.heads // shape.kv_heads
    parameters = launch_parameters.decode(
        shape.head_dim, dtype.itemsize, group, capability(device), int8=False
    )
    programs = multiprocessors(device) * parameters.programs_per_multiprocessor
    rows = max(-(-ITEMS_OF_A_PROGRAM * programs // shape.kv_heads), len(FIRST_CONTEXTS))
    others = [1 + 7 * row % 40 for row in range(len(FIRST_CONTEXTS), rows)]
    contexts = [*FIRST_CONTEXTS, *others]
    cache = Cache.filled(contexts, shape, dtype)
    query, scale = queries(rows, shape, dtype), shape.head_dim**-0.5
    together = run_decode(cache, query, contexts, scale, device)
    yield near("rows", together, cache.decode(query, contexts, scale), dtype)
    for row, context in enumerate(FIRST_CONTEXTS):
        own = slice(row, row + 1)
        result = run_decode(cache.of(own), query[own], [context], scale, device)
        yield Comparison(f"row {row} alone", result, together[own])


def _prefill(
    dtype: torch.dtype, jobs: list[tuple[int, int]], shape: Shape, is_int8: bool,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    cache = Cache.filled([context for _, context in jobs], shape, dtype, is_int8)
    total = sum(rows for rows, _ in jobs)
    query, scale = queries(total + SPARE_ROWS, shape, dtype), shape.head_dim**-0.5
    expected = torch.full(query.shape, NAN, dtype=torch.float64)
    expected[:total] = cache.prefill(query[:total], jobs, scale)
    yield near("rows", run_prefill(cache, query, jobs, scale, device), expected, dtype)


def _shared_prefill(
    dtype: torch.dtype, jobs: list[tuple[int, int]], shape: Shape, device: torch.device
) -> Iterator[Comparison]:
    """Each of the jobs alone has the same bits as beside the others."""
    cache = Cache.filled([context for _, context in jobs], shape, dtype)
    rows = [rows for rows, _ in jobs]
    query, scale = queries(sum(rows), shape, dtype), shape.head_dim**-0.5
    together = run_prefill(cache, query, jobs, scale, device).split(rows)
    for job, own in enumerate(query.split(rows)):
        this = slice(job, job + 1)
        result = run_prefill(cache.of(this), own, jobs[this], scale, device)
        yield Comparison(f"job {job} alone", result, together[job])
