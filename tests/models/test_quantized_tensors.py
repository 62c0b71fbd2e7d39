"""Layers of quantized checkpoints, written by `quantized_checkpoints` and read in parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.quantization_config import read_quantization
from fastserve_backend.models.quantized_tensors import joined_weights
from fastserve_backend.models.weights import Shard, StoredTensor
from fastserve_kernels.quantized_weight import QuantizedWeight
from quantized_checkpoints import FORMATS, Format, Tensors
from torch import Tensor

SHAPE = (80, 256)
DTYPES = {
    torch.int32: "I32",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float8_e4m3fn: "F8_E4M3",
}


class Source(dict[str, StoredTensor]):
    """Tensors that count which of their elements are read."""

    def __init__(self, tensors: Tensors) -> None:
        self.num_read = 0
        for name, tensor in tensors.items():
            stored = StoredTensor.of(name, tensor)
            self[name] = replace(
                stored, dtype=DTYPES[tensor.dtype], read=partial(self._read, tensor)
            )

    def _read(self, tensor: Tensor, shard: Shard) -> Tensor:
        part = tensor[shard]
        self.num_read += part.numel()
        return part


def layer(form: Format, shape: tuple[int, int] = SHAPE) -> tuple[Tensors, Tensor]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return form.stored("model.x", weight)


def joined(form: Format, source: Source) -> StoredTensor:
    stored = read_quantization(HFConfig({"quantization_config": form.config}, "config"), "llama")
    assert stored is not None
    (tensor,) = (one for one in joined_weights(source.values(), stored))
    return tensor


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_layer(name: str) -> None:
    tensors, expected = layer(FORMATS[name])
    tensor = joined(FORMATS[name], Source(tensors))
    weight = tensor.read(())
    assert (tensor.name, tensor.shape) == ("model.x.weight", SHAPE)
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == SHAPE
    torch.testing.assert_close(weight.dequantized(torch.float32), expected)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(0, 40), slice(0, 256)),
        (slice(40, 80), slice(None)),
        (slice(27, 54), slice(0, 256)),  # within words and blocks
        (slice(0, 80), slice(128, 256)),
        (slice(0, 80), slice(86, 171)),  # within words and groups
        (slice(8, 8), slice(0, 256)),
    ],
)
def test_a_part_of_a_layer(name: str, rows: slice, columns: slice) -> None:
    tensors, expected = layer(FORMATS[name])
    tensor = joined(FORMATS[name], Source(tensors))
    read = tensor.read_dequantized((rows, columns))
    torch.testing.assert_close(read, expected[rows, columns])


@pytest.mark.parametrize("name", FORMATS)
def test_widths_that_groups_and_words_do_not_divide(name: str) -> None:
    form = FORMATS[name]
    tensors, expected = layer(form, (48, 200))
    read = joined(form, Source(tensors)).read_dequantized((slice(0, 48), slice(0, 200)))
    torch.testing.assert_close(read, expected)


@pytest.mark.parametrize("name", FORMATS)
def test_only_a_part_is_read(name: str) -> None:
    tensors, _ = layer(FORMATS[name], (512, 512))
    source = Source(tensors)
    tensor = joined(FORMATS[name], source)
    tensor.read(())
    whole, source.num_read = source.num_read, 0
    tensor.read((slice(128, 256), slice(0, 512)))
    assert source.num_read < 0.27 * whole + 512


def test_columns_of_one_group_are_neighbours() -> None:
    weight = joined(
        FORMATS["gptq_4_32_act_order"], Source(layer(FORMATS["gptq_4_32_act_order"])[0])
    ).read(())
    assert isinstance(weight, QuantizedWeight)
    assert weight.order is not None
    assert weight.group == 32


def test_symmetric_zero_points_need_no_offsets() -> None:
    for name in ("gptq_4_32", "gptq_8_64_act_order", "packed_4_128", "int8_channels"):
        weight = joined(FORMATS[name], Source(layer(FORMATS[name])[0])).read(())
        assert isinstance(weight, QuantizedWeight)
        assert weight.offsets is None
        assert weight.center == 2 ** (weight.bits - 1)


def test_unquantized_layers_pass_through() -> None:
    form = FORMATS["float_channel"]
    tensors, _ = layer(form)
    plain = {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4)}
    stored = read_quantization(HFConfig({"quantization_config": form.config}, "config"), "llama")
    assert stored is not None
    found = joined_weights(Source(tensors | plain).values(), stored)
    assert {one.name for one in found} == {*plain, "model.x.weight"}


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(f"model.x.{name}")


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], object]:
    def apply(tensors: Tensors) -> None:
        tensors[f"model.x.{name}"] = change(tensors[f"model.x.{name}"])

    return apply


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("awq_32", without("scales"), r"lacks model\.x\.scales, which AWQ has beside .*qweight"),
        ("awq_32", without("qzeros"), r"lacks model\.x\.qzeros"),
        ("gptq_4_32", without("qweight"), r"lacks model\.x\.qweight, which GPTQ has beside"),
        ("packed_4_32", without("weight_shape"), r"lacks model\.x\.weight_shape"),
        ("packed_4_32_asymmetric", without("weight_zero_point"), r"lacks .*weight_zero_point"),
        ("int8_channels", without("weight_scale"), r"lacks model\.x\.weight_scale, which compre"),
        ("fp8_blocks", without("weight"), r"lacks model\.x\.weight, which FP8 has beside"),
        (
            "awq_32",
            changed("scales", lambda scales: scales[:4]),
            r"x\.scales has shape \(4, 80\), but AWQ with 4 bits and groups of 32 columns asks for "
            r"\(8, 80\)",
        ),
        ("gptq_8_-1", changed("scales", lambda scales: scales[:, :-1]), r"groups of all columns"),
        ("gptq_4_64", changed("g_idx", lambda index: index[1:]), r"g_idx has shape \(255,\)"),
        ("gptq_4_64", changed("g_idx", lambda index: index + 1), "not among the 4 of the layer"),
        ("gptq_4_64", changed("qweight", Tensor.float), r"qweight is F32, but GPTQ has I32 there"),
        ("packed_8_64", changed("weight_packed", lambda words: words[:, 1:]), "asks for"),
        ("packed_8_64", changed("weight_scale", Tensor.int), r"is I32, but .* F16 or BF16 or F32"),
        ("float_tensor", changed("weight", Tensor.float), r"x\.weight is F32, but .* F8_E4M3"),
        ("int8_channels", changed("weight", lambda codes: codes[0]), "asks for two dimensions"),
    ],
)
def test_what_does_not_fit_is_named(
    name: str, change: Callable[[Tensors], object], message: str
) -> None:
    tensors, _ = layer(FORMATS[name])
    change(tensors)
    with pytest.raises(ModelError, match=message):
        joined(FORMATS[name], Source(tensors)).read(())
