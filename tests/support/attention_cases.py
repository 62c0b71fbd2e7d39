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
from fastserve_kernels.int8_cache import MOST, codes_and_scales
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
    other_value_dim: int | None = None
    """Elements of a value, if they are not as many as a key's."""

    def __str__(self) -> str:
        values = f" and {self.value_dim}" if self.other_value_dim else ""
        return f"{self.heads}x{self.kv_heads}x{self.head_dim}{values}-blocks of {self.block_size}"

    @property
    def value_dim(self) -> int:
        return self.other_value_dim or self.head_dim


@dataclass(frozen=True)
class Variant:
    """What an attention rule has beside a scale."""

    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        parts = [f"window of {self.window}"] if self.window else []
        parts += [f"capped at {self.soft_cap}"] if self.soft_cap else []
        return " ".join([*parts, *(["sinks"] if self.has_sinks else [])]) or "plain"

    def rule(self, shape: Shape) -> AttentionRule:
        """A rule with random sinks. The second outweighs all tokens, and the third is none."""
        sinks = None
        if self.has_sinks:
            sinks = torch.randn(shape.heads) * 3
            sinks[1:3] = torch.tensor([40.0, float("-inf")])[: shape.heads - 1]
        return AttentionRule(shape.head_dim**-0.5, self.window, self.soft_cap, sinks)


PLAIN = Variant()
ALL_AT_ONCE = Variant(window=70, soft_cap=2.0, has_sinks=True)


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
    ([9, 70], Shape(14, 2, 64)),
    ([21], Shape(16, 1, 160)),
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
    ([(17, 40)], Shape(3, 1, 112)),
]
"""Rows of each job, and the tokens of its context including them."""

DECODE_VARIANTS: list[tuple[list[int], Shape, Variant]] = [
    ([1, 5, 16, 40, 300, 0], Shape(2, 1, 64), Variant(window=5)),
    ([16, 17, 300, 513], Shape(1, 1, 128), Variant(window=16)),
    ([1, 290, 777, 0, 1025], Shape(7, 1, 64), Variant(window=300, has_sinks=True)),
    ([20, 300], Shape(1, 1, 80), Variant(window=4096, soft_cap=5.0)),
    ([33, 270], Shape(8, 1, 256), Variant(soft_cap=1.5)),
    ([300, 0, 17], Shape(2, 2, 64), Variant(has_sinks=True)),
    ([600, 64, 70, 71], Shape(3, 1, 96, block_size=32), ALL_AT_ONCE),
    ([513, 40], Shape(2, 2, 64, block_size=8), ALL_AT_ONCE),
    ([257, 40], Shape(2, 1, 192, other_value_dim=128), PLAIN),
    ([300, 9], Shape(2, 2, 64, other_value_dim=80), ALL_AT_ONCE),
]
PREFILL_VARIANTS: list[tuple[list[tuple[int, int]], Shape, Variant]] = [
    ([(1, 1), (70, 100)], Shape(2, 1, 64), Variant(window=5)),
    ([(20, 50), (17, 17)], Shape(2, 1, 128), Variant(window=16)),
    ([(20, 330), (2, 700)], Shape(3, 1, 64), Variant(window=300, has_sinks=True)),
    ([(20, 50)], Shape(1, 1, 80), Variant(window=4096, soft_cap=5.0)),
    ([(5, 70)], Shape(4, 1, 256), Variant(soft_cap=1.5)),
    ([(19, 70), (2, 2)], Shape(3, 3, 64), Variant(has_sinks=True)),
    ([(70, 400), (9, 75)], Shape(2, 1, 96, block_size=32), ALL_AT_ONCE),
    ([(20, 70)], Shape(2, 1, 192, other_value_dim=128), PLAIN),
    ([(20, 333)], Shape(1, 1, 64, block_size=8, other_value_dim=80), ALL_AT_ONCE),
]
"""As `DECODE` and `PREFILL`, for other rules and for values of another size."""

