"""How fast the attention kernels are, against the device's ceilings and other implementations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
from fastserve_kernels.attention_rule import AttentionRule
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.paged_decode import decode_scratch, paged_decode
from fastserve_kernels.gpu.paged_prefill import paged_prefill, query_tile
from fastserve_kernels.gpu.work_lists import SPLIT_TOKENS, decode_work, num_splits, prefill_work
from fastserve_kernels.int8_cache import MOST, SCALE_BYTES, codes_and_scales
from torch import Tensor
from torch.nn.attention import SDPBackend

from benchmarks.gpu import attention_baselines as baselines
from benchmarks.gpu.ceilings import gemm_rate, read_rate
from benchmarks.gpu.check_device import CACHES_EXCEEDED, Call, Timing
from benchmarks.gpu.phase_context import Context, one_line

BLOCK_SIZE = 16
LEAST_KV_BYTES = 256 * 10**6
LEAST_SPLITS = 2  # so that the merge of splits counts as well
BATCH = 64
LAYERS = 40
"""Layers of a cache, as OPT-13B has. They set the stride: one layer's parts of two neighbouring
blocks lie as far apart as all layers of a block are long."""
CACHE_SHARE = 0.6
"""Share of the free memory that a cache may take. The baselines copy a layer of it."""
PROMPT_TOKENS = 2048
HEADS = ((40, 40), (32, 8))
"""(query heads, KV heads): OPT-13B's, and the usual groups of four."""
HEAD_DIMS = (128, 64)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int

    @property
    def kv_bytes(self) -> int:
        """Read by one call, in 16-bit values."""
        return 2 * 2 * self.batch * self.context * self.kv_heads * self.head_dim

    def case(self) -> dict[str, float | int | str | None]:
        return {
            "head dim": self.head_dim,
            "heads": f"{self.heads}/{self.kv_heads}",
            "batch": self.batch,
            "context": self.context,
        }


def run(context: Context) -> None:
    rate, _ = read_rate(context.device)
    flops, _ = gemm_rate(context.device)
    for shape in decode_shapes(context):
        seconds = _decode(context, shape, rate)
        _int8_decode(context, shape, seconds, rate)
    for shape in prefill_shapes(context):
        _prefill(context, shape, flops)


def prefill_shapes(context: Context) -> list[Shape]:
    """One prompt each, with the heads of the decodes."""
    tokens = 2 * BLOCK_SIZE if context.tiny else PROMPT_TOKENS
    return [replace(shape, batch=1, context=tokens) for shape in decode_shapes(context)]


