"""Cases of linears with weights of few bits, for a CPU's implementations and a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import kernel_reference as reference
import torch
from fastserve_kernels import ops
from fastserve_kernels.quantized_weight import GroupNumbers, QuantizedWeight
from kernel_cases import DTYPES, NAN, Case, Comparison, near
from torch import Tensor

# One, and around the most rows of each tile, and of the kernel.
ROWS = (0, 1, 16, 17, 70, 257)


def _halves(out: int, groups: int, most: float = 0.02) -> GroupNumbers:
    return GroupNumbers((torch.rand(out, groups) * most).half())


def _floats(out: int, groups: int) -> GroupNumbers:
    return GroupNumbers(torch.rand(out, groups) * 0.02)


def _products(out: int, groups: int) -> GroupNumbers:
    """8-bit numbers, and float16 steps of 4 of them each."""
    values = torch.randint(0, 64, (out, groups)).to(torch.uint8)
    return GroupNumbers(values, (torch.rand(out, groups // 4) * 4e-4).half())


def _codes(bits: int, out: int, size: int) -> Tensor:
    return torch.randint(0, 2**bits, (out, size)).to(torch.uint8)


def _q4_1(out: int, size: int) -> QuantizedWeight:
    groups = size // 32
    numbers = _halves(out, groups), _halves(out, groups)
    return QuantizedWeight("Q4_1", _codes(4, out, size), 4, 32, *numbers)


def _q4_0_of_large_numbers(out: int, size: int) -> QuantizedWeight:
    scales = _halves(out, size // 32, most=50)
    return QuantizedWeight("Q4_0", _codes(4, out, size), 4, 32, scales, center=8)


def _awq(out: int, size: int) -> QuantizedWeight:
    groups = size // 64
    return QuantizedWeight(
        "AWQ", _codes(4, out, size), 4, 64, _halves(out, groups), _floats(out, groups)
    )


def _gptq(out: int, size: int) -> QuantizedWeight:
    return replace(_awq(out, size), format="GPTQ", order=torch.randperm(size))


def _q4_k(out: int, size: int) -> QuantizedWeight:
    groups = size // 32
    numbers = _products(out, groups), _products(out, groups)
    return QuantizedWeight("Q4_K", _codes(4, out, size), 4, 32, *numbers)


def _four_bits_in_small_groups(out: int, size: int) -> QuantizedWeight:
    return QuantizedWeight(
        "groups of 16", _codes(4, out, size), 4, 16, _halves(out, size // 16), center=7
    )


def _q5_1(out: int, size: int) -> QuantizedWeight:
    groups = size // 32
    numbers = _halves(out, groups), _halves(out, groups)
    return QuantizedWeight("Q5_1", _codes(5, out, size), 5, 32, *numbers)


def _eight_bits_with_offsets(out: int, size: int) -> QuantizedWeight:
    groups = size // 128
    numbers = _halves(out, groups), _floats(out, groups)
    return QuantizedWeight("8 bits", _codes(8, out, size), 8, 128, *numbers)


def _q6_k(out: int, size: int) -> QuantizedWeight:
    scales = _products(out, size // 16)
    return QuantizedWeight("Q6_K", _codes(6, out, size), 6, 16, scales, center=32)


def _q8_0(out: int, size: int) -> QuantizedWeight:
    scales = _halves(out, size // 32, most=0.01)
    return QuantizedWeight("Q8_0", _codes(8, out, size), 8, 32, scales, center=128)


def _float8_by_block(out: int, size: int) -> QuantizedWeight:
    codes = (torch.randn(out, size) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    return QuantizedWeight("FP8", codes, 8, 128, _floats(out, size // 128))


def _float8_by_row(out: int, size: int) -> QuantizedWeight:
    codes = (torch.randn(out, size) * 0.01).to(torch.float8_e4m3fn)  # mostly denormal
    return QuantizedWeight("FP8", codes, 8, size, _floats(out, 1))


def _odd_groups(out: int, size: int) -> QuantizedWeight:
    """Groups that no kernel of a GPU knows."""
    scales = _halves(out, size // 8)
    return QuantizedWeight("groups of 8", _codes(4, out, size), 4, 8, scales, center=8)


def _plain(out: int, size: int) -> Tensor:
    return torch.randn(out, size) * 0.1


_Make = Callable[[int, int], "QuantizedWeight | Tensor"]
# Weights that are one below the other, with their numbers of rows; columns; what is special.
LAYERS: list[tuple[str, list[tuple[_Make, int]], int, str]] = [
    ("Q4_1", [(_q4_1, 130)], 1024, "bias and ReLU"),
    ("Q4_1 in parts", [(_q4_1, 40), (_q4_1, 24)], 96, "none"),
    ("Q4_0 of large numbers", [(_q4_0_of_large_numbers, 70)], 160, "bias"),
    ("AWQ", [(_awq, 70)], 192, "bias"),
    ("GPTQ in parts", [(_gptq, 40), (_gptq, 24)], 192, "bias"),
    ("Q4_K in whole tiles", [(_q4_k, 128)], 256, "none"),
    ("Q6_K", [(_q6_k, 66)], 256, "bias"),
    ("Q8_0", [(_q8_0, 33)], 224, "bias"),
    ("offsets and groups", [(_four_bits_in_small_groups, 40), (_q5_1, 24),
                            (_eight_bits_with_offsets, 16)], 256, "bias"),
    ("FP8 by block", [(_float8_by_block, 70)], 384, "bias and ReLU"),
    ("FP8 by row", [(_float8_by_row, 40)], 200, "bias"),
    ("a mixture", [(_q4_k, 48), (_q6_k, 16), (_plain, 24), (_odd_groups, 8)], 256, "bias and ReLU"),
]  # fmt: skip


def cases(*, interpreted: bool = False) -> Iterator[Case]:
    """If ``interpreted``, bfloat16 is left out: Triton's interpreter gets its products wrong."""
    for dtype in DTYPES:
        if interpreted and dtype == torch.bfloat16:
            continue
        for number, layer in enumerate(LAYERS):
            yield Case("quantized_linear", (dtype, number), _quantized_linear, layer[0])


