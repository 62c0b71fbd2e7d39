"""Converts GGUF files to safetensors. It needs torch, so the server runs it as `gguf_process`.

The `gguf` library reads and dequantises tensor by tensor, so the model is never in memory as a
whole. transformers can load GGUF files too, but only whole, and it ignores the rotary scaling of
LLaMA models, which changes their answers.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import save_file
from torch import Tensor

from fastserve_backend.checkpoints.decoder_config import DecoderConfig
from fastserve_backend.checkpoints.end_tokens import TURN_ENDS
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.families.llama import read_llama
from fastserve_backend.checkpoints.gguf_tokenizer import save_tokenizer
from fastserve_backend.checkpoints.gguf_vocabulary import NO_TOKEN
from fastserve_backend.checkpoints.hf_config import HFConfig
from fastserve_backend.models.decoder import DecoderModel
from fastserve_backend.models.model_part import ModelPart

_LLAMA = gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA]

# Weights are gathered up to so many bytes before they are written to a file.
_SHARD_BYTES = 2 * 2**30

# Factors for the rotary frequencies. llama.cpp's converter computes them for Llama 3.1 and later.
_ROPE_FACTORS = "rope_freqs.weight"

# Optional fields of rotary scaling: GGUF's names -> Hugging Face's.
_ROPE_OPTIONS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Unsupported fields that would change a model's answers -> the values that change nothing.
_UNSUPPORTED = {
    "llama.logit_scale": (0.0, 1.0),
    "llama.rope.scaling.alpha": (0.0,),
    "llama.rope.scaling.attn_factor": (1.0,),
    "llama.rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "llama.rope.scaling.yarn_log_multiplier": (0.0,),
}


class GGUFFile:
    """A GGUF file with a LLaMA model. The constructor raises ModelError for anything else."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = gguf.GGUFReader(path)
        # For missing bytes the library raises numpy's errors.
        except Exception as error:
            raise ModelError(f"damaged, or no GGUF file ({error})") from error
        architecture = self.field("general.architecture")
        if architecture != _LLAMA:
            raise ModelError(
                f"its architecture is {architecture!r}; GGUF files are supported for {_LLAMA!r} "
                "(other architectures as Hugging Face checkpoints)"
            )
        if self.field("split.count", 1) > 1:
            raise ModelError(
                "one part of a model in several files; join them with `llama-gguf-split --merge`"
            )

    def field(self, key: str, default: Any = None) -> Any:
        """The value of a metadata field."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

    def required(self, key: str) -> Any:
        """The value of a metadata field; ModelError if it is missing."""
        value = self.field(key)
        if value is None:
            raise ModelError(f"metadata field {key} is missing")
        return value

    def config(self) -> dict[str, Any]:
        """The fields of a Hugging Face config.json. Raises ModelError if the model cannot be
        served."""
        tensors = {tensor.name for tensor in self._reader.tensors}
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "vocab_size": len(self.required("tokenizer.ggml.tokens")),
            "hidden_size": self.required("llama.embedding_length"),
            "intermediate_size": self.required("llama.feed_forward_length"),
            "num_hidden_layers": self.required("llama.block_count"),
            "num_attention_heads": self.required("llama.attention.head_count"),
            "num_key_value_heads": self.field("llama.attention.head_count_kv"),
            "head_dim": self.field("llama.attention.key_length"),
            "max_position_embeddings": self.required("llama.context_length"),
            "rms_norm_eps": self.required("llama.attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
            "tie_word_embeddings": "output.weight" not in tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._end_tokens(),
        }
        config = {key: value for key, value in config.items() if value is not None}
        # Refuse what cannot be served before converting it.
        self._refuse_unsupported(_read_config(config).head_dim)
        config["rope_parameters"] = self._rope(config)
        _read_config(config)
        return config

    def check_tensors(self, config: dict[str, Any]) -> None:
        """Raise ModelError unless the file has all tensors of `config`, and no others, in the right
        shapes."""
        missing = _shapes(_read_config(config))
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                continue  # in the configuration
            wanted = missing.pop(tensor.name, None)
            if wanted is None:
                raise ModelError(f"tensor {tensor.name!r} belongs to no plain LLaMA model")
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if shape != wanted:
                raise ModelError(
                    f"tensor {tensor.name!r} has shape {shape}, but its metadata asks for {wanted}"
                )
        if missing:
            first, *others = missing
            more = f" and {len(others)} more" if others else ""
            raise ModelError(
                f"it lacks tensor {first!r}{more}, which its metadata and its other tensors ask "
                "for; use the model's Hugging Face checkpoint"
            )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a Hugging Face checkpoint, in bfloat16, with their names. Call
        `check_tensors` first."""
        names = _names(self.required("llama.block_count"))
        heads = self.required("llama.attention.head_count")
        kv_heads = self.field("llama.attention.head_count_kv") or heads
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                continue  # in the configuration
            try:
                values = gguf.dequantize(tensor.data, tensor.tensor_type)
                if ".attn_q." in tensor.name:
                    values = _unpermute(values, heads)
                elif ".attn_k." in tensor.name:
                    values = _unpermute(values, kv_heads)
            except (NotImplementedError, ValueError) as error:
                raise ModelError(
                    f"tensor {tensor.name!r} ({tensor.tensor_type.name}) cannot be read: {error}"
                ) from error
            # torch must own the memory; this copies only if the library returns a view of the file.
            own = np.require(values, requirements=["C", "W"])
            yield names[tensor.name], torch.from_numpy(own).to(torch.bfloat16)

    @property
    def num_tensors(self) -> int:
        return len(self._reader.tensors)

    @property
    def num_weights(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self._reader.tensors)

    def _refuse_unsupported(self, head_dim: int) -> None:
        neutral = _UNSUPPORTED | {
            "llama.attention.scale": (0.0, head_dim**-0.5),
            "llama.rope.dimension_count": (head_dim,),
        }
        for key, values in neutral.items():
            value = self.field(key)
            if value is None or any(math.isclose(value, one, rel_tol=1e-6) for one in values):
                continue
            raise ModelError(
                f"metadata field {key} is {value}, but only {values[-1]} is supported; use the "
                "model's Hugging Face checkpoint"
            )

    def _end_tokens(self) -> list[int]:
        """Ids of the ends of a text, of a turn in a chat and of a message. Older files lack the
        fields, so tokens with the usual names count too."""
        fields = (self.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        ids = [token_id for token_id in fields if token_id not in NO_TOKEN]
        tokens = self.required("tokenizer.ggml.tokens")
        ids += [token_id for token_id, token in enumerate(tokens) if token in TURN_ENDS]
        return list(dict.fromkeys(ids))

    def _rope(self, config: dict[str, Any]) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self.field("llama.rope.freq_base") or 1e4,
        }
        factor = self.field("llama.rope.scaling.factor") or self.field("llama.rope.scale_linear")
        # As in llama.cpp, a factor without a type means linear scaling.
        kind = self.field("llama.rope.scaling.type") or ("linear" if factor else "none")
        if kind not in ("none", "linear", "yarn"):
            raise ModelError(
                f"its rotary scaling is {kind!r}; supported are linear, yarn and that of Llama 3.1"
            )
        if kind != "none":
            rope |= {
                "rope_type": kind,
                "factor": factor or self.required("llama.rope.scaling.factor"),
            }
            for theirs, ours in _ROPE_OPTIONS.items():
                if (value := self.field(f"llama.rope.scaling.{theirs}")) is not None:
                    rope[ours] = value
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_FACTORS:
                factors = gguf.dequantize(tensor.data, tensor.tensor_type)
                rope = _llama3(rope, factors.ravel().tolist(), config)
        return rope


