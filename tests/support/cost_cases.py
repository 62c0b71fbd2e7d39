"""Launches whose cost is counted from their machine code: what runs how often, how many bytes it
moves, and how long an H100 and an H200 took where `docs/performance_gpu.md` says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod

from ahead_of_time import Arguments, CompiledKernel
from fastserve_kernels.gpu.launch_parameters import next_power_of_2
from fastserve_kernels.gpu.packed_weight import COLUMNS_MULTIPLE
from kernel_launches import JOBS, PACKED, TOKENS

BATCH, SPLIT_TOKENS, PROMPT = 64, 256, 2048
HIDDEN, WIDE, ROWS = 5120, 20480, 2048
"""Sizes of OPT-13B, as `benchmarks/gpu` times them."""


@dataclass(frozen=True)
class Work:
    """What one kernel of a launch does.

    programs: of the grid, those that have work.
    trips: of `machine_code.costs`, on average.
    memory_bytes: read from device memory and written to it.
    cache_bytes: read through the L2 cache, where tiles are read by several programs; else 0.
    """

    programs: float
    trips: tuple[float, ...] | None = ()
    memory_bytes: float = 0
    cache_bytes: float = 0


@dataclass(frozen=True)
class Case:
    """works: what each kernel of the launch does, given their tiles and their grids.
    measured: microseconds of the whole launch, by GPU."""

    name: str
    shape: str
    function: str
    arguments: Arguments
    works: Callable[[Sequence[CompiledKernel]], list[Work]]
    measured: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}, {self.shape}"


def decode(
    heads: int, kv_heads: int, head_dim: int, context: int, measured: dict[str, float],
    int8: bool = False,
) -> Case:  # fmt: skip
    """`BATCH` jobs of ``context`` tokens each. Partial results stay in the L2 cache."""
    splits = context // SPLIT_TOKENS
    token_bytes = head_dim + 4 if int8 else 2 * head_dim
    row_bytes = 2 * BATCH * heads * head_dim

    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        (kernel,) = kernels
        items, (programs,) = BATCH * splits * kv_heads, kernel.grid
        kv = 2 * BATCH * context * kv_heads * token_bytes
        tiles = SPLIT_TOKENS / kernel.constants["KEY_TILE"]
        # One of a row's items merges the row, in two loops.
        merged_splits = kernel.constants["MERGED_ROWS"] // next_power_of_2(heads // kv_heads)
        merges = ceil(splits / merged_splits) / splits
        padding = BATCH * kv_heads / programs
        trips = (items / programs, tiles, merges, merges, padding)
        return [Work(programs, trips, kv + 2 * row_bytes)]

    return Case(
        "paged_decode" + (", cache in INT8" if int8 else ""),
        f"{BATCH} × {context}, {heads}/{kv_heads} heads of {head_dim}",
        "decode",
        {
            "dtype": "bfloat16", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim,
            "int8": int8,
        },
        works,
        measured,
    )  # fmt: skip


def prefill(heads: int, kv_heads: int, head_dim: int, measured: dict[str, float]) -> Case:
    """One prompt."""

    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        (kernel,) = kernels
        rows, keys = kernel.constants["QUERY_TILE"], kernel.constants["KEY_TILE"]
        tiles = PROMPT // rows
        seen_by_all = (tiles - 1) / 2 * rows
        # With overlapping products one loop has all tiles. The instructions that hide keys are
        # counted for each, although only the last tile needs them.
        trips: tuple[float, ...] = (seen_by_all / keys, rows / keys)
        if kernel.constants["OVERLAP"]:
            trips = (sum(trips),)
        return [
            Work(
                heads * tiles,
                trips,
                2 * 2 * PROMPT * (heads + kv_heads) * head_dim,
                heads * tiles * (seen_by_all + rows) * 2 * 2 * head_dim,
            )
        ]

    return Case(
        "paged_prefill",
        f"{PROMPT} tokens, {heads}/{kv_heads} heads of {head_dim}",
        "prefill",
        {"dtype": "bfloat16", "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        works,
        measured,
    )


def int8_linear(rows: int, measured: dict[str, float]) -> Case:
    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        columns = kernels[0].constants["IN_TILE"]
        return _linear_works(kernels, rows, WIDE, columns, bits=8)

    return Case(
        "int8_linear", _linear_shape(rows, WIDE), "linear",
        {"dtype": "bfloat16", "rows": rows, "out_features": WIDE, "in_features": HIDDEN},
        works, measured,
    )  # fmt: skip


def quantized_linear(
    packing: str, rows: int, measured: dict[str, float], out_features: int = WIDE
) -> Case:
    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        bits = _weight_bits(packing)
        return _linear_works(kernels, rows, out_features, COLUMNS_MULTIPLE, bits)

    return Case(
        f"quantized_linear, {packing}", _linear_shape(rows, out_features), "quantized",
        {
            "dtype": "bfloat16", "packing": packing, "rows": rows, "out_features": out_features,
            "in_features": HIDDEN,
        },
        works, measured,
    )  # fmt: skip


def _linear_works(
    kernels: Sequence[CompiledKernel], rows: int, out_features: int, columns: int, bits: float
) -> list[Work]:
    """Grid: tiles of rows, tiles of out, and splits of the columns if there are any; then a kernel
    adds up their sums, which stay in the L2 cache.

    columns: of an iteration.
    """
    (row_tiles, out_tiles), splits = kernels[0].grid[:2], prod(kernels[0].grid[2:])
    weight_bytes = out_features * HIDDEN * bits / 8
    multiply = Work(
        row_tiles * out_tiles * splits,
        (HIDDEN / columns / splits,),
        weight_bytes + 2 * rows * (HIDDEN + out_features),
        row_tiles * weight_bytes + 2 * out_tiles * rows * HIDDEN,
    )
    # The compiler adds four splits at a time, then one.
    return [multiply, *(Work(prod(kernel.grid), divmod(splits, 4)) for kernel in kernels[1:])]


def rowwise(
    function: str, arguments: Arguments, row_bytes: int, measured: dict[str, float],
    rows: int = ROWS,
) -> Case:  # fmt: skip
    """row_bytes: read and written for each row. Weights of all rows do not count."""

    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        (kernel,) = kernels
        return [Work(prod(kernel.grid) * rows / TOKENS, (), rows * row_bytes)]

    sizes = "; ".join(f"{key} {value}" for key, value in arguments.items() if key != "dtype")
    return Case(
        function, f"{rows} rows, {sizes}", function, {"dtype": "bfloat16", **arguments},
        works, measured,
    )  # fmt: skip


def choose_tokens(vocab: int) -> Case:
    """By top-k, top-p and min-p. How often the search for the last token passes over a row depends
    on the data: it counts as one pass."""

    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        row_bytes = BATCH * vocab * 2  # from device memory once, then from the cache
        return [
            Work(prod(kernel.grid) * BATCH / JOBS, None, row_bytes if first else 0)
            for first, kernel in zip((True, False, False), kernels, strict=True)
        ]

    return Case(
        "choose_tokens",
        f"{BATCH} rows of {vocab}",
        "choose_tokens",
        {"dtype": "bfloat16", "vocab": vocab},
        works,
    )


def blocks(function: str, measured: dict[str, float]) -> Case:
    """INT8 blocks for the host: 16 of OPT-13B."""
    heads, head_dim, count = 40, 128, 16

    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        (kernel,) = kernels
        tiles = count * kernel.grid[0]  # a layer's K or V of one head
        # Numbers in 16 bits, their codes, and a scale and an offset for each channel.
        tile_bytes = (2 + 1) * 16 * head_dim + 2 * 2 * head_dim
        return [Work(tiles, (), tiles * tile_bytes)]

    return Case(
        function, f"{count} blocks of 40 layers, {heads} heads of {head_dim}", function,
        {"dtype": "bfloat16", "kv_heads": heads, "head_dim": head_dim},
        works, measured,
    )  # fmt: skip


def grouped(packing: str | None) -> Case:
    """A token's 8 choices of 64 experts, in 16 bits if ``packing`` is None."""
    rows, groups, out_features, in_features = 8, 64, 1536, 2048
    bits = 16 if packing is None else _weight_bits(packing)

    def works(kernels: Sequence[CompiledKernel]) -> list[Work]:
        (kernel,) = kernels
        columns = kernel.constants.get("IN_TILE", COLUMNS_MULTIPLE)
        weight_bytes = rows * out_features * in_features * bits / 8
        return [Work(prod(kernel.grid), (in_features / columns,), weight_bytes)]

    arguments: Arguments = {
        "dtype": "bfloat16", "rows": rows, "groups": groups, "out_features": out_features,
        "in_features": in_features,
    }  # fmt: skip
    shape = f"{rows} of {groups} experts, {out_features} × {in_features}"
    if packing is None:
        return Case("grouped_linear", shape, "grouped_linear", arguments, works)
    return Case(
        f"grouped_quantized_linear, {packing}", shape, "grouped_quantized",
        {"packing": packing, **arguments}, works,
    )  # fmt: skip


