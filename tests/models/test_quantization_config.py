"""What `quantization_config` in config.json says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.checkpoints.quantization_config import (
    StoredQuantization,
    read_quantization,
)

AWQ = StoredQuantization(format="AWQ", layout="awq", bits=4, columns=128, has_zeros=True)
GPTQ = StoredQuantization(
    format="GPTQ", layout="gptq", bits=4, columns=128, has_zeros=True, zeros_less_one=True
)
FP8 = StoredQuantization(
    format="FP8",
    layout="plain",
    bits=8,
    is_float=True,
    rows=128,
    columns=128,
    has_zeros=False,
    rounds_activations=True,
)
PACKED = StoredQuantization(
    format="compressed-tensors pack-quantized",
    layout="packed",
    bits=4,
    columns=128,
    has_zeros=False,
)


def read(
    fields: dict[str, Any], model_type: str = "llama", key: str = "quantization_config"
) -> Any:
    return read_quantization(HFConfig({key: fields}, "config.json"), model_type)


def compressed(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}, AWQ),
        # As AutoAWQ wrote it at first.
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
            replace(AWQ, columns=64),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            replace(GPTQ, orders_columns=True),
        ),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True, "static_groups": True}, GPTQ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": True},
            replace(GPTQ, bits=8, columns=None),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "format": "gptq_v2"},
            replace(GPTQ, zeros_less_one=False),
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*mlp.*": {}}}, GPTQ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, FP8),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            replace(FP8, rows=None, columns=None),
        ),
        (compressed(), PACKED),
        (compressed(symmetric=False), replace(PACKED, has_zeros=True)),
        (compressed(actorder="group"), replace(PACKED, orders_columns=True)),
        (compressed(actorder="static"), PACKED),
        (compressed(strategy="channel", group_size=None), replace(PACKED, columns=None)),
        (
            compressed(
                "float-quantized",
                num_bits=8,
                type="float",
                strategy="block",
                block_structure=[128, 64],
            ),
            replace(
                FP8,
                format="compressed-tensors float-quantized",
                columns=64,
                rounds_activations=False,
            ),
        ),
        (
            compressed("naive-quantized", num_bits=8, type="float", strategy="tensor"),
            replace(
                FP8,
                format="compressed-tensors naive-quantized",
                rows=None,
                columns=None,
                rounds_activations=False,
            ),
        ),
        ({}, None),
    ],
)
def test_read(fields: dict[str, Any], expected: StoredQuantization | None) -> None:
    assert read(fields) == expected


def test_older_files() -> None:
    fields = compressed()
    del fields["quant_method"]
    assert read(fields, key="compression_config") == PACKED


def test_a_group_may_name_its_format() -> None:
    fields = compressed("mixed-precision")
    group = fields["config_groups"]["group_0"]
    group["format"] = "pack-quantized"
    fields["config_groups"]["group_1"] = group
    assert read(fields) == PACKED


def test_rounded_activations() -> None:
    fields = compressed("int-quantized", num_bits=8, strategy="channel")
    fields["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    assert read(fields).rounds_activations


def test_mxfp4_is_of_gpt_oss() -> None:
    assert read({"quant_method": "mxfp4"}, "gpt_oss") is None
    with pytest.raises(ModelError, match=r"'mxfp4', expected awq, gptq, .* or mxfp4 of gpt_oss"):
        read({"quant_method": "mxfp4"}, "mixtral")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"^config\.json, quantization_config: quant_method is 'bitsandbytes', expected awq, "
            r"gptq, compressed-tensors or fp8, or mxfp4 of gpt_oss; use another checkpoint of the "
            r"model, with quantization int8",
        ),
        ({"bits": 4}, "quant_method is None"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', expected one of gemm"),
        ({"quant_method": "awq", "bits": 3}, "bits is 3, expected 4;"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, expected 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (
            {"quant_method": "gptq", "dynamic": {"+:.*mlp.*": {"bits": 8}}},
            "dynamic gives layers other formats",
        ),
        (compressed("nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized', expected one of"),
        (compressed(num_bits=2), "num_bits is 2, expected 4 or 8"),
        (compressed(type="float"), "type is 'float', expected one of int"),
        (compressed() | {"config_groups": None}, "config_groups is None, expected an object"),
        (
            compressed() | {"config_groups": {"W4A16": ["Linear"]}},
            r"W4A16 is \['Linear'\], expected",
        ),
        (
            compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config is not",
        ),
        (
            compressed() | {"transform_config": {"config_groups": {"R1": {}}}},
            "transform_config is not",
        ),
    ],
)
def test_what_is_not_read_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(fields)


def test_layers_in_different_formats() -> None:
    fields = compressed()
    fields["config_groups"] |= {"group_1": compressed(num_bits=8)["config_groups"]["group_0"]}
    with pytest.raises(ModelError, match="config_groups gives layers different formats"):
        read(fields)
