"""Built-in configurations: sizes of published models, for random weights and the simulator."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def published(
    model_type: str,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    ffn: int,
    positions: int,
    **more: Any,
) -> Mapping[str, Any]:
    """The fields of a config.json."""
    return MappingProxyType(
        {
            "model_type": model_type,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "max_position_embeddings": positions,
            "torch_dtype": "bfloat16",
            **more,
        }
    )
