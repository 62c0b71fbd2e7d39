"""The rules by which tensors of a GGUF file become tensors of a Hugging Face checkpoint.

The shape of a tensor is written as names of sizes, such as ("q", "hidden"). `sizes` computes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class TensorRule:
    """Makes a tensor of a checkpoint from one or two tensors of a GGUF file; see `MappedTensor`."""

    target: str
    """The checkpoint's name."""
    sources: tuple[str, ...]
    shape: tuple[str, ...]
    """Names of the sizes of each source."""
    heads: str | None = None
    """The name of their number."""
    offset: float = 0.0
    transposed: bool = False
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
    heads: str | None = None,
) -> tuple[TensorRule, ...]:
    """A linear layer's weight and its bias.

    Args:
        bias: whether there is one, or the field of the configuration that tells.
    """
    made = TensorRule(f"{target}.weight", (f"{source}.weight",), (rows, columns), heads)
    if not bias:
        return (made,)
    condition = bias if isinstance(bias, str) else None
    return (
        made,
        TensorRule(f"{target}.bias", (f"{source}.bias",), (rows,), heads, condition=condition),
    )
