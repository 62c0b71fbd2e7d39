"""Quantizes linear layers and writes them as the formats of checkpoints store them.

The packing follows the programs that write these formats (AutoAWQ's `WQLinear_GEMM`, AutoGPTQ's
`QuantLinear.pack`, compressed-tensors' `pack_to_int32`), one number at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

Tensors = dict[str, Tensor]

FP8_MOST = 448.0
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Codes:
    """weight[n, k] = scales[n, groups[k]] · (codes[n, k] - zeros[n, groups[k]])"""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    @property
    def weight(self) -> Tensor:
        """float32 [out, in]."""
        scales, zeros = self.scales.float()[:, self.groups], self.zeros[:, self.groups]
        return scales * (self.codes - zeros)


@dataclass(frozen=True)
class Format:
    """A format with its parameters.

    group: columns; -1: all.
    act_order: None, or a seed of the order of columns.
    """

    method: str
    bits: int = 4
    group: int = 32
    symmetric: bool = True
    act_order: int | None = None
    version: str = "gptq"
    strategy: str = "group"

    @property
    def config(self) -> dict[str, Any]:
        """As quantization_config."""
        return _CONFIGS[self.method](self)

    def stored(self, name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        """The tensors of a layer, and the weight [out, in] that they stand for."""
        return _WRITERS[self.method](self, name, weight)


def save_quantized(
    model: PreTrainedModel,
    directory: Path,
    form: Format,
    *,
    skipped: tuple[str, ...] = ("lm_head",),
) -> None:
    """Save the model with linear layers in `form`. Its own weights become those that are stored."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name not in skipped:
            stored, weight = form.stored(name, layer.weight.detach())
            del tensors[f"{name}.weight"]
            tensors |= stored
            layer.weight = nn.Parameter(weight)
    save_file({name: one.contiguous() for name, one in tensors.items()}, file)
    change_config(directory, quantization_config=form.config)


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def quantized(weight: Tensor, form: Format) -> Codes:
    """Rounds to unsigned codes, with scales in float16."""
    size = weight.shape[1]
    group = size if form.group == -1 else form.group
    groups = torch.arange(size) // group
    if form.act_order is not None:
        order = torch.randperm(size, generator=torch.Generator().manual_seed(form.act_order))
        groups[order] = torch.arange(size) // group
    count, most = -(-size // group), 2**form.bits - 1
    scales = torch.empty(len(weight), count, dtype=torch.float16)
    zeros = torch.empty(len(weight), count, dtype=torch.int64)
    for one in range(count):
        low, high = weight[:, groups == one].aminmax(dim=1)
        if form.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scales[:, one] = (high - low) / most
        zeros[:, one] = (
            (most + 1) // 2
            if form.symmetric
            else (-low / scales[:, one].float()).round().clamp(0, most)
        )
    steps = weight / scales.float()[:, groups] + zeros[:, groups]
    return Codes(steps.round().clamp(0, most).long(), scales, zeros, groups)


def packed(values: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """int32 [rows, n / P]: P neighbouring numbers of values [rows, n] in a word."""
    per_word = 32 // bits
    padding = -values.shape[1] % per_word
    by_word = nn.functional.pad(values, (0, padding)).view(len(values), -1, per_word)
    words = torch.zeros(by_word.shape[:2], dtype=torch.int64)
    for place, column in enumerate(order or range(per_word)):
        words |= by_word[:, :, column] << (place * bits)
    return words.to(torch.int32)


def _awq(form: Format, name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes = quantized(weight, form)
    tensors = {
        "qweight": packed(codes.codes.T, 4, AWQ_ORDER),
        "qzeros": packed(codes.zeros.T, 4, AWQ_ORDER),
        "scales": codes.scales.T,
    }
    return _below(name, tensors), codes.weight


def _gptq(form: Format, name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes = quantized(weight, form)
    zeros = packed(codes.zeros.T, form.bits)
    if form.version == "gptq":
        zeros -= 0x11111111 if form.bits == 4 else 0x01010101
    tensors = {
        "qweight": packed(codes.codes, form.bits).T,
        "qzeros": zeros,
        "scales": codes.scales.T,
        "g_idx": codes.groups.int(),
    }
    return _below(name, tensors), codes.weight


def _packed(form: Format, name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes = quantized(weight, form)
    tensors = {
        "weight_packed": packed(codes.codes, form.bits),
        "weight_scale": codes.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not form.symmetric:
        tensors["weight_zero_point"] = packed(codes.zeros.T, form.bits).T
    if form.act_order is not None:
        tensors["weight_g_idx"] = codes.groups.int()
    return _below(name, tensors), codes.weight


def _int8(form: Format, name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes = quantized(weight, form)
    tensors = {"weight": (codes.codes - 128).to(torch.int8), "weight_scale": codes.scales}
    if not form.symmetric:
        tensors["weight_zero_point"] = (codes.zeros - 128).to(torch.int8)
    return _below(name, tensors), codes.weight


def _fp8(form: Format, name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    height, width = weight.shape
    rows, columns = {
        "tensor": (height, width),
        "channel": (1, width),
        "group": (1, form.group),
        "block": (48, form.group),
    }[form.strategy]
    wholes = -(-height // rows) * rows, -(-width // columns) * columns
    padding = (0, wholes[1] - width, 0, wholes[0] - height)
    blocks = nn.functional.pad(weight, padding).view(
        wholes[0] // rows, rows, wholes[1] // columns, columns
    )
    scales = blocks.abs().amax(dim=(1, 3)) / FP8_MOST
    by_element = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:height, :width]
    codes = (weight / by_element).to(torch.float8_e4m3fn)
    scale_name = "weight_scale_inv" if form.method == "fp8" else "weight_scale"
    stored = scales.flatten()[0] if form.method == "fp8" and form.strategy == "tensor" else scales
    if form.method != "fp8" and form.strategy == "tensor":
        stored = scales.flatten()
    tensors = {"weight": codes, scale_name: stored, "input_scale": torch.ones(1)}
    return _below(name, tensors), codes.float() * by_element


def _below(name: str, tensors: Tensors) -> Tensors:
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}


def _awq_config(form: Format) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": form.bits,
        "group_size": form.group,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": None,
    }


def _gptq_config(form: Format) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": form.bits,
        "group_size": form.group,
        "desc_act": form.act_order is not None,
        "sym": form.symmetric,
        "checkpoint_format": form.version,
    }


def _compressed_config(form: Format) -> dict[str, Any]:
    is_float = form.method == "float-quantized"
    strategy = form.strategy if form.group != -1 else "channel"
    weights = {
        "num_bits": form.bits,
        "type": "float" if is_float else "int",
        "symmetric": form.symmetric,
        "strategy": strategy,
        "group_size": form.group if strategy == "group" else None,
        "block_structure": [48, form.group] if strategy == "block" else None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form.method,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _fp8_config(form: Format) -> dict[str, Any]:
    block = None if form.strategy == "tensor" else [48, form.group]
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}


_CONFIGS: dict[str, Callable[[Format], dict[str, Any]]] = {
    "awq": _awq_config,
    "gptq": _gptq_config,
    "pack-quantized": _compressed_config,
    "int-quantized": _compressed_config,
    "float-quantized": _compressed_config,
    "fp8": _fp8_config,
}
_WRITERS: dict[str, Callable[[Format, str, Tensor], tuple[Tensors, Tensor]]] = {
    "awq": _awq,
    "gptq": _gptq,
    "pack-quantized": _packed,
    "int-quantized": _int8,
    "float-quantized": _fp8,
    "fp8": _fp8,
}

GROUPS = (32, 64, 128, -1)
FORMATS: dict[str, Format] = {
    **{f"awq_{group}": Format("awq", group=group, symmetric=False) for group in GROUPS},
    **{
        f"gptq_{bits}_{group}{'' if symmetric else '_asymmetric'}{'_act_order' if act else ''}": (
            Format("gptq", bits, group, symmetric, 5 if act else None)
        )
        for bits in (4, 8)
        for group in GROUPS
        for symmetric in (True, False)
        for act in (False, True)
    },
    "gptq_v2": Format("gptq", symmetric=False, version="gptq_v2"),
    **{
        f"packed_{bits}_{group}{'' if symmetric else '_asymmetric'}": (
            Format("pack-quantized", bits, group, symmetric)
        )
        for bits in (4, 8)
        for group in GROUPS
        for symmetric in (True, False)
    },
    "packed_act_order": Format("pack-quantized", act_order=3),
    "int8_channels": Format("int-quantized", 8, -1),
    "int8_groups": Format("int-quantized", 8, 64),
    "int8_asymmetric": Format("int-quantized", 8, -1, symmetric=False),
    **{
        f"float_{strategy}": Format("float-quantized", 8, 64, strategy=strategy)
        for strategy in ("tensor", "channel", "group", "block")
    },
    "fp8_tensor": Format("fp8", 8, strategy="tensor"),
    "fp8_blocks": Format("fp8", 8, 128, strategy="block"),
}
