"""Linears with weights of few bits: their results are those of a `PackedLinear`, bit for bit, or,
where rows are rounded to 8 bits, those of such rows and exact weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Literal

import gguf
import numpy as np
import pytest
import torch
from fastserve_kernels import ops
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float32]
CPU = torch.device("cpu")
Numbers = torch.dtype | Literal["steps"]
NUMBERS: list[Numbers] = [torch.float16, torch.bfloat16, torch.float32, "steps"]
# In features and columns of a group: whole superblocks or not, whole vectors or not, a whole row.
GROUPS = [
    (32, 16),
    (256, 32),
    (576, 32),
    (288, 96),
    (1536, 128),
    (576, 576),
    (50, 50),
    (48, 16),
    (48, 48),
]
ROWS = (0, 1, 2, 3, 4, 5, 17, 100)


@pytest.fixture(autouse=True)
def compiled() -> None:
    ops.set_cpu_backend("compiled")


def weight_of(
    out: int, size: int, *, bits: int, group: int, numbers: Numbers, has_offsets: bool
) -> QuantizedWeight:
    groups = size // group

    def some() -> GroupNumbers:
        if numbers == "steps":
            count = 8 if groups % 8 == 0 else groups
            # As in Q4_K, whose numbers are from 0 to 63, and in Q6_K.
            values = (
                torch.randint(64, (out, groups), dtype=torch.uint8)
                if has_offsets
                else torch.randint(-32, 64, (out, groups), dtype=torch.int8)
            )
            return GroupNumbers(values, torch.rand(out, groups // count).half() / 64)
        return GroupNumbers((torch.randn(out, groups) / 64).to(numbers))

    return QuantizedWeight(
        "random",
        torch.randint(0, 2**bits, (out, size), dtype=torch.uint8),
        bits,
        group,
        some(),
        some() if has_offsets else None,
        0 if has_offsets else 2 ** (bits - 1),
    )


def plain(weight: QuantizedWeight | Tensor, dtype: torch.dtype) -> Tensor:
    return weight.dequantized(dtype) if isinstance(weight, QuantizedWeight) else weight


def rounded(x: Tensor, neighbours: int) -> Tensor:
    """Rows [n, in] in 8 bits, float64, with a scale for so many neighbours."""
    size = x.shape[1]
    groups = torch.nn.functional.pad(x.float(), (0, -size % neighbours))
    groups = groups.unflatten(1, (-1, neighbours))
    most = groups.abs().amax(-1, keepdim=True)
    # A fused multiply-add does not round the product before it rounds to whole numbers. And torch
    # takes 127 / most for 127 times a rounded reciprocal.
    steps = torch.tensor(127.0).div(most)
    codes = torch.round(groups.double() * steps.double()).where(most > 0, 0.0)
    return (codes * (most / 127).double()).flatten(1)[:, :size]


def check_rounding(
    linear: ops.QuantizedLinear, weights: list[QuantizedWeight], bias: Tensor, relu: bool, x: Tensor
) -> None:
    exact = torch.cat([weight.dequantized(torch.float32) for weight in weights]).double()
    has_large_groups = all(one.group % 64 == 0 or one.group == x.shape[1] for one in weights)
    expected = rounded(x, 64 if has_large_groups else 32) @ exact.T + bias.double()
    if relu:
        expected = expected.relu()
    terms = x.double().abs() @ exact.abs().T + bias.double().abs()
    error = (linear(x).double() - expected).abs()
    # Sums in float32, and a result in bfloat16.
    assert torch.all(error <= 1e-5 * terms + 2**-8 * expected.abs())


def check(
    weights: list[QuantizedWeight | Tensor], dtype: torch.dtype, *, relu: bool = False
) -> ops.QuantizedLinear:
    whole = torch.cat([plain(weight, dtype) for weight in weights])
    bias = torch.randn(len(whole)).to(dtype)
    linear = ops.QuantizedLinear(weights, bias, relu, dtype=dtype, device=CPU)
    assert linear.path == "compiled"
    assert (linear.out_features, linear.in_features) == whole.shape
    expected = ops.PackedLinear(whole, bias, relu)
    for rows in ROWS:
        wide = torch.randn(rows, whole.shape[1] + 16).to(dtype)  # rows with a gap between them
        x = wide[:, : whole.shape[1]]
        y = linear(x)
        assert y.is_contiguous()
        if linear.rounds_rows:
            few_bits = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
            check_rounding(linear, few_bits, bias, relu, x)
        else:
            assert torch.equal(y, expected(x))
    ids = torch.randint(0, len(whole), (40,))
    assert torch.equal(linear.rows(ids), whole[ids])
    # As a rank that has some rows of a table.
    ids_of_all = torch.arange(len(whole) + 20)
    is_here = (ids_of_all >= 10) & (ids_of_all < len(whole) + 10)
    found = linear.rows(ids_of_all, first=10)
    assert torch.equal(found[is_here], whole)
    assert not found[~is_here].any()
    return linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "group"), GROUPS)
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_all_kinds_of_numbers(bits: int, size: int, group: int, dtype: torch.dtype) -> None:
    for numbers, has_offsets in product(NUMBERS, (False, True)):
        weight = weight_of(
            70, size, bits=bits, group=group, numbers=numbers, has_offsets=has_offsets
        )
        check([weight], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [128, 256])
def test_float8(group: int, dtype: torch.dtype) -> None:
    """Every code but the NaNs."""
    codes = torch.arange(256, dtype=torch.uint8).expand(70, -1).clone()
    codes[:, [0x7F, 0xFF]] = 0
    scales = GroupNumbers(torch.rand(70, 256 // group))
    check([QuantizedWeight("fp8", codes.view(torch.float8_e4m3fn), 8, group, scales)], dtype)


@pytest.mark.parametrize("damage", ["NaN", "group of 24"])
def test_what_the_kernels_do_not_know_is_dequantized(damage: str) -> None:
    if damage == "NaN":
        codes = torch.randn(40, 48).to(torch.float8_e4m3fn)
        codes[3, 5] = torch.nan
        weight = QuantizedWeight("fp8", codes, 8, 48, GroupNumbers(torch.rand(40, 1)))
    else:
        weight = weight_of(40, 48, bits=4, group=24, numbers=torch.float16, has_offsets=False)
    linear = ops.QuantizedLinear([weight], dtype=torch.float32, device=CPU)
    expected = ops.PackedLinear(weight.dequantized(torch.float32))
    x = torch.randn(3, 48)
    assert torch.equal(linear(x).isnan(), expected(x).isnan())
    assert torch.equal(linear(x).nan_to_num(), expected(x).nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
def test_weights_in_different_formats(dtype: torch.dtype, relu: bool) -> None:
    """Some end within a panel."""

    def some(out: int, bits: int, numbers: Numbers) -> QuantizedWeight:
        return weight_of(out, 512, bits=bits, group=32, numbers=numbers, has_offsets=bits != 6)

    tensor = torch.randn(33, 512).to(dtype)
    check(
        [some(96, 4, "steps"), tensor, some(7, 6, "steps"), some(40, 8, torch.float16)],
        dtype,
        relu=relu,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "bits", "group", "has_offsets"),
    [(768, 4, 32, True), (704, 8, 64, False), (1600, 6, 64, True), (50, 5, 50, True)],
    ids=str,
)
def test_rows_do_not_depend_on_the_batch(
    size: int, bits: int, group: int, has_offsets: bool, dtype: torch.dtype
) -> None:
    weight = weight_of(
        100, size, bits=bits, group=group, numbers=torch.float16, has_offsets=has_offsets
    )
    linear = ops.QuantizedLinear([weight], dtype=dtype, device=CPU)
    x = torch.randn(500, size).to(dtype)  # mostly more than one packed block
    together = linear(x)
    # Around the most rows of a tile, and of the tiles that are multiplied one by one.
    for rows in (1, 2, 6, 7, 16, 48, 49, 400):
        assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[-rows:]), together[-rows:])


def test_transposed_x() -> None:
    weight = weight_of(64, 48, bits=4, group=16, numbers=torch.float16, has_offsets=True)
    linear = ops.QuantizedLinear([weight], dtype=torch.float32, device=CPU)
    x = torch.randn(48, 9).T
    assert torch.equal(linear(x), linear(x.contiguous()))


def test_memory_is_that_of_the_formats() -> None:
    """Bytes for 32 weights in Q4_1, and for 256 in Q4_K and Q6_K, as in their files."""

    def bytes_of(group: int, bits: int, numbers: Numbers, has_offsets: bool) -> float:
        weight = weight_of(
            64, 2048, bits=bits, group=group, numbers=numbers, has_offsets=has_offsets
        )
        linear = ops.QuantizedLinear([weight], dtype=torch.bfloat16, device=CPU)
        return linear.nbytes / 64 / 2048

    assert bytes_of(32, 4, torch.float16, True) == 20 / 32
    assert bytes_of(32, 4, "steps", True) == 148 / 256  # numbers of 6 bits take 8
    assert bytes_of(256, 6, "steps", False) * 2048 == 0.75 * 2048 + 8 + 2


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_parts_of_a_weight(backend: Literal["compiled", "torch"]) -> None:
    ops.set_cpu_backend(backend)
    weight = weight_of(64, 1024, bits=4, group=32, numbers="steps", has_offsets=True)
    whole = weight.dequantized(torch.float32)
    order = torch.randperm(64)
    for rows, columns in ((slice(5, 40), slice(256, 768)), (order, slice(0, 512)), (order, None)):
        part = weight.part(rows, columns)
        expected = whole[rows, columns or slice(None)]
        linear = ops.QuantizedLinear([part], dtype=torch.float32, device=CPU)
        assert torch.equal(linear.rows(torch.arange(len(expected))), expected)
        x = torch.randn(3, expected.shape[1])
        assert torch.equal(linear(x), ops.PackedLinear(expected)(x))


@pytest.mark.parametrize("columns", [slice(16, 256), slice(0, 128), slice(32, 256)])
def test_a_group_and_the_groups_of_a_step_stay_together(columns: slice) -> None:
    weight = weight_of(8, 512, bits=4, group=32, numbers="steps", has_offsets=True)
    message = f"columns {columns.start} to {columns.stop} of a weight in random divide a group of"
    with pytest.raises(ValueError, match=message):
        weight.part(slice(0, 4), columns)


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    """Bytes [n, 16] to codes [n, 32]: the low halves come first."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=1)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    """Bytes [n, 4] to the fifth bits [n, 32] of codes."""
    return np.unpackbits(blocks, axis=1, bitorder="little") << 4


_UNPACK: dict[gguf.GGMLQuantizationType, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
    # bits, fp16 numbers at a block's start, and codes from the rest of it
    gguf.GGMLQuantizationType.Q4_0: (4, 1, _nibbles),
    gguf.GGMLQuantizationType.Q4_1: (4, 2, _nibbles),
    gguf.GGMLQuantizationType.Q5_0: (5, 1, lambda b: _nibbles(b[:, 4:]) | _fifth_bits(b[:, :4])),
    gguf.GGMLQuantizationType.Q5_1: (5, 2, lambda b: _nibbles(b[:, 4:]) | _fifth_bits(b[:, :4])),
    gguf.GGMLQuantizationType.Q8_0: (8, 1, lambda b: b ^ 128),
}


@pytest.mark.parametrize("kind", _UNPACK, ids=lambda kind: kind.name)
def test_values_are_those_of_gguf(kind: gguf.GGMLQuantizationType) -> None:
    values = torch.randn(70, 256).numpy()
    stored = gguf.quantize(values, kind)
    bits, count, codes_of = _UNPACK[kind]
    blocks = stored.reshape(70 * 8, -1)
    numbers = torch.from_numpy(blocks[:, : 2 * count].copy()).view(torch.float16).view(70, 8, -1)
    weight = QuantizedWeight(
        kind.name,
        torch.from_numpy(codes_of(blocks[:, 2 * count :])).view(70, 256),
        bits,
        32,
        GroupNumbers(numbers[..., 0]),
        GroupNumbers(numbers[..., 1]) if count == 2 else None,
        0 if count == 2 else 2 ** (bits - 1),
    )
    linear = check([weight], torch.float32)
    expected = torch.from_numpy(gguf.dequantize(stored, kind))
    assert torch.equal(linear.rows(torch.arange(70)), expected)
