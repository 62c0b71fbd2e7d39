"""Speed of the CPU kernels beside torch's own, in OPT-125M's shapes, of weights in 4 bits beside
others, of decodes' attention in other shapes and with KV in INT8, and of decodes that begin alike.

    python -m benchmarks.cpu_kernels                   # bfloat16 and float32, a minute or two each
    python -m benchmarks.cpu_kernels --dtype float32
    python -m benchmarks.cpu_kernels --only beginnings

Milliseconds, medians of runs that take turns; in brackets how many times as long the others take.
The weights of a step and the KV of most batches are larger than the caches, as while serving.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from fastserve_kernels import int8_cache, linear, ops
from fastserve_kernels.common_beginnings import common_beginnings as find
from fastserve_kernels.weight_quantization import quantize_groups
from rich.console import Console
from rich.table import Table
from torch import Tensor

HIDDEN, FFN, VOCAB_SIZE, LAYERS, HEADS, HEAD_DIM, BLOCK_SIZE = 768, 3072, 50272, 12, 12, 64, 16
IN_A_LAYER = ((HIDDEN, 3 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN))
ROWS = (1, 4, 16, 64, 512)
# (in, out) of a layer's linears, and how many layers exceed the caches.
QUANTIZED = {
    "SmolLM2-135M": (((576, 960), (576, 576), (576, 3072), (1536, 576)), 30),
    "Qwen2.5-0.5B": (((896, 1152), (896, 896), (896, 9728), (4864, 896)), 12),
    "OPT-1.3B": (((2048, 6144), (2048, 2048), (2048, 8192), (8192, 2048)), 4),
}
QUANTIZED_ROWS = (1, 4, 16, 64)
# Heads, KV heads, size of a head, and how many layers exceed the caches.
DECODED = {
    "OPT-125M": (HEADS, HEADS, HEAD_DIM, LAYERS),
    "SmolLM2-135M": (9, 3, 64, 30),
    "Llama 3 8B": (32, 8, 128, 4),
}
DECODES = ((1, 512), (16, 96), (16, 512), (16, 2048), (64, 512))
# Jobs and their common tokens; each has OWN_TOKENS more.
BEGINNINGS = ((24, 1600), (24, 4096), (8, 1600), (4, 1600), (2, 1600))
OWN_TOKENS = 20
PREFILLS = ((32, 64, 64), (1, 512, 512), (1, 2048, 2048), (1, 512, 2048))
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MOST_GATHERED_TOKENS = 16 * 512  # of a batch: gathering more takes minutes

console = Console(width=100)
Call = Callable[[], object]
Layer = Callable[[Tensor], Tensor]


def median_s(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median seconds of each call; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(some) for name, some in times.items()}


def report(title: str, rows: Sequence[tuple[str, dict[str, float], str]], last: str) -> None:
    """Prints a table.

    Args:
        rows: a label, seconds by implementation (ours first), and the entry of the column ``last``.
    """
    names = list(dict.fromkeys(name for _, seconds, _ in rows for name in seconds))
    table = Table(title=title, title_justify="left")
    for heading in ("", *names, last):
        table.add_column(heading, justify="right" if heading else "left")
    for label, seconds, entry in rows:
        ours = seconds[names[0]]
        others = [
            f"{seconds[name] * 1e3:.2f} ({seconds[name] / ours:.2f}×)" if name in seconds else "–"
            for name in names[1:]
        ]
        table.add_row(label, f"{ours * 1e3:.2f}", *others, entry)
    console.print(table)


def linears(name: str, dtype: torch.dtype, repeats: int) -> None:
    """All linear layers of a step; the LM head takes every row too."""
    shapes = [*IN_A_LAYER * LAYERS, (HIDDEN, VOCAB_SIZE)]
    weights = [(torch.randn(out, size) / size**0.5).to(dtype) for size, out in shapes]
    layers: dict[str, Sequence[Layer]] = {
        "ours": [linear.PackedLinear(weight) for weight in weights],
        "oneDNN, prepacked": [linear._onednn(weight, None, relu=False) for weight in weights],
        "F.linear": [partial(F.linear, weight=weight) for weight in weights],
    }
    rows = []
    for count in ROWS:
        inputs = {size: torch.randn(count, size).to(dtype) for size in (HIDDEN, FFN)}
        x = [inputs[size] for size, _ in shapes]
        seconds = median_s({who: partial(apply, some, x) for who, some in layers.items()}, repeats)
        flops = 2 * count * sum(weight.numel() for weight in weights)
        rows.append((f"{count} rows", seconds, f"{flops / seconds['ours'] / 1e9:.0f}"))
    report(f"All linears of a step, {name}, ms", rows, "ours, GFLOP/s")


def apply(layers: Sequence[Layer], inputs: Sequence[Tensor]) -> None:
    for layer, x in zip(layers, inputs, strict=True):
        layer(x)


def quantized_linears(model: str, repeats: int) -> None:
    """Linears of some layers, with weights in 4 bits, in INT8 and in bfloat16."""
    in_a_layer, count = QUANTIZED[model]
    shapes = in_a_layer * count
    weights = [(torch.randn(out, size) / size**0.5).to(torch.bfloat16) for size, out in shapes]
    in_4_bits = [
        ops.QuantizedLinear(
            [quantize_groups(weight, bits=4, group=64)], dtype=weight.dtype, device=weight.device
        )
        for weight in weights
    ]
    layers: dict[str, Sequence[Layer]] = {
        "4 bits": in_4_bits,
        "INT8": [ops.Int8Linear(weight) for weight in weights],
        "bfloat16": [linear.PackedLinear(weight) for weight in weights],
    }
    num_bytes = sum(layer.nbytes for layer in in_4_bits)
    rows = []
    for height in QUANTIZED_ROWS:
        x = [torch.randn(height, size).to(torch.bfloat16) for size, _ in shapes]
        seconds = median_s({who: partial(apply, some, x) for who, some in layers.items()}, repeats)
        rows.append((f"{height} rows", seconds, f"{num_bytes / seconds['4 bits'] / 1e9:.1f}"))
    report(f"Linears of {count} layers of {model}, ms", rows, "4 bits, GB/s")


def decode_attention(model: str, name: str, dtype: torch.dtype, repeats: int) -> None:
    """Some layers of a decode step, over scattered blocks."""
    heads, kv_heads, size, layers = DECODED[model]
    rows = []
    for batch, context in DECODES:
        num_blocks = batch * -(-context // BLOCK_SIZE)
        kv = torch.randn(num_blocks, layers, 2, kv_heads, BLOCK_SIZE, size).to(dtype)
        tables = torch.randperm(num_blocks).to(torch.int32).view(batch, -1)
        query = torch.randn(batch, heads, size).to(dtype)
        calls: dict[str, Call] = {
            "ours": partial(paged, query, kv, tables, context),
            "ours, KV in INT8": partial(paged, query, in_int8(kv), tables, context),
        }
        if batch * context <= MOST_GATHERED_TOKENS:
            calls["gather + SDPA"] = partial(gathered, query, kv, tables, context)
        seconds = median_s(calls, repeats)
        num_bytes = kv.numel() * kv.element_size() * context / (tables.shape[1] * BLOCK_SIZE)
        rows.append((f"{batch} × {context}", seconds, f"{num_bytes / seconds['ours'] / 1e9:.0f}"))
    title = f"Attention of a decode step, {layers} layers of {model}, batch × context, {name}, ms"
    report(title, rows, "ours, GB/s")


def common_beginnings(model: str, name: str, dtype: torch.dtype, repeats: int) -> None:
    """Some layers of a decode step of jobs that begin with the same blocks."""
    heads, kv_heads, size, layers = DECODED[model]
    rows = []
    for batch, common in BEGINNINGS:
        context, shared = common + OWN_TOKENS, common // BLOCK_SIZE
        own = -(-context // BLOCK_SIZE) - shared
        order = torch.randperm(shared + batch * own).to(torch.int32)
        tables = torch.cat(
            [order[:shared].expand(batch, -1), order[shared:].view(batch, own)], dim=1
        )
        plain = torch.randn(len(order), layers, 2, kv_heads, BLOCK_SIZE, size).to(dtype)
        query = torch.randn(batch, heads, size).to(dtype)
        for label, kv in (("", plain), (", KV in INT8", in_int8(plain))):
            decode = partial(paged, query, kv, tables, context)
            calls = {"read once": partial(decode, reads_once=True), "read by each": decode}
            seconds = median_s(calls, repeats)
            pairs = batch * context * heads * layers
            entry = f"{seconds['read once'] * 1e9 / pairs:.1f}"
            rows.append((f"{batch} × {common}{label}", seconds, entry))
    title = f"Attention of decodes that begin alike, {layers} layers of {model}, {name}, ms"
    report(title, rows, "ns for a query and a position")


def in_int8(kv: Tensor) -> Tensor:
    """A cache of the same shape with any codes, and scales of one hundredth."""
    cache = torch.empty((*kv.shape[:-1], kv.shape[-1] + int8_cache.SCALE_BYTES), dtype=torch.int8)
    codes, scales = int8_cache.codes_and_scales(cache)
    codes.random_(-int8_cache.MOST, int8_cache.MOST + 1)
    scales.fill_(0.01)
    return cache


def paged(
    query: Tensor, kv: Tensor, tables: Tensor, context: int, *, reads_once: bool = False
) -> None:
    """reads_once: whether blocks that are in several tables are."""
    lengths = torch.full((len(query),), context, dtype=torch.int32)
    flat, firsts = flattened(tables)
    beginnings = None
    if reads_once:
        beginnings = find(flat.numpy(), firsts.numpy(), lengths.numpy(), BLOCK_SIZE)
    rule = ops.AttentionRule(query.shape[-1] ** -0.5)
    for layer in range(kv.shape[1]):
        ops.paged_decode(query, kv, layer, flat, firsts, lengths, rule, None, beginnings)


def flattened(tables: Tensor) -> tuple[Tensor, Tensor]:
    """Block tables of jobs of one length, as the operations take them: all blocks, and where each
    job's begin."""
    jobs, count = tables.shape
    return tables.flatten(), torch.arange(jobs, dtype=torch.int32) * count