WRITING_DECODE: list[tuple[list[int], Shape, Variant]] = [
    ([1, 257, 0, 256, 32, 17], Shape(3, 3, 64), PLAIN),
    ([300, 7], Shape(1, 1, 80, block_size=8, other_value_dim=72), ALL_AT_ONCE),
    ([513, 40], Shape(6, 2, 128), ALL_AT_ONCE),
]
"""As `DECODE_VARIANTS`, where the kernel also writes each row's last token."""

INT8_DTYPES = (torch.float16, torch.bfloat16)
"""Dtypes of queries to a cache in INT8. float32 would take the same path."""
INT8_DECODE, INT8_PREFILL = DECODE[2::3], PREFILL[2::3]
INT8_DECODE_VARIANTS, INT8_PREFILL_VARIANTS = DECODE_VARIANTS[-2:], PREFILL_VARIANTS[-2:]
"""These need fewer shapes, as only reading a token differs."""
SHARED_DECODE = [Shape(4, 4, 64), Shape(16, 4, 64)]
ITEMS_OF_A_PROGRAM = 3
FIRST_CONTEXTS = [300, 256, 0, 31]
"""Contexts of the rows that are also decoded alone. Others are shorter, for the reference's
speed."""
SHARED_PREFILL = [(90, 300), (17, 17), (130, 130)], Shape(2, 1, 64)