def _read_config(config: dict[str, Any]) -> DecoderConfig:
    return read_llama(
        HFConfig(config, "its metadata"),
        name="",
        directory=None,
        load_format="dummy",
        dtype="bfloat16",
        quantization=None,
        kv_dtype="same",
    )


def _llama3(rope: dict[str, Any], factors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling that give these factors for the frequencies."""
    scaled = rope | {
        "rope_type": "llama3",
        "factor": max(factors),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain, wanted = (
        _read_config(config | {"rope_parameters": one}).rotaries[0] for one in (rope, scaled)
    )
    given = [one / factor for one, factor in zip(plain.frequencies, factors, strict=False)]
    if len(factors) != len(plain.frequencies) or not all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(given, wanted.frequencies, strict=True)
    ):
        raise ModelError(
            f"the frequency factors in {_ROPE_FACTORS} are not those of Llama 3.1; use the "
            "model's Hugging Face checkpoint"
        )
    return scaled


def _names(num_layers: int) -> dict[str, str]:
    """GGUF's names for a LLaMA model's tensors -> Hugging Face's."""
    by_block = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    for layer in range(num_layers):
        for theirs, ours in by_block.items():
            for kind in ("weight", "bias"):
                names[f"blk.{layer}.{theirs}.{kind}"] = f"model.layers.{layer}.{ours}.{kind}"
    return names


def _shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors, by their names in GGUF."""
    layers = range(config.num_layers)
    part = ModelPart(torch.device("meta"), torch.bfloat16, layers, config.num_layers)
    # One position: even with the meta device the table of positions is real memory.
    parameters = DecoderModel(replace(config, max_model_len=1), part).parameters()
    names = {theirs: ours.removeprefix("model.") for theirs, ours in _names(len(layers)).items()}
    return {theirs: parameters[ours].shape for theirs, ours in names.items() if ours in parameters}


def _unpermute(values: Any, heads: int) -> Any:
    """Reorder rows of q or k, [heads * head_dim, ...], from llama.cpp's to Hugging Face's order.

    llama.cpp rotates neighbouring rows as pairs; Hugging Face pairs the halves of a head.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _save_tensors(file: GGUFFile, directory: Path) -> None:
    """Write model-00001.safetensors and so on, and their index."""
    shard: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    num_files = total_bytes = 0

    def write() -> None:
        nonlocal num_files, total_bytes
        num_files += 1
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        name = f"model-{num_files:05d}.safetensors"
        save_file(shard, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    with Progress(console=Console(stderr=True)) as progress:
        tensors = progress.track(
            file.tensors(), total=file.num_tensors, description="dequantising to bfloat16"
        )
        for name, tensor in tensors:
            shard[name] = tensor
            if sum(one.nbytes for one in shard.values()) >= _SHARD_BYTES:
                write()
    if shard:
        write()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def convert(path: Path, directory: Path) -> None:
    """Write the model of a GGUF file to `directory`, which must not exist.

    Raises:
        ModelError: the file is damaged, its model cannot be served, or the disk is too full.
    """
    console = Console(stderr=True, highlight=False)
    console.print(f"converting {path.name}, once: reading", soft_wrap=True, markup=False)
    file = GGUFFile(path)
    config = file.config()
    file.check_tensors(config)
    needed, free = 2 * file.num_weights, shutil.disk_usage(directory.parent).free
    if free < needed:
        raise ModelError(
            f"converting it takes {needed / 2**30:.1f} GiB in {directory.parent.parent}, where "
            f"{free / 2**30:.1f} are free; free some, or set XDG_CACHE_HOME to a larger disk"
        )
    directory.mkdir()
    _write_json(directory / "config.json", config)
    save_tokenizer(file, directory)
    _save_tensors(file, directory)
