"""A model's shape and number formats, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypedDict

from fastserve_backend.checkpoints.layer_groups import LayerGroups
from fastserve_backend.checkpoints.quantization_config import StoredQuantization

LoadFormat = Literal["auto", "dummy"]
DType = Literal["float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4", "as_stored"]
"""How the weights of linear layers are kept: rounded to 8 or 4 bits when they are loaded, or as the
checkpoint stores them."""
KVDType = Literal["same", "int8"]
"""The type of keys and values: the model's own, or 8 bits with scales."""

INT4_BYTES = 0.5 + 4 / 64
"""Of an element, with a scale and an offset in 16 bits for each group of 64."""
INT8_SCALE_BYTES = 4
"""As in `fastserve_kernels.int8_cache`, which would import torch."""
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
    """Shape and number formats of one model. Each architecture adds its own fields in a subclass.

    name: the model as the user named it.
    directory: where its files are; None for a built-in configuration.
    max_model_len: in tokens, prompt plus output. Other sizes count elements.
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
    stored_weight_bytes: int | None = None
    """Bytes of all weights in memory, if `quantization` is as_stored; None otherwise."""
    stored_quantization: StoredQuantization | None = None
    """The format of the checkpoint's linear layers, if they are quantized."""
    kv_dtype: KVDType = "same"
    """Type of the cache on the device."""
    kv_layers: int | None = None
    """Layers for which a KV block has room, if this is a rank's part of the model; None: as
    `layer_groups` says."""
    eos_token_ids: tuple[int, ...]
    """The tokens that end an answer, from config.json and generation_config.json. `end_tokens`
    adds those of the other files."""
    eos_is_default: bool = False
    """Whether neither file names an end token, so that the architecture's default is used."""

    @property
    def rotary_switch(self) -> int | None:
        """A job of more tokens than this has other keys, from its first token on. None: there is no
        such number."""
        return None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer how many tokens a token attends to, itself included; None: all before."""
        return (None,) * self.num_layers

    @cached_property
    def layer_groups(self) -> LayerGroups:
        """The groups of layers that share KV blocks. A window that no job exceeds is none."""
        longest = self.max_model_len
        return LayerGroups.of(
            [None if window is None or window >= longest else window for window in self.windows]
        )

    @property
    def num_parameters(self) -> int:
        """Elements of all weights. A tied LM head counts once."""
        raise NotImplementedError

    @property
    def num_expert_parameters(self) -> int:
        """Elements of all experts' weights. A token uses only those of the experts it chooses."""
        return 0

    def share_of_experts_read(self, tokens: int) -> float:
        """The share of the experts' weights that a batch of so many tokens is expected to use."""
        return 0.0

    @property
    def num_active_parameters(self) -> int:
        """Elements of the weights that one token uses, with both tables."""
        unused = self.num_expert_parameters * (1.0 - self.share_of_experts_read(1))
        return self.num_parameters - round(unused)

    @property
    def num_layer_parameters(self) -> int:
        """Elements of one layer's weights; their mean, if layers differ."""
        raise NotImplementedError

    @property
    def num_active_layer_parameters(self) -> int:
        """Those of them that one token uses."""
        unused = self.num_expert_parameters * (1.0 - self.share_of_experts_read(1))
        return self.num_layer_parameters - round(unused / self.num_layers)

    @property
    def num_head_parameters(self) -> int:
        """Elements of the LM head's matrix, which may be the embedding's."""
        return self.vocab_size * self.hidden_size

    @property
    def weight_format(self) -> str:
        """How linear layers' weights are kept, for messages: a number format, or "few bits"."""
        return "few bits" if self.quantization == "as_stored" else self.quantization or self.dtype

    @property
    def linear_element_bytes(self) -> float:
        """Bytes of an element of a linear layer's weight, including the LM head's; a mean if
        weights stay as they are stored."""
        if self.stored_weight_bytes is not None:
            return self.stored_weight_bytes / self.num_parameters
        if self.quantization is None:
            return DTYPE_BYTES[self.dtype]
        return INT4_BYTES if self.quantization == "int4" else 1

    @property
    def table_bytes(self) -> int:
        """Bytes of an embedding's table that is kept beside the LM head's, or an untied one, if
        linear layers are rounded when they are loaded; 0 otherwise."""
        is_rounded = self.quantization in ("int8", "int4")
        return self.num_head_parameters * DTYPE_BYTES[self.dtype] if is_rounded else 0

    @property
    def weight_bytes(self) -> int:
        """The least bytes that all weights take. A rounded head counts beside its tied embedding; a
        packed one, which is a second copy too, does not."""
        rounded = self.num_parameters
        if self.table_bytes and not self.tie_word_embeddings:
            rounded -= self.num_head_parameters
        return round(rounded * self.linear_element_bytes) + self.table_bytes

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes of one KV block of `block_size` tokens: keys and values of a group of layers. In
        int8 each key and value of a head also has a scale of 4 bytes."""
        rows = 2 * self.kv_depth * self.num_kv_heads * block_size
        if self.kv_dtype == "int8":
            return rows * (self.head_dim + INT8_SCALE_BYTES)
        return rows * self.head_dim * DTYPE_BYTES[self.dtype]

    def host_kv_bytes_per_block(self, block_size: int, host_dtype: KVDType) -> int:
        """The same on the host. There int8 has a scale and an offset, 4 bytes, for each channel. A
        cache that is INT8 on the device is copied unchanged."""
        if host_dtype == "same" or self.kv_dtype == "int8":
            return self.kv_bytes_per_block(block_size)
        channels = 2 * self.kv_depth * self.num_kv_heads * self.head_dim
        return channels * (block_size + 4)

    @property
    def kv_depth(self) -> int:
        """Layers for which a KV block has room."""
        return self.layer_groups.depth() if self.kv_layers is None else self.kv_layers
