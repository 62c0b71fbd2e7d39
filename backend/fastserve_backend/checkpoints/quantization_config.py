"""How quantized checkpoints store the weights of linear layers: what config.json says, without
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_config import HFConfig

Layout = Literal["awq", "gptq", "packed", "plain"]

_KNOWN = "awq, gptq, compressed-tensors or fp8, or mxfp4 of gpt_oss"
MXFP4_MORE_BYTES = (5 + 16 / 32 - 4 - 8 / 32) / 8
"""A weight takes so much more in memory than in MXFP4: codes have 5 bits there, scales 16."""
_REMEDY = (
    "use another checkpoint of the model, with quantization int8 or int4 if its weights are to "
    "take less memory"
)

# Formats of compressed-tensors -> types of their weights.
_TYPES = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQuantization:
    """The format of a checkpoint's quantized layers. A layer's tensors tell whether it is one.

    format: its name, for messages.
    layout: which tensors a layer has; see `models.quantized_tensors`.
    bits: of a weight.
    is_float: whether weights are FP8 (E4M3). Otherwise they are integers.
    rows, columns: how many rows and columns of a weight ``[out, in]`` share a scale; None: all.
    has_zeros: whether layers have zero points. Otherwise all are the middle of the range.
    zeros_less_one: whether zero points are stored minus one.
    rounds_activations: whether the checkpoint is made for activations of few bits, too.
    orders_columns: whether a group has columns from all over a layer (GPTQ's desc_act).
    """

    format: str
    layout: Layout
    bits: int
    is_float: bool = False
    rows: int | None = 1
    columns: int | None
    has_zeros: bool
    zeros_less_one: bool = False
    rounds_activations: bool = False
    orders_columns: bool = False


def is_mxfp4(raw: HFConfig, model_type: str) -> bool:
    """Whether it is gpt-oss, with experts in MXFP4."""
    fields = raw.mapping("quantization_config")
    is_named = fields is not None and fields.states("quant_method", ("mxfp4",))
    return is_named and model_type == "gpt_oss"


def read_quantization(raw: HFConfig, model_type: str) -> StoredQuantization | None:
    """The format that a config.json names; None if the weights are not quantized. gpt-oss's MXFP4
    is read with its experts (`models.expert_weights`), so it counts as none.

    Raises:
        ModelError: the format is not read. The message lists those that are.
    """
    fields = raw.mapping("quantization_config")
    if fields is None and (older := raw.mapping("compression_config")) is not None:
        fields = older.with_default("quant_method", "compressed-tensors")
    if fields is None or is_mxfp4(raw, model_type):
        return None
    try:
        return _read(fields)
    except ModelError as error:
        raise ModelError(f"{error}; {_REMEDY}") from None


def _read(fields: HFConfig) -> StoredQuantization:
    if fields.states("quant_method", ("awq",)):
        return _read_awq(fields)
    if fields.states("quant_method", ("gptq",)):
        return _read_gptq(fields)
    if fields.states("quant_method", ("compressed-tensors",)):
        return _read_compressed_tensors(fields)
    if fields.states("quant_method", ("fp8",)):
        return _read_fp8(fields)
    raise fields.error("quant_method", _KNOWN)


def _read_awq(fields: HFConfig) -> StoredQuantization:
    for key in ("version", "format", "checkpoint_format"):
        fields.choice(key, "gemm", ("gemm", "GEMM"))
    is_older = "w_bit" in fields
    bits = _bits(fields, "w_bit" if is_older else "bits", (4,))
    columns = _group_size(fields, "q_group_size" if is_older else "group_size", 128)
    return StoredQuantization(
        format="AWQ", layout="awq", bits=bits, columns=columns, has_zeros=True
    )


def _read_gptq(fields: HFConfig) -> StoredQuantization:
    # GPTQModel has renamed the field.
    key = "format" if "format" in fields else "checkpoint_format"
    version = fields.choice(key, "gptq", ("gptq", "gptq_v2"))
    fields.choice("pack_dtype", "int32", ("int32",))
    exceptions = fields.mapping("dynamic")  # by patterns of layers; "-:" precedes unquantized ones
    if exceptions is not None and any(not one.startswith("-") for one in exceptions.names()):
        raise ModelError(f"{exceptions.source} gives layers other formats")
    columns = _group_size(fields, "group_size", 128)
    is_ordered = fields.boolean("desc_act", False) and not fields.boolean("static_groups", False)
    return StoredQuantization(
        format="GPTQ",
        layout="gptq",
        bits=_bits(fields, "bits", (4, 8)),
        columns=columns,
        has_zeros=True,
        zeros_less_one=version == "gptq",
        orders_columns=is_ordered and columns is not None,
    )


def _read_fp8(fields: HFConfig) -> StoredQuantization:
    rows = columns = None
    if "weight_block_size" in fields:
        rows, columns = fields.integers("weight_block_size", 2)
    return StoredQuantization(
        format="FP8",
        layout="plain",
        bits=8,
        is_float=True,
        rows=rows,
        columns=columns,
        has_zeros=False,
        rounds_activations=True,
    )


def _read_compressed_tensors(fields: HFConfig) -> StoredQuantization:
    for key in ("sparsity_config", "transform_config"):
        more = fields.mapping(key)
        if more is not None and not more.states("format", ("dense",)):
            raise ModelError(f"{more.source} is not supported")
    groups = fields.mapping("config_groups")
    if groups is None:
        raise fields.error("config_groups", "an object")
    found = {_read_config_group(groups, name, fields) for name in groups.names()}
    if len(found) > 1:
        raise ModelError(f"{groups.source} gives layers different formats")
    return found.pop()


def _read_config_group(groups: HFConfig, name: str, whole: HFConfig) -> StoredQuantization:
    group = groups.mapping(name)
    weights = None if group is None else group.mapping("weights")
    if group is None or weights is None:
        raise groups.error(name, "an object with weights")
    stored = (group if "format" in group else whole).choice("format", None, tuple(_TYPES))
    is_packed = stored == "pack-quantized"
    is_float = weights.choice("type", "int", _TYPES[stored]) == "float"
    strategy = weights.choice("strategy", "tensor", ("tensor", "channel", "group", "block"))
    rows, columns = (None if strategy == "tensor" else 1), None
    if strategy == "group":
        columns = weights.integer("group_size", 128)
    elif strategy == "block":
        rows, columns = weights.integers("block_structure", 2)
    return StoredQuantization(
        format=f"compressed-tensors {stored}",
        layout="packed" if is_packed else "plain",
        bits=_bits(weights, "num_bits", (4, 8) if is_packed else (8,)),
        is_float=is_float,
        rows=rows,
        columns=columns,
        has_zeros=not is_float and not weights.boolean("symmetric", True),
        rounds_activations=group.mapping("input_activations") is not None,
        orders_columns=strategy == "group"
        and weights.states("actorder", ("group", "dynamic", True)),
    )


def _bits(fields: HFConfig, key: str, allowed: tuple[int, ...]) -> int:
    if not fields.states(key, allowed):
        raise fields.error(key, " or ".join(map(str, allowed)))
    return fields.integer(key, 4)


def _group_size(fields: HFConfig, key: str, default: int) -> int | None:
    """-1 stands for all columns."""
    return None if fields.states(key, (-1,)) else fields.integer(key, default)