def gathered(query: Tensor, kv: Tensor, tables: Tensor, context: int) -> None:
    for layer in range(kv.shape[1]):
        blocks = kv[tables.flatten().long(), layer].unflatten(0, tables.shape)
        keys, values = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :context]
        F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)


def prefill_attention(name: str, dtype: torch.dtype, repeats: int) -> None:
    """All layers of whole prompts and of a last chunk, ours over scattered blocks."""
    rows = []
    for batch, tokens, context in PREFILLS:
        num_blocks = batch * context // BLOCK_SIZE
        kv = torch.randn(num_blocks, LAYERS, 2, HEADS, BLOCK_SIZE, HEAD_DIM).to(dtype)
        tables = torch.randperm(num_blocks).to(torch.int32).view(batch, -1)
        query = torch.randn(batch, tokens, HEADS, HEAD_DIM).to(dtype)
        key, value = torch.randn(2, batch, HEADS, context, HEAD_DIM).to(dtype)
        calls: dict[str, Call] = {
            "ours": partial(prefill, query, kv, tables, context),
            "SDPA, contiguous": partial(sdpa, query.transpose(1, 2), key, value),
        }
        seconds = median_s(calls, repeats)
        seen = tokens * (context - tokens / 2)  # pairs of a query and a key
        flops = 4 * batch * seen * HEADS * HEAD_DIM * LAYERS
        label = f"{batch} × {tokens}" + (f" of {context}" if tokens < context else "")
        rows.append((label, seconds, f"{flops / seconds['ours'] / 1e9:.0f}"))
    report(f"Attention of prefills, {name}, ms", rows, "ours, GFLOP/s")


