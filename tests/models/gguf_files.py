"""Small random LLaMA models, and the GGUF files that llama.cpp's converter would write for them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from fastserve_backend.checkpoints.decoder_config import DecoderConfig as OurConfig
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.gguf_weights import gguf_tensors
from gguf import GGMLQuantizationType, GGUFValueType
from paged_executor import POSITIONS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|unknown|>", "<|begin|>", "<|end|>", "<|im_end|>"]
BEGIN, END, END_OF_TURN = 1, 2, 3
VOCAB_SIZE = 301
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

_CORPUS = (
    "Hello world, this is a text for the tokenizer; there are others in the world. "
    "Every word that comes twice or more, such as word, text or tokenizer, becomes a token."
)
_CONTROL, _NORMAL = 3, 1  # llama.cpp's types of tokens

F32 = GGMLQuantizationType.F32

# The bytes of each block that are float16 numbers, in types whose other bytes may be any.
STEPS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "MXFP4": (), "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ3_S": (0,), "TQ2_0": (64,),
}  # fmt: skip

Fields = dict[str, Any]
Arrays = dict[str, np.ndarray]


def random_llama(**changes: Any) -> LlamaForCausalLM:
    """A transformers LLaMA with grouped KV heads whose weights and norms are all random."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
    }
    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(1.0 if is_norm else 0.0, 0.15)
    return model


@lru_cache
def byte_level_bpe() -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens; SPECIAL are the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS] * 20, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def tokenizer_fields() -> Fields:
    """The fields of a byte-level vocabulary."""
    bpe = json.loads(byte_level_bpe().to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            _CONTROL if token in SPECIAL else _NORMAL for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in bpe["merges"]],
        "tokenizer.ggml.bos_token_id": BEGIN,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.eot_token_id": END_OF_TURN,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def metadata(config: LlamaConfig) -> Fields:
    """The fields of a LLaMA model with a byte-level vocabulary; integers become uint32."""
    return tokenizer_fields() | {
        "llama.vocab_size": config.vocab_size,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in llama.cpp's order: element i of a head's first half is next to that of the
    second half."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tensors(model: LlamaForCausalLM) -> Arrays:
    """llama.cpp's names and order of a model's weights, float32."""
    config = model.config
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    out = {
        "token_embd.weight": state["model.embed_tokens.weight"],
        "output_norm.weight": state["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        out["output.weight"] = state["lm_head.weight"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in state.items():
        if not name.startswith("model.layers."):
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if ".q_proj." in name:
            value = permute(value, config.num_attention_heads)
        elif ".k_proj." in name:
            value = permute(value, config.num_key_value_heads)
        out[theirs] = value
    return out


@dataclass(frozen=True)
class Blocks:
    """A matrix, or several, in a type of few bits: bytes, uint8 [..., rows, n]."""

    kind: GGMLQuantizationType
    data: np.ndarray

    @classmethod
    def random(cls, kind: str, *shape: int, size: float = 1e-3) -> Blocks:
        """Any bytes, with steps of about `size`."""
        known = GGMLQuantizationType[kind]
        rows, columns = math.prod(shape[:-1]), shape[-1]
        rng = np.random.default_rng([known, rows, columns])
        elements, num_bytes = gguf.GGML_QUANT_SIZES[known]
        data = rng.integers(0, 256, (rows, columns // elements, num_bytes), dtype=np.uint8)
        for start in STEPS[kind]:
            steps = rng.normal(0, size, data.shape[:2]).astype(np.float16)
            data[..., start : start + 2] = steps[..., None].view(np.uint8)
        if kind == "MXFP4":  # an exponent of 2, plus 127
            data[..., 0] = rng.integers(0, 8, data.shape[:2]) + 124 + round(math.log2(size))
        return cls(known, data.reshape(*shape[:-1], -1))

    def dequantized(self) -> np.ndarray:
        values: np.ndarray = gguf.dequantize(self.data, self.kind)
        return values


def write_gguf(
    path: Path,
    fields: Fields,
    arrays: Arrays,
    *,
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
    blocks: Mapping[str, Blocks] = MappingProxyType({}),
) -> Path:
    """Writes a GGUF file whose matrices are of `kind`. Vectors stay float32, as in llama.cpp, and
    float64 arrays keep their type.

    Args:
        blocks: replace arrays of the same names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            is_float = isinstance(value, float)
            writer.add_key_value(
                key, value, GGUFValueType.FLOAT32 if is_float else GGUFValueType.UINT32
            )
    for name, array in arrays.items():
        if name in blocks:
            writer.add_tensor(name, blocks[name].data, raw_dtype=blocks[name].kind)
            continue
        if array.dtype == np.float64:
            writer.add_tensor(name, array)
            continue
        stored = kind if array.ndim > 1 else F32
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_tokenizer_fields(values: dict[str, Any]) -> Callable[[Fields, Arrays], None]:
    """A change of these fields of the tokenizer; None removes a field."""

    def change(fields: Fields, arrays: Arrays) -> None:
        for name, value in values.items():
            fields[f"tokenizer.ggml.{name}"] = value
            if value is None:
                del fields[f"tokenizer.ggml.{name}"]

    return change


def write_llama(
    path: Path,
    model: LlamaForCausalLM,
    *,
    kind: GGMLQuantizationType = F32,
    change: Callable[[Fields, Arrays], None] | None = None,
) -> Path:
    """Writes `model` as a GGUF file, after `change` has changed its fields and tensors."""
    fields, arrays = metadata(model.config), tensors(model)
    if change is not None:
        change(fields, arrays)
    return write_gguf(path, fields, arrays, kind=kind)


def llama3_factors(config: LlamaConfig, factor: float) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter computes it for Llama 3.1, float32."""
    low, high, trained = 1.0, 4.0, 8192
    factors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * config.rope_parameters["rope_theta"] ** (i / config.head_dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def bfloat16(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The weights of `model` as a checkpoint in bfloat16 holds them."""
    state = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """The tensors of a converted file, in bfloat16."""
    return {
        stored.name: stored.read_dequantized(()).to(torch.bfloat16)
        for stored in gguf_tensors(directory)
    }


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


def config_of(directory: Path) -> OurConfig:
    config = load_model_config(str(directory), load_format="auto")
    assert isinstance(config, OurConfig)
    return config


def remove(*keys: str) -> Callable[[Fields, Arrays], None]:
    def change(fields: Fields, arrays: Arrays) -> None:
        for key in keys:
            (fields if key in fields else arrays).pop(key)

    return change


def add(**arrays_added: list[int]) -> Callable[[Fields, Arrays], None]:
    def change(fields: Fields, arrays: Arrays) -> None:
        for name, shape in arrays_added.items():
            arrays[name.replace("__", ".")] = np.zeros(shape, dtype=np.float32)

    return change
