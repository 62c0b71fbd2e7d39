"""What attention's machine code needs of a GPU, for sm_80 (A100) and sm_90 (H100, H200). The launch
parameters were chosen by it."""

from __future__ import annotations

import re

import pytest
from ahead_of_time import Arguments, CompiledKernel, Launch
from fastserve_kernels.gpu import launch_parameters
from fastserve_kernels.gpu.launch_parameters import PrefillParameters

MOST_SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024}
"""Shared memory of a program in bytes. The launch parameters of 8.0 also serve 8.6 and 8.9, which
have less."""
COPIES_OF_A_TILE = 3
"""Groups of copies in each iteration of the loop: the block table, K and V."""
OVERLAP_SPILLS = {False: 80, True: 112}
"""Bytes of a thread that prefill with overlapping products may spill, without and with a window.
Smaller tiles would not spill, but take more instructions than the spills."""
MATRIX_INSTRUCTION = {80: "HMMA", 90: "HGMMA"}
"""The instruction that uses the tensor cores at full rate."""

# dtype, heads, KV heads, head dimension. Those with 40 or 8 KV heads are compiled for
# `test_kernel_costs` as well.
DECODE = [
    ("bfloat16", 40, 40, 64), ("float16", 32, 32, 80), ("bfloat16", 40, 40, 128),
    ("bfloat16", 32, 8, 64), ("bfloat16", 32, 8, 128), ("bfloat16", 8, 4, 256),
]  # fmt: skip
PREFILL = [
    ("bfloat16", 40, 40, 64), ("float16", 32, 32, 80), ("bfloat16", 32, 8, 128),
    ("bfloat16", 8, 4, 256),
]  # fmt: skip
ARCHITECTURES = (80, 90)
STEPS = [(1, 1), (3, 21), (4, 64), (15, 1920)]
"""Number of decodes, and entries of the block table."""
# Rules and heads of Mistral 7B, gpt-oss and Gemma 2.
RULES: list[Arguments] = [
    {"dtype": "bfloat16", "heads": 32, "kv_heads": 8, "head_dim": 128, "window": 4096},
    {
        "dtype": "bfloat16", "heads": 64, "kv_heads": 8, "head_dim": 64, "window": 128,
        "sinks": True,
    },
    {
        "dtype": "bfloat16", "heads": 8, "kv_heads": 4, "head_dim": 256, "window": 4096,
        "capped": True,
    },
]  # fmt: skip


def launch(
    function: str, architecture: int, shape: tuple[str, int, int, int], int8: bool = False
) -> Launch:
    names = ("dtype", "heads", "kv_heads", "head_dim")
    arguments: Arguments = {**dict(zip(names, shape, strict=True)), "int8": int8}
    return Launch(function, architecture, arguments)


def writing_launch(architecture: int, int8: bool) -> Launch:
    """A decode of OPT, which also writes the new tokens."""
    plain = launch("decode", architecture, ("bfloat16", 40, 40, 128), int8)
    return Launch("decode", architecture, {**plain.arguments, "writes": True})


def check_no_spills(kernel: CompiledKernel, architecture: int) -> None:
    check_spills(kernel, architecture, most_bytes=0)


def check_spills(kernel: CompiledKernel, architecture: int, most_bytes: int) -> None:
    assert kernel.shared_bytes <= MOST_SHARED_BYTES[architecture], kernel
    assert kernel.stack_bytes <= most_bytes, kernel
    if most_bytes == 0:
        assert kernel.count("LDL", "STL") == 0, kernel


def check_memory(kernel: CompiledKernel, architecture: int, most_spilled_bytes: int = 0) -> None:
    """Checks spills, and that loads are 16 bytes wide, or 4 for single numbers."""
    check_spills(kernel, architecture, most_spilled_bytes)
    loads = kernel.count("LDG.32", "LDG.128", "LDGSTS.32", "LDGSTS.128")
    assert loads == kernel.count("LDG", "LDGSTS"), kernel
    assert kernel.count("LDG.128", "LDGSTS.128") > 0, kernel