def prefill(query: Tensor, kv: Tensor, tables: Tensor, context: int) -> None:
    batch, tokens = query.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32) * tokens
    lengths = torch.full((batch,), context, dtype=torch.int32)
    rows = query.flatten(0, 1)
    flat, firsts = flattened(tables)
    for layer in range(LAYERS):
        ops.paged_prefill(
            rows, kv, layer, flat, firsts, lengths, starts, ops.AttentionRule(HEAD_DIM**-0.5)
        )


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> None:
    tokens, context = query.shape[2], key.shape[2]
    mask = None
    if tokens < context:
        mask = torch.ones(tokens, context, dtype=torch.bool).tril(context - tokens)
    for _ in range(LAYERS):
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="(both)")
    parser.add_argument("--only", choices=("beginnings",), help="(everything)")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    with torch.inference_mode():
        names = [arguments.dtype] if arguments.dtype else list(DTYPES)
        for name in names:
            for model in DECODED:
                common_beginnings(model, name, DTYPES[name], arguments.repeats)
        if arguments.only:
            return
        for name in names:
            linears(name, DTYPES[name], arguments.repeats)
            for model in DECODED:
                decode_attention(model, name, DTYPES[name], arguments.repeats)
            prefill_attention(name, DTYPES[name], arguments.repeats)
        for model in QUANTIZED if arguments.dtype != "float32" else ():
            quantized_linears(model, arguments.repeats)


if __name__ == "__main__":
    main()
