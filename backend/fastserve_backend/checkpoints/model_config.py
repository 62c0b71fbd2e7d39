"""What a model looks like: its shape and number format, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypedDict, Unpack

from fastserve_backend.checkpoints.hf_config import HFConfig

LoadFormat = Literal["auto", "dummy"]
DType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["int8"]
"""What weights of linear layers are rounded to, when they are loaded."""
KVDType = Literal["same", "int8"]
"""Of keys and values: the model's own type, or 8 bits and scales."""

INT8_SCALE_BYTES = 4
"""See `fastserve_kernels.int8_cache`, which needs torch."""
DTYPE_BYTES: Mapping[DType, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


class CommonFields(TypedDict):
    """The fields of a `ModelConfig` that do not come from its config.json."""

    name: str
    directory: str | None
    load_format: LoadFormat
    dtype: DType
    quantization: Quantization | None
    kv_dtype: KVDType


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and number formats of one model; each architecture adds its own fields in a subclass.

    `name` is what the user asked for; `directory` is the local directory with its files, None for a
    built-in configuration. Sizes count elements, `max_model_len` counts tokens (prompt plus
    output).
    """

    name: str
    directory: str | None
    load_format: LoadFormat
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool
    max_model_len: int
    dtype: DType
    quantization: Quantization | None = None
    kv_dtype: KVDType = "same"
    """Of the cache on the device."""
    eos_token_ids: tuple[int, ...]
    """End an answer. Of a model alone, those of config.json and generation_config.json; see
    `end_tokens` for those of its other files."""
    eos_is_default: bool = False
    """Whether neither file names an end token, so that it is the architecture's usual one."""

    # Built-in configurations: name -> the fields of a config.json.
    builtin: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    @classmethod
    def from_hf(cls, raw: HFConfig, **common: Unpack[CommonFields]) -> ModelConfig:
        """Build from the fields of a config.json, with all positions that the model has.

        Raises ModelError where a field is wrong.
        """
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """Elements of all weights, a tied LM head counted once."""
        raise NotImplementedError

    @property
    def num_layer_parameters(self) -> int:
        """Elements of one layer's weights; all layers have as many."""
        raise NotImplementedError

    @property
    def num_head_parameters(self) -> int:
        """Elements of the LM head's matrix, its own or that of the embedding it is tied to."""
        return self.vocab_size * self.hidden_size

    @property
    def linear_element_bytes(self) -> int:
        """Of an element of a linear layer's weight, the LM head's among them."""
        return DTYPE_BYTES[self.dtype] if self.quantization is None else 1

    @property
    def weight_bytes(self) -> int:
        """Of all weights, at least: a head that is packed is a second copy of its tied embedding;
        one that is rounded is counted."""
        table = self.num_head_parameters
        if self.quantization is None:
            return self.num_parameters * DTYPE_BYTES[self.dtype]
        others = self.num_parameters - (0 if self.tie_word_embeddings else table)
        return others * self.linear_element_bytes + table * DTYPE_BYTES[self.dtype]

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one KV block of `block_size` tokens: keys and values of every layer. With
        int8 each of them has a scale of 4 bytes."""
        rows = 2 * self.num_layers * self.num_kv_heads * block_size
        if self.kv_dtype == "int8":
            return rows * (self.head_dim + INT8_SCALE_BYTES)
        return rows * self.head_dim * DTYPE_BYTES[self.dtype]

    def host_kv_bytes_per_block(self, block_size: int, host_dtype: KVDType) -> int:
        """The same on the host, where int8 has a scale and an offset, 4 bytes, for each channel;
        KV in INT8 on the device is copied as it is."""
        if host_dtype == "same" or self.kv_dtype == "int8":
            return self.kv_bytes_per_block(block_size)
        channels = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return channels * (block_size + 4)
