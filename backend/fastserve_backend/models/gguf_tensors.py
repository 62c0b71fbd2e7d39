"""The rules by which tensors of a GGUF file become tensors of a Hugging Face checkpoint.

The shape of a tensor is written as names of sizes, such as ("q", "hidden"). `sizes` computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, int]


def sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes that rules name, by the fields of a Hugging Face configuration."""
    heads: int = config["num_attention_heads"]
    kv_heads: int = config.get("num_key_value_heads", heads)
    head_dim: int = config.get("head_dim", config["hidden_size"] // heads)
    ffn: int = config["intermediate_size"]
    q, kv = heads * head_dim, kv_heads * head_dim
    return {
        "vocab": config["vocab_size"],
        "hidden": config["hidden_size"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "q": q,
        "kv": kv,
        "qkv": q + 2 * kv,
        "ffn": ffn,
        "gate_up": 2 * ffn,
        "experts": config.get("num_experts", config.get("num_local_experts", 0)),
        "expert_ffn": config.get("moe_intermediate_size", ffn),
    }


def unchanged(values: Tensor, sizes: Sizes) -> Tensor:
    return values


@dataclass(frozen=True)
class TensorRule:
    """Makes a tensor of a checkpoint from one or more tensors of a GGUF file."""

    target: str
    """The checkpoint's name. With {expert} there is one tensor for each expert, without the first
    dimension."""
    sources: tuple[str, ...]
    shape: tuple[str, ...]
    """Names of the sizes of each source."""
    change: Callable[..., Tensor] = unchanged
    """Gets the sources, in bfloat16, and the sizes."""
    offset: float = 0.0
    """What is subtracted from the sources, before they are rounded."""
    condition: str | None = None
    """The field of the configuration that must be true; None: the tensor is always there."""


def weight(
    source: str, target: str, *shape: str, offset: float = 0.0, condition: str | None = None
) -> TensorRule:
    """A weight that stays as it is, except for `offset`."""
    return TensorRule(
        f"{target}.weight", (f"{source}.weight",), shape, offset=offset, condition=condition
    )


def linear(
    source: str,
    target: str,
    rows: str,
    columns: str,
    *,
    bias: bool | str = False,
    change: Callable[..., Tensor] = unchanged,
) -> tuple[TensorRule, ...]:
    """A linear layer's weight and its bias.

    Args:
        bias: whether there is one, or the field of the configuration that tells.
    """
    made = TensorRule(f"{target}.weight", (f"{source}.weight",), (rows, columns), change)
    if not bias:
        return (made,)
    condition = bias if isinstance(bias, str) else None
    return (
        made,
        TensorRule(f"{target}.bias", (f"{source}.bias",), (rows,), change, condition=condition),
    )


def unpermuted(heads: str) -> Callable[[Tensor, Sizes], Tensor]:
    """Reorders rows of q or k, [heads * head_dim, ...], from llama.cpp's to Hugging Face's order.

    For some architectures llama.cpp rotates neighbouring rows as pairs, and its converter reorders
    rows for that. Hugging Face pairs the halves of a head.
    """

    def change(values: Tensor, sizes: Sizes) -> Tensor:
        pairs = values.reshape(sizes[heads], -1, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    return change


def transposed(values: Tensor, sizes: Sizes) -> Tensor:
    """Each expert's [columns, rows] of its [rows, columns]."""
    return values.transpose(-1, -2)


def interleaved(gate: Tensor, up: Tensor, sizes: Sizes) -> Tensor:
    """Rows of gate and up by turns: [experts, 2 * ffn, ...] of twice [experts, ffn, ...]."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)


def interleaved_and_transposed(gate: Tensor, up: Tensor, sizes: Sizes) -> Tensor:
    """[experts, hidden, 2 * ffn] of twice [experts, ffn, hidden]."""
    return transposed(interleaved(gate, up, sizes), sizes)
