"""INT8 KV blocks: the largest error of a value, and independence from everything else."""

from __future__ import annotations

import kernel_reference as reference
import pytest
import torch
from fastserve_kernels.kv_quantization import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LAYERS, BLOCK_SIZE, HEAD_DIM = 2, 16, 8
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOAT16_ROUNDING = 2.0**-11  # relative rounding error of each of the two parameters
LEAST_SCALE = 2.0**-14
NAN, INF = float("nan"), float("inf")


def make_blocks(count: int, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    """Channels have many means and spreads, as those of keys."""
    channel = (count, LAYERS, 2, kv_heads, 1, HEAD_DIM)
    values = torch.randn(count, LAYERS, 2, kv_heads, BLOCK_SIZE, HEAD_DIM)
    return (values * torch.rand(channel) * 4 + torch.randn(channel) * 5).to(dtype)


def round_trip(blocks: Tensor, num_last_tokens: int = BLOCK_SIZE) -> Tensor:
    return dequantize(*quantize(blocks, num_last_tokens), blocks.dtype)


def used_rows(blocks: Tensor, num_last_tokens: int) -> list[Tensor]:
    """Each block without the rows that hold no token."""
    return [*blocks[:-1], blocks[-1, ..., :num_last_tokens, :]]


def largest_error(block: Tensor) -> Tensor:
    """Of each channel of one block's used rows.

    A value between the smallest and the largest code is at most half a scale from the nearest one.
    As the parameters are rounded, the codes' range may end short of the channel's smallest or
    largest value: by what the minimum lost, and by 255 times what the scale lost. Computing in
    float32 and the rounding of the result come on top.
    """
    low, high = torch.aminmax(block.double(), dim=-2, keepdim=True)
    scale = ((high - low) / 255).clamp_min(LEAST_SCALE)
    half_a_scale = scale / 2 * (1 + FLOAT16_ROUNDING)
    short = (low.abs() + 255 * scale) * FLOAT16_ROUNDING + 2.0**-25  # the last: near zero
    within_codes = torch.maximum(half_a_scale, short)
    largest = torch.maximum(low.abs(), high.abs()) + within_codes
    result_rounding = torch.finfo(block.dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    return within_codes + largest * result_rounding + 2.0**-25


def assert_within_bound(blocks: Tensor, num_last_tokens: int = BLOCK_SIZE) -> None:
    restored = round_trip(blocks, num_last_tokens)
    assert restored.dtype == blocks.dtype
    assert restored.shape == blocks.shape
    pairs = zip(
        used_rows(blocks, num_last_tokens), used_rows(restored, num_last_tokens), strict=True
    )
    for before, after in pairs:
        error = (after.double() - before.double()).abs()
        limit = largest_error(before)
        assert (error <= limit).all(), f"{(error / limit).max():.2f} times the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_last_tokens", [1, 15, 16])
@pytest.mark.parametrize(("count", "kv_heads"), [(1, 2), (3, 2), (3, 1)])
def test_every_value_within_half_a_scale(
    count: int, kv_heads: int, num_last_tokens: int, dtype: torch.dtype
) -> None:
    assert_within_bound(make_blocks(count, kv_heads, dtype), num_last_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_last_tokens", [1, 15, 16])
@pytest.mark.parametrize(("count", "kv_heads"), [(1, 2), (3, 1)])
def test_codes_and_values_of_the_reference(
    count: int, kv_heads: int, num_last_tokens: int, dtype: torch.dtype
) -> None:
    blocks = make_blocks(count, kv_heads, dtype)
    codes, parameters = quantize(blocks, num_last_tokens)
    assert codes.dtype == torch.int8
    assert parameters.dtype == torch.float16
    expected_codes, expected_parameters = reference.quantize_kv(blocks, num_last_tokens)
    assert parameters.shape == expected_parameters.shape
    # Float32 may come out on the other side of a tie.
    torch.testing.assert_close(
        parameters.double(), expected_parameters, rtol=2 * FLOAT16_ROUNDING, atol=0
    )
    steps = codes.int() - expected_codes.int()
    assert steps.abs().max() <= 1
    assert (steps != 0).double().mean() < 0.01

    expected = reference.dequantize_kv(codes, parameters)
    torch.testing.assert_close(
        dequantize(codes, parameters, dtype).double(),
        expected,
        rtol=torch.finfo(dtype).eps,
        atol=1e-5,
    )


def test_all_codes_are_used() -> None:
    codes, _ = quantize(make_blocks(3), BLOCK_SIZE)
    low, high = torch.aminmax(codes.int(), dim=4)
    # Rounding the parameters moves the ends a little.
    assert low.max() <= -128 + 8
    assert high.min() >= 127 - 8


def test_channels_far_from_zero_keep_their_precision() -> None:
    blocks = 50 + torch.randn(3, LAYERS, 2, 2, BLOCK_SIZE, HEAD_DIM)
    error = (round_trip(blocks) - blocks).abs()
    # A range around zero would have steps of 50/127 = 0.4. Here it is four or five standard
    # deviations; and float16 has steps of 1/32 around 50, which only the ends may lose half of.
    assert error.max() <= 1 / 64 + 0.005
    assert error.mean() < 0.005
    assert_within_bound(blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("constant", [0.0, 1.0, -3.14159, 50.01, -1234.5, 10003.0, 1e-3, 1e-30])
def test_constant_channels_come_back(constant: float, dtype: torch.dtype) -> None:
    blocks = torch.full((2, LAYERS, 2, 1, BLOCK_SIZE, HEAD_DIM), constant, dtype=dtype)
    restored = round_trip(blocks)
    if dtype != torch.float32 and abs(constant) >= LEAST_SCALE:
        assert torch.equal(restored, blocks)  # float16 holds each of these values exactly
    else:
        torch.testing.assert_close(restored, blocks, rtol=FLOAT16_ROUNDING, atol=LEAST_SCALE / 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_constant_beside_others(dtype: torch.dtype) -> None:
    blocks = make_blocks(2, dtype=dtype)
    blocks[..., 3] = 7.5
    assert (round_trip(blocks)[..., 3] == 7.5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_last_tokens", [1, 7, 15])
@pytest.mark.parametrize("count", [1, 3])
def test_garbage_in_unused_rows_changes_nothing(
    count: int, num_last_tokens: int, dtype: torch.dtype
) -> None:
    clean = make_blocks(count, dtype=dtype)
    clean[-1, ..., num_last_tokens:, :] = 0.0
    dirty = clean.clone()
    garbage = torch.tensor([NAN, INF, -INF, 6e4, -6e4, NAN, 1e-7, INF], dtype=dtype)
    dirty[-1, ..., num_last_tokens:, :] = garbage
    codes, parameters = quantize(clean, num_last_tokens)
    dirty_codes, dirty_parameters = quantize(dirty, num_last_tokens)
    assert torch.equal(dirty_parameters, parameters)
    for expected, actual in zip(
        used_rows(codes, num_last_tokens), used_rows(dirty_codes, num_last_tokens), strict=True
    ):
        assert torch.equal(actual, expected)
    assert dequantize(dirty_codes, dirty_parameters, dtype).isfinite().all()


def test_only_the_last_block_has_unused_rows() -> None:
    blocks = make_blocks(3)
    codes, parameters = quantize(blocks, 1)
    full_codes, full_parameters = quantize(blocks, BLOCK_SIZE)
    assert torch.equal(codes[:-1], full_codes[:-1])
    assert torch.equal(parameters[:-1], full_parameters[:-1])


def test_blocks_do_not_depend_on_one_another() -> None:
    blocks = make_blocks(3)
    codes, parameters = quantize(blocks, BLOCK_SIZE)
    for index in range(3):
        alone_codes, alone_parameters = quantize(blocks[index : index + 1], BLOCK_SIZE)
        assert torch.equal(alone_codes[0], codes[index])
        assert torch.equal(alone_parameters[0], parameters[index])


@pytest.mark.parametrize("dtype", DTYPES)
def test_arguments_stay_as_they_are(dtype: torch.dtype) -> None:
    blocks = make_blocks(2, dtype=dtype)
    before = blocks.clone()
    codes, parameters = quantize(blocks, 5)
    assert torch.equal(blocks, before)
    codes_before, parameters_before = codes.clone(), parameters.clone()
    dequantize(codes, parameters, dtype)
    assert torch.equal(codes, codes_before)
    assert torch.equal(parameters, parameters_before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_very_large_values(dtype: torch.dtype) -> None:
    blocks = torch.randn(2, LAYERS, 2, 2, BLOCK_SIZE, HEAD_DIM).clamp(-3, 3) * 1e4
    blocks[0] = blocks[0].abs() + 1e4
    restored = round_trip(blocks.to(dtype))
    assert restored.isfinite().all()
    assert_within_bound(blocks.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    blocks = torch.zeros(2, LAYERS, 2, 2, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    assert torch.equal(round_trip(blocks, 3), blocks)


@settings(max_examples=40)
@given(
    channel=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=BLOCK_SIZE),
    dtype=st.sampled_from(DTYPES),
)
def test_any_channel_is_within_bound_and_keeps_its_order(
    channel: list[float], dtype: torch.dtype
) -> None:
    column = torch.full((BLOCK_SIZE,), NAN)
    column[: len(channel)] = torch.tensor(channel)
    blocks = column.to(dtype).view(1, 1, 1, 1, BLOCK_SIZE, 1)
    assert_within_bound(blocks, len(channel))
    before = blocks.flatten()[: len(channel)]
    after = round_trip(blocks, len(channel)).flatten()[: len(channel)]
    assert (after[before.argsort()].diff() >= 0).all()