@dataclass(frozen=True)
class Cache:
    """Jobs at random places of a cache that holds NaN wherever no token is. Entries of block tables
    that no row sees are those of no block."""

    shape: Shape
    kv: Tensor
    block_tables: Tensor
    table_starts: Tensor

    @staticmethod
    def filled(
        lengths: Sequence[int],
        shape: Shape,
        dtype: torch.dtype,
        is_int8: bool = False,
        firsts: Sequence[int] = (),
    ) -> Cache:
        """firsts: of each job, the first position that a row sees; by default 0."""
        size, width = shape.block_size, max(shape.head_dim, shape.value_dim)
        needed = [-(-length // size) for length in lengths]
        total = sum(needed) + 3
        block = (LAYERS, 2, shape.kv_heads, size, width)
        kv = torch.full((total, *block), NAN, dtype=dtype)
        free = torch.randperm(total).tolist()
        tables: list[int] = []
        starts = []
        for length, count, first in zip(lengths, needed, firsts or [0] * len(lengths), strict=True):
            starts.append(len(tables))
            tables += [NO_BLOCK] * (first // size)
            for i in range(first // size, count):
                tables.append(block_id := free.pop())
                used = slice(max(first - i * size, 0), min(size, length - i * size))
                for side, dim in enumerate((shape.head_dim, shape.value_dim)):
                    rows = kv[block_id, LAYER, side, :, used]
                    if is_int8:
                        rows[:] = 0
                    rows[..., :dim] = torch.randn(*rows.shape[:2], dim).to(dtype)
            tables += [NO_BLOCK] * SPARE_ENTRIES
        if is_int8:
            kv = in_int8(kv)
            codes, _ = codes_and_scales(kv)
            codes[:, :, 0, ..., shape.head_dim :] = codes[:, :, 1, ..., shape.value_dim :] = MOST
        return Cache(
            shape,
            kv,
            torch.tensor(tables, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
        )

    def in_int8(self) -> Cache:
        """The same tokens in INT8."""
        return replace(self, kv=in_int8(self.kv))

    def of(self, jobs: slice) -> Cache:
        """The cache of these jobs alone."""
        return replace(self, table_starts=self.table_starts[jobs])

    def without_blocks_before(self, position: int) -> Cache:
        """The cache of one job, whose table holds no block of the positions before."""
        tables = self.block_tables.clone()
        start = int(self.table_starts)
        tables[start : start + position // self.shape.block_size] = NO_BLOCK
        return replace(self, block_tables=tables)

    def decode(self, query: Tensor, contexts: Sequence[int], rule: AttentionRule) -> Tensor:
        """Expected results for one row of each job."""
        return self._attention(query, list(enumerate(contexts)), rule)

    def prefill(
        self, query: Tensor, jobs: Sequence[tuple[int, int]], rule: AttentionRule
    ) -> Tensor:
        """Expected results for the rows of jobs, each (rows, context)."""
        of_rows = [
            (job, context - rows + row + 1)
            for job, (rows, context) in enumerate(jobs)
            for row in range(rows)
        ]
        return self._attention(query, of_rows, rule)

    def _attention(
        self, query: Tensor, of_rows: Sequence[tuple[int, int]], rule: AttentionRule
    ) -> Tensor:
        """``of_rows`` holds each row's job and the number of tokens that it attends to."""
        jobs, contexts = torch.tensor(of_rows, dtype=torch.int32).view(-1, 2).T
        starts = self.table_starts[jobs]
        return reference.paged_attention(
            query,
            self.kv,
            LAYER,
            self.block_tables,
            starts,
            contexts,
            rule,
            self.shape.value_dim,
        )


def decode_cache(
    contexts: Sequence[int],
    shape: Shape,
    dtype: torch.dtype,
    rule: AttentionRule,
    is_int8: bool = False,
) -> Cache:
    """A cache of what one row of each job sees by the rule."""
    firsts = [rule.first_visible(context - 1) for context in contexts]
    return Cache.filled(contexts, shape, dtype, is_int8, firsts)


def prefill_cache(
    jobs: Sequence[tuple[int, int]],
    shape: Shape,
    dtype: torch.dtype,
    rule: AttentionRule,
    is_int8: bool = False,
) -> Cache:
    """A cache of what the rows of jobs, each (rows, context), see by the rule."""
    firsts = [rule.first_visible(context - max(rows, 1)) for rows, context in jobs]
    return Cache.filled([context for _, context in jobs], shape, dtype, is_int8, firsts)


def queries(rows: int, shape: Shape, dtype: torch.dtype) -> Tensor:
    """A view of a fused projection, as the model makes it."""
    width = shape.heads + 2 * shape.kv_heads
    return torch.randn(rows, width, shape.head_dim).to(dtype)[:, : shape.heads]


def run_decode(
    cache: Cache,
    query: Tensor,
    contexts: Sequence[int],
    rule: AttentionRule,
    device: torch.device,
    all_splits: bool = False,
    scratch: paged_decode.DecodeScratch | None = None,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """all_splits: the work list has those before the window, too. scratch: by default a new one.
    new: keys and values that the kernel writes to the cache, which must be on the device."""
    rows, heads, _ = query.shape
    window, value_dim = None if all_splits else rule.window, cache.shape.value_dim
    capacity = _decode_capacity(contexts, window)
    work = torch.from_numpy(work_lists.decode_work(contexts, capacity, window))
    if scratch is None:
        scratch = paged_decode.decode_scratch(capacity, heads, value_dim, device)
    scratch.partials.fill_(NAN)
    out = torch.full((rows, heads, value_dim), NAN, dtype=query.dtype, device=device)
    paged_decode.paged_decode(
        _moved(query, device), cache.kv.to(device), LAYER, cache.block_tables.to(device),
        cache.table_starts.to(device), torch.tensor(contexts, dtype=torch.int32).to(device),
        work.to(device), _rule_on(rule, device), out, scratch, new,
    )  # fmt: skip
    return out.cpu()


def decode_scratch(
    contexts: Sequence[int], shape: Shape, device: torch.device
) -> paged_decode.DecodeScratch:
    """For `run_decode` of these contexts, or of some of them, without a window."""
    capacity = _decode_capacity(contexts, None)
    return paged_decode.decode_scratch(capacity, shape.heads, shape.value_dim, device)


def _decode_capacity(contexts: Sequence[int], window: int | None) -> int:
    return int(work_lists.num_splits(contexts, window).sum()) + SPARE_ITEMS


def run_prefill(
    cache: Cache,
    query: Tensor,
    jobs: Sequence[tuple[int, int]],
    rule: AttentionRule,
    device: torch.device,
) -> Tensor:
    """``query`` holds the jobs' rows, then rows of no job."""
    rows, contexts = [pair[0] for pair in jobs], [pair[1] for pair in jobs]
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    value_dim = cache.shape.value_dim
    tile = paged_prefill.query_tile(max(query.shape[2], value_dim), query.dtype, device)
    capacity = int(work_lists.num_tiles(rows, tile).sum()) + SPARE_ITEMS
    work = torch.from_numpy(work_lists.prefill_work(rows, tile, contexts, rule.window, capacity))
    out = torch.full((*query.shape[:2], value_dim), NAN, dtype=query.dtype, device=device)
    paged_prefill.paged_prefill(
        _moved(query, device), cache.kv.to(device), LAYER, cache.block_tables.to(device),
        cache.table_starts.to(device), torch.tensor(contexts, dtype=torch.int32).to(device),
        torch.from_numpy(starts).to(device), work.to(device), _rule_on(rule, device), out,
    )  # fmt: skip
    return out.cpu()


def _rule_on(rule: AttentionRule, device: torch.device) -> AttentionRule:
    return rule if rule.sinks is None else replace(rule, sinks=rule.sinks.to(device))


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
        plain_decodes = [(*one, PLAIN) for one in (INT8_DECODE if is_int8 else DECODE)]
        plain_prefills = [(*one, PLAIN) for one in (INT8_PREFILL if is_int8 else PREFILL)]
        decodes = INT8_DECODE_VARIANTS if is_int8 else DECODE_VARIANTS
        prefills = INT8_PREFILL_VARIANTS if is_int8 else PREFILL_VARIANTS
        for contexts, shape, variant in [*plain_decodes, *decodes]:
            if not no_dots or shape.heads == shape.kv_heads:
                arguments = (dtype, contexts, shape, variant, is_int8)
                yield Case("paged_decode", arguments, _decode, name)
        if not no_dots:
            for jobs, shape, variant in [*plain_prefills, *prefills]:
                yield Case("paged_prefill", (dtype, jobs, shape, variant, is_int8), _prefill, name)
        for contexts, shape, variant in WRITING_DECODE:
            if not no_dots or shape.heads == shape.kv_heads:
                arguments = (dtype, contexts, shape, variant, is_int8)
                label = f"{name} with new tokens".strip()
                yield Case("paged_decode", arguments, _writing_decode, label)
    for dtype in DTYPES:
        no_dots = interpreted and dtype == torch.bfloat16
        for shape in SHARED_DECODE:
            if not no_dots or shape.heads == shape.kv_heads:
                label = "several items a program"
                yield Case("paged_decode", (dtype, shape), _shared_decode, label)
        if not no_dots:
            yield Case("paged_prefill", (dtype, *SHARED_PREFILL), _shared_prefill, "each alone")


def _decode(
    dtype: torch.dtype, contexts: list[int], shape: Shape, variant: Variant, is_int8: bool,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    rule = variant.rule(shape)
    cache = decode_cache(contexts, shape, dtype, rule, is_int8)
    query = queries(len(contexts), shape, dtype)
    actual = run_decode(cache, query, contexts, rule, device)
    yield near("rows", actual, cache.decode(query, contexts, rule), dtype)
    if variant.window is not None:
        with_all_splits = run_decode(cache, query, contexts, rule, device, all_splits=True)
        yield Comparison("rows by a list of all splits", with_all_splits, actual)


def _writing_decode(
    dtype: torch.dtype, contexts: list[int], shape: Shape, variant: Variant, is_int8: bool,
    device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    """The last token of each row is written to the cache, and seen: all is as if `ops.kv_write`
    wrote it before."""
    rule = variant.rule(shape)
    cache = decode_cache(contexts, shape, dtype, rule, is_int8)
    query = queries(len(contexts), shape, dtype)
    parts = [shape.kv_heads * dim for dim in (shape.head_dim, shape.value_dim)]
    new = torch.randn(len(contexts), sum(parts)).to(dtype)
    key, value = (part.unflatten(1, (shape.kv_heads, -1)) for part in new.split(parts, dim=1))
    last = torch.tensor(contexts) - 1
    blocks = cache.block_tables[cache.table_starts + last.clamp(min=0) // shape.block_size]
    slots = torch.where(last < 0, -1, blocks.long() * shape.block_size + last % shape.block_size)
    expected = replace(cache, kv=reference.kv_write(cache.kv, LAYER, key, value, slots))
    written = replace(cache, kv=cache.kv.to(device, copy=True))
    key, value = (
        part.unflatten(1, (shape.kv_heads, -1)) for part in new.to(device).split(parts, dim=1)
    )
    actual = run_decode(written, query, contexts, rule, device, new=(key, value))
    yield Comparison("rows", actual, run_decode(expected, query, contexts, rule, device))
    yield Comparison("cache", written.kv.cpu().view(torch.int8), expected.kv.view(torch.int8))


def _shared_decode(dtype: torch.dtype, shape: Shape, device: torch.device) -> Iterator[Comparison]:
    """With this many rows every program of the device takes several items in turn. Some of the rows
    also run alone, with the same bits, in the same scratch memory."""
    group = shape.heads // shape.kv_heads
    parameters = launch_parameters.decode(
        shape.head_dim, dtype.itemsize, group, capability(device), int8=False
    )
    programs = multiprocessors(device) * parameters.programs_per_multiprocessor
    rows = max(-(-ITEMS_OF_A_PROGRAM * programs // shape.kv_heads), len(FIRST_CONTEXTS))
    others = [1 + 7 * row % 40 for row in range(len(FIRST_CONTEXTS), rows)]
    contexts = [*FIRST_CONTEXTS, *others]
    cache = Cache.filled(contexts, shape, dtype)
    query, rule = queries(rows, shape, dtype), PLAIN.rule(shape)
    scratch = decode_scratch(contexts, shape, device)
    together = run_decode(cache, query, contexts, rule, device, scratch=scratch)
    yield near("rows", together, cache.decode(query, contexts, rule), dtype)
    for row, context in enumerate(FIRST_CONTEXTS):
        own = slice(row, row + 1)
        alone = cache.of(own), query[own], [context]
        result = run_decode(*alone, rule, device, scratch=scratch)
        yield Comparison(f"row {row} alone", result, together[own])


def _prefill(
    dtype: torch.dtype, jobs: list[tuple[int, int]], shape: Shape, variant: Variant,
    is_int8: bool, device: torch.device,
) -> Iterator[Comparison]:  # fmt: skip
    rule = variant.rule(shape)
    cache = prefill_cache(jobs, shape, dtype, rule, is_int8)
    total = sum(rows for rows, _ in jobs)
    query = queries(total + SPARE_ROWS, shape, dtype)
    expected = torch.full((len(query), shape.heads, shape.value_dim), NAN, dtype=torch.float64)
    expected[:total] = cache.prefill(query[:total], jobs, rule)
    yield near("rows", run_prefill(cache, query, jobs, rule, device), expected, dtype)


def _shared_prefill(
    dtype: torch.dtype, jobs: list[tuple[int, int]], shape: Shape, device: torch.device
) -> Iterator[Comparison]:
    """Each of the jobs alone has the same bits as beside the others."""
    cache = Cache.filled([context for _, context in jobs], shape, dtype)
    rows = [rows for rows, _ in jobs]
    query, rule = queries(sum(rows), shape, dtype), PLAIN.rule(shape)
    together = run_prefill(cache, query, jobs, rule, device).split(rows)
    for job, own in enumerate(query.split(rows)):
        this = slice(job, job + 1)
        result = run_prefill(cache.of(this), own, jobs[this], rule, device)
        yield Comparison(f"job {job} alone", result, together[job])