def decode_shapes(context: Context) -> list[Shape]:
    shapes = [(head_dim, *heads) for head_dim in HEAD_DIMS for heads in HEADS]
    if context.tiny:
        shapes = [(64, heads // kv_heads, 1) for heads, kv_heads in HEADS]
    return [
        _decode_shape(context, heads, kv_heads, head_dim) for head_dim, heads, kv_heads in shapes
    ]


def _decode_shape(context: Context, heads: int, kv_heads: int, head_dim: int) -> Shape:
    """Contexts are so long that the device's cache keeps no KV from one call to the next."""
    if context.tiny:
        return Shape(heads, kv_heads, head_dim, 2, 2 * BLOCK_SIZE)
    bytes_of_token = Shape(heads, kv_heads, head_dim, BATCH, 1).kv_bytes
    least_bytes = max(LEAST_KV_BYTES, CACHES_EXCEEDED * context.device.cache_bytes)
    splits = max(LEAST_SPLITS, math.ceil(least_bytes / (bytes_of_token * SPLIT_TOKENS)))
    return Shape(heads, kv_heads, head_dim, BATCH, splits * SPLIT_TOKENS)


def _dtype(context: Context) -> torch.dtype:
    # Triton's interpreter multiplies bfloat16 matrices wrongly.
    return torch.float16 if context.tiny else torch.bfloat16


@dataclass(frozen=True)
class Decode:
    """Our kernel on a layer of a cache, and how long it takes."""

    query: Tensor
    kv: Tensor
    layer: int
    block_tables: Tensor
    """``[batch, blocks of a job]``."""
    timing: Timing


def time_decode(context: Context, shape: Shape, int8: bool = False) -> Decode:
    """int8: the cache is in INT8."""
    device, dtype = context.device.torch_device, _dtype(context)
    blocks_of_job = -(-shape.context // BLOCK_SIZE)
    num_blocks = shape.batch * blocks_of_job
    context.device.free()
    layers = int(min(LAYERS, max(1, CACHE_SHARE * context.device.free_bytes() / shape.kv_bytes)))
    heads_shape = (num_blocks, layers, 2, shape.kv_heads, BLOCK_SIZE)
    layer = layers // 2
    if int8:
        width = shape.head_dim + SCALE_BYTES
        kv = torch.empty(*heads_shape, width, dtype=torch.int8, device=device)
        codes, scales = codes_and_scales(kv)
        codes[:, layer].random_(-MOST, MOST + 1)
        scales[:, layer] = 2 / MOST
    else:
        kv = torch.empty(*heads_shape, shape.head_dim, dtype=dtype, device=device)
        kv[:, layer] = torch.randn(kv[:, layer].shape, dtype=dtype, device=device)
    tables = torch.randperm(num_blocks).view(shape.batch, blocks_of_job).to(torch.int32).to(device)
    lengths = [shape.context] * shape.batch
    capacity = int(num_splits(lengths).sum())
    work = torch.from_numpy(decode_work(lengths, capacity)).to(device)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    firsts = torch.arange(shape.batch, dtype=torch.int32, device=device) * blocks_of_job
    flat = tables.flatten()
    scratch = decode_scratch(capacity, shape.heads, shape.head_dim, device)
    size = (shape.batch, shape.heads, shape.head_dim)
    query = torch.randn(size, dtype=dtype, device=device)
    out = torch.empty_like(query)
    scale = shape.head_dim**-0.5
    timing = context.device.time(
        [
            lambda: paged_decode(
                query,
                kv,
                layer,
                flat,
                firsts,
                context_lens,
                work,
                AttentionRule(scale),
                out,
                scratch,
            )
        ]
    )
    return Decode(query, kv, layer, tables, timing)


def _decode(context: Context, shape: Shape, read_bytes_s: float) -> float:
    """Returns seconds."""
    decode = time_decode(context, shape)
    others: dict[str, list[Callable[[], Call]]] = {
        "gather + SDPA": [
            lambda: baselines.gather_and_sdpa(
                decode.query, decode.kv, decode.layer, decode.block_tables
            )
        ],
        **{
            f"contiguous SDPA{name}": [
                partial(
                    baselines.contiguous_sdpa, decode.query, shape.kv_heads, shape.context, backend
                )
            ]
            for name, backend in baselines.SDPA_BACKENDS.items()
        },
    }
    timing = decode.timing
    ratios, note = against(context, timing.seconds, others)
    bytes_s = shape.kv_bytes / timing.seconds
    context.recorder.row(
        "paged decode",
        {**shape.case(), "layers in the cache": decode.kv.shape[1]},
        {
            "µs": timing.seconds * 1e6,
            "spread": timing.spread,
            "GB/s": bytes_s / 1e9,
            "share of read rate": bytes_s / read_bytes_s,
            **ratios,
        },
        note,
    )
    return timing.seconds


def _int8_decode(context: Context, shape: Shape, seconds: float, read_bytes_s: float) -> None:
    """seconds: time with the cache in 16 bits."""
    timing = time_decode(context, shape, int8=True).timing
    num_bytes = shape.kv_bytes // 2 // shape.head_dim * (shape.head_dim + SCALE_BYTES)
    context.recorder.row(
        "paged decode, cache in INT8",
        shape.case(),
        {
            "µs": timing.seconds * 1e6,
            "spread": timing.spread,
            "GB/s": num_bytes / timing.seconds / 1e9,
            "share of read rate": num_bytes / timing.seconds / read_bytes_s,
            "× 16 bits": seconds / timing.seconds,
        },
    )


def time_prefill(context: Context, shape: Shape) -> Timing:
    """Our kernel on a prompt."""
    device, dtype = context.device.torch_device, _dtype(context)
    tokens = shape.context
    num_blocks = -(-tokens // BLOCK_SIZE)
    scale = shape.head_dim**-0.5
    tile = query_tile(shape.head_dim, dtype, device)
    work = torch.from_numpy(prefill_work([tokens], tile)).to(device)
    context_lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    first = starts[:1]

    def one_prompt() -> tuple[Call, int]:
        """Returns a call on inputs of its own, and their size in bytes."""
        kv_shape = (num_blocks, 1, 2, shape.kv_heads, BLOCK_SIZE, shape.head_dim)
        kv = torch.randn(kv_shape, dtype=dtype, device=device)
        table = torch.randperm(num_blocks).to(torch.int32).to(device)
        query_shape = (tokens, shape.heads, shape.head_dim)
        query = torch.randn(query_shape, dtype=dtype, device=device)
        out = torch.empty_like(query)

        def call() -> None:
            paged_prefill(
                query, kv, 0, table, first, context_lens, starts, work, AttentionRule(scale), out
            )

        return call, sum(one.numel() * one.element_size() for one in (kv, query, out))

    call, num_bytes = one_prompt()
    calls = [call]
    calls += [one_prompt()[0] for _ in range(context.device.num_inputs(num_bytes) - 1)]
    return context.device.time(calls)


@contextmanager
def plain_loops() -> Iterator[None]:
    """Within it prefill has the tiles of an INT8 cache, whose products never overlap a softmax."""

    def without_overlap(
        head_dim: int, element_bytes: int, capability: tuple[int, int], int8: bool
    ) -> launch_parameters.PrefillParameters:
        return chosen(head_dim, element_bytes, capability, int8=True)

    chosen = launch_parameters.prefill
    with mock.patch.object(launch_parameters, "prefill", without_overlap):
        yield


def _prefill(context: Context, shape: Shape, gemm_flops_s: float) -> None:
    device, dtype, tokens = context.device.torch_device, _dtype(context), shape.context
    timing = time_prefill(context, shape)
    with plain_loops():
        plain = time_prefill(context, shape)

    def sdpa(backend: SDPBackend | None) -> Call:
        sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (_random(tokens, n, shape.head_dim, dtype, device) for n in sizes)
        return baselines.causal_sdpa(query, key, value, backend)

    others = {
        f"SDPA{name}": [partial(sdpa, backend)] for name, backend in baselines.SDPA_BACKENDS.items()
    }
    ratios, note = against(context, timing.seconds, others)
    # Two products of [tokens, head_dim] and [head_dim, tokens], of which half is masked.
    flops_s = 2 * shape.heads * shape.head_dim * tokens**2 / timing.seconds
    context.recorder.row(
        "paged prefill",
        shape.case(),
        {
            "µs": timing.seconds * 1e6,
            "spread": timing.spread,
            "TFLOP/s": flops_s / 1e12,
            "share of GEMM rate": flops_s / gemm_flops_s,
            "× plain loops": plain.seconds / timing.seconds,
            **ratios,
        },
        note,
    )


def _random(
    tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.randn(tokens, heads, head_dim, dtype=dtype, device=device)


def against(
    context: Context, seconds: float, others: Mapping[str, Sequence[Callable[[], Call]]]
) -> tuple[dict[str, float | None], str]:
    """How many times as long each baseline takes, in the fastest of its ways.

    A baseline that fails in all of them has None, and the reason.
    """
    ratios: dict[str, float | None] = {}
    notes = []
    for name, ways in others.items():
        times, reason = [], ""
        for make in ways:
            # torch says in warnings why a backend refuses.
            with warnings.catch_warnings(record=True) as given:
                try:
                    times.append(context.device.time([make()]).seconds)
                except Exception as error:
                    said = (str(one.message).partition(" (Triggered")[0] for one in given)
                    reason = "; ".join([one_line(error), *said]).rstrip(".")
        ratios[f"× {name}"] = min(times) / seconds if times else None
        if not times:
            notes.append(f"{name}: {reason}")
    return ratios, "; ".join(notes)