def _quantized_linear(
    dtype: torch.dtype, number: int, device: torch.device
) -> Iterator[Comparison]:
    _, parts, size, extras = LAYERS[number]
    weights = [make(out, size) for make, out in parts]
    weights = [one.to(dtype) if isinstance(one, Tensor) else one for one in weights]
    # Kernels may round weights to the dtype, or multiply them exactly. The limits allow for both.
    table = torch.cat(
        [
            one.dequantized(torch.float32) if isinstance(one, QuantizedWeight) else one.float()
            for one in weights
        ]
    )
    out_features = len(table)
    bias = None if extras == "none" else torch.randn(out_features).to(dtype)
    has_relu = extras == "bias and ReLU"
    layer = ops.QuantizedLinear(
        [one.to(device) if isinstance(one, Tensor) else one for one in weights],
        None if bias is None else bias.to(device),
        has_relu,
        dtype=dtype,
        device=device,
    )
    for rows in ROWS:
        wide = torch.full((rows, size + 16), NAN, dtype=dtype)  # rows with a gap between them
        wide[:, :size] = torch.randn(rows, size)
        expected = reference.linear(wide[:, :size], table, bias, has_relu)
        y = layer(wide.to(device)[:, :size]).cpu()
        yield near(f"{rows} rows", y, expected, dtype)
    ids = torch.tensor([0, out_features - 1, 5, 5])
    yield near("looked up", layer.rows(ids.to(device)).cpu(), table[ids], dtype)
    yield near("no rows", layer.rows(ids[:0].to(device)).cpu(), table[:0], dtype)