@pytest.mark.compiles(
    lambda: [
        Launch(
            "step",
            90,
            {
                "dtype": "bfloat16",
                "heads": 12,
                "kv_heads": 12,
                "head_dim": 64,
                "num_decodes": decodes,
                "table_entries": entries,
            },
        )
        for decodes, entries in STEPS
    ]
)
def test_no_step_waits_for_the_compiler(kernels: list[CompiledKernel]) -> None:
    """One variant of each kernel serves steps of all shapes."""
    variants = [kernel.variant for kernel in kernels]
    assert variants == len(STEPS) * variants[: len(variants) // len(STEPS)]


@pytest.mark.compiles(
    lambda architecture, shape, int8: [launch("decode", architecture, shape, int8)]
)
@pytest.mark.one_of("architecture")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("shape", DECODE, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode(
    kernels: list[CompiledKernel],
    architecture: int,
    shape: tuple[str, int, int, int],
    int8: bool,
) -> None:
    (attend,) = kernels
    _, heads, kv_heads, head_dim = shape
    parameters = launch_parameters.decode(
        head_dim, 2, heads // kv_heads, divmod(architecture, 10), int8=int8
    )
    (check_no_spills if int8 else check_memory)(attend, architecture)
    # Programs have their share of the work from the start: one that waited would end late. Only a
    # grid that was measured has more than five (see `launch_parameters.INT8_DECODE_HEADS`).
    resident = attend.resident_programs
    assert resident >= min(parameters.programs_per_multiprocessor, 5), attend
    # K and V of a tile are copied while the previous tile is computed. In INT8 their scales are,
    # too.
    assert attend.copies_ahead >= COPIES_OF_A_TILE + (2 if int8 else 0), attend
    if heads > kv_heads and not int8:
        assert attend.count("HMMA") > 0, attend


@pytest.mark.compiles(lambda architecture, int8: [writing_launch(architecture, int8)])
@pytest.mark.one_of("architecture")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_decode_that_writes_tokens(
    kernels: list[CompiledKernel], architecture: int, int8: bool
) -> None:
    (attend,) = kernels
    parameters = launch_parameters.decode(128, 2, 1, divmod(architecture, 10), int8=int8)
    check_no_spills(attend, architecture)
    resident = attend.resident_programs
    assert resident >= min(parameters.programs_per_multiprocessor, 5), attend
    assert attend.copies_ahead >= COPIES_OF_A_TILE + (2 if int8 else 0), attend


@pytest.mark.compiles(lambda architecture, shape: [launch("prefill", architecture, shape)])
@pytest.mark.one_of("architecture")
@pytest.mark.parametrize("shape", PREFILL, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill(
    kernels: list[CompiledKernel], architecture: int, shape: tuple[str, int, int, int]
) -> None:
    (kernel,) = kernels
    parameters = launch_parameters.prefill(shape[3], 2, divmod(architecture, 10), int8=False)
    check_memory(kernel, architecture, OVERLAP_SPILLS[False] if parameters.overlap else 0)
    resident = kernel.resident_programs
    assert resident >= (2 if shape[3] == 64 else 1), kernel
    if parameters.overlap:
        check_overlap(kernel, parameters)
    assert kernel.count("STG") == kernel.count("STG.128") > 0, kernel
    assert kernel.count(MATRIX_INSTRUCTION[architecture]) > 0, kernel
    # As in decode, unless other programs can compute meanwhile. With overlapping products no copy
    # is of the block table.
    least = 2 if parameters.overlap else COPIES_OF_A_TILE
    assert kernel.copies_ahead >= least or resident >= 3, kernel


def check_overlap(kernel: CompiledKernel, parameters: PrefillParameters) -> None:
    """Checks that the loop computes all weights of a tile between a product and its wait."""
    during_products = re.findall(r"\bHGMMA\b.*?\bWARPGROUP\.DEPBAR\b", kernel.code, re.DOTALL)
    exponentials = sum(code.count("MUFU.EX2") for code in during_products)
    threads = 32 * parameters.num_warps
    assert exponentials >= parameters.query_tile * parameters.key_tile // threads, exponentials


@pytest.mark.compiles(
    lambda architecture, shape: [launch("prefill", architecture, shape, int8=True)]
)
@pytest.mark.one_of("architecture")
@pytest.mark.parametrize("shape", PREFILL, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prefill_of_a_cache_in_int8(
    kernels: list[CompiledKernel], architecture: int, shape: tuple[str, int, int, int]
) -> None:
    (kernel,) = kernels
    # See `launch_parameters.INT8_PREFILL`.
    check_spills(kernel, architecture, 24 if shape[3] == 256 else 0)
    assert kernel.resident_programs >= 1, kernel
    assert kernel.count(MATRIX_INSTRUCTION[architecture]) > 0, kernel


@pytest.mark.compiles(
    lambda architecture, arguments: [
        Launch(function, architecture, arguments) for function in ("decode", "prefill")
    ]
)
@pytest.mark.one_of("architecture")
@pytest.mark.parametrize("arguments", RULES, ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_other_rules(
    kernels: list[CompiledKernel], architecture: int, arguments: Arguments
) -> None:
    """A rule takes registers, but leaves kernels their place, their early loads and their dot
    products."""
    attend, prefill = kernels
    check_no_spills(attend, architecture)
    head_dim, group = int(arguments["head_dim"]), arguments["heads"] // arguments["kv_heads"]
    of_prefill = launch_parameters.prefill(head_dim, 2, divmod(architecture, 10), int8=False)
    check_spills(prefill, architecture, OVERLAP_SPILLS[True] if of_prefill.overlap else 0)
    if of_prefill.overlap:
        check_overlap(prefill, of_prefill)
    parameters = launch_parameters.decode(head_dim, 2, group, divmod(architecture, 10), int8=False)
    resident = attend.resident_programs
    assert resident >= parameters.programs_per_multiprocessor, attend
    assert attend.copies_ahead >= COPIES_OF_A_TILE, attend
    assert prefill.count(MATRIX_INSTRUCTION[architecture]) > 0, prefill