def _linear_shape(rows: int, out_features: int) -> str:
    return f"{rows} rows, {out_features} × {HIDDEN}"


def _weight_bits(packing: str) -> float:
    layout, numbers = PACKED[packing]
    return layout.bits + 32 * (2 if numbers == "both" else 1) / layout.group


_KV_HEADS: Arguments = {"kv_heads": 40, "head_dim": 128}
_HEADS: Arguments = {"heads": 40, **_KV_HEADS, "rotary_dim": 128}
CASES = [
    decode(40, 40, 128, 512, {"H100": 269, "H200": 191}),
    decode(32, 8, 128, 1024, {"H100": 128, "H200": 81.8}),
    decode(40, 40, 64, 512, {"H100": 152, "H200": 105}),
    decode(32, 8, 64, 2048, {"H100": 127, "H200": 82.4}),
    decode(40, 40, 128, 512, {"H200": 168}, int8=True),
    decode(32, 8, 128, 1024, {"H200": 86.5}, int8=True),
    decode(40, 40, 64, 512, {"H200": 106}, int8=True),
    decode(32, 8, 64, 2048, {"H200": 103}, int8=True),
    prefill(40, 40, 128, {}),  # the H100 and H200 ran another form, without overlap
    prefill(32, 8, 128, {}),
    prefill(40, 40, 64, {"H100": 71.2, "H200": 71.1}),
    prefill(32, 8, 64, {"H100": 58.1, "H200": 58.9}),
    int8_linear(1, {}),
    int8_linear(16, {}),
    int8_linear(64, {}),
    quantized_linear("Q4_1", 1, {}),
    quantized_linear("Q4_1", 16, {}),
    quantized_linear("Q4_1", 64, {}),
    quantized_linear("INT4", 16, {}),
    quantized_linear("Q4_K", 16, {}),
    quantized_linear("Q6_K", 16, {}),
    quantized_linear("Q6_K", 64, {}),
    quantized_linear("FP8", 16, {}),
    quantized_linear("FP8", 64, {}),
    quantized_linear("Q4_1", 16, {}, HIDDEN),
    grouped(None),
    grouped("Q4_1"),
    rowwise("add_layer_norm", {"size": HIDDEN}, 4 * 2 * HIDDEN, {"H100": 3.82, "H200": 3.5}, 64),
    rowwise("add_layer_norm", {"size": HIDDEN}, 4 * 2 * HIDDEN, {"H100": 32, "H200": 26.1}),
    rowwise("add_rms_norm", {"size": HIDDEN}, 4 * 2 * HIDDEN, {"H100": 30.4, "H200": 22.8}),
    rowwise("bias_relu", {"size": WIDE}, 2 * 2 * WIDE, {"H100": 61.1, "H200": 43.8}),
    rowwise("silu_mul", {"size": WIDE}, 3 * 2 * WIDE, {"H100": 88.2, "H200": 61.8}),
    rowwise("kv_write", _KV_HEADS, 4 * 2 * HIDDEN, {"H100": 31.3, "H200": 23}),
    rowwise("rope_kv_write", _HEADS, 6 * 2 * HIDDEN, {"H100": 46.3, "H200": 33.6}),
    choose_tokens(50272),
    blocks("quantize_blocks", {"H100": 347, "H200": 345}),
    blocks("dequantize_blocks", {"H100": 116, "H200": 83.9}),
]  # fmt: skip
