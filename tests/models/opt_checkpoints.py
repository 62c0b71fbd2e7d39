"""Small random OPT checkpoints in every file format, and a paged executor for one model."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fastserve_backend.models import load_model_config
from fastserve_backend.models.layers import AttentionBatch
from fastserve_backend.models.loader import CausalLM, load_model
from torch import Tensor
from transformers import OPTConfig, OPTForCausalLM

BLOCK_SIZE = 4
POSITIONS = 48

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "projected_pre_norm": {"word_embed_proj_dim": 48},
    "untied": {"tie_word_embeddings": False},
    "no_bias": {"enable_bias": False},
    "gelu": {"activation_function": "gelu"},
    "plain_norm": {"layer_norm_elementwise_affine": False},
    "no_final_norm": {"_remove_final_layer_norm": True},
}


def random_opt(**changes: Any) -> OPTForCausalLM:
    """A transformers OPT whose weights, biases and norms are all random."""
    fields: dict[str, Any] = {
        "vocab_size": 301,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "ffn_dim": 80,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "word_embed_proj_dim": 32,
    }
    torch.manual_seed(7)
    model = OPTForCausalLM(OPTConfig(**{**fields, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
    return model


def save_safetensors(model: OPTForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory)


def save_sharded_safetensors(model: OPTForCausalLM, directory: Path) -> None:
    model.save_pretrained(directory, max_shard_size="30KB")
    assert (directory / "model.safetensors.index.json").is_file()


def save_bin(model: OPTForCausalLM, directory: Path) -> None:
    model.config.save_pretrained(directory)
    torch.save(model.state_dict(), directory / "pytorch_model.bin")


def save_legacy_bin(model: OPTForCausalLM, directory: Path) -> None:
    """As torch wrote before 1.6, which cannot be memory-mapped."""
    model.config.save_pretrained(directory)
    torch.save(
        model.state_dict(), directory / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )


def save_sharded_bin(model: OPTForCausalLM, directory: Path) -> None:
    model.config.save_pretrained(directory)
    weight_map: dict[str, str] = {}
    state = model.state_dict()
    for shard in range(3):
        file = f"pytorch_model-{shard + 1:05d}-of-00003.bin"
        names = sorted(state)[shard::3]
        torch.save({name: state[name].clone() for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def save_bare_decoder(model: OPTForCausalLM, directory: Path) -> None:
    """Names that begin at "decoder.", as early OPT checkpoints have them."""
    model.model.save_pretrained(directory)


FORMATS = {
    "safetensors": save_safetensors,
    "sharded_safetensors": save_sharded_safetensors,
    "bin": save_bin,
    "legacy_bin": save_legacy_bin,
    "sharded_bin": save_sharded_bin,
    "bare_decoder": save_bare_decoder,
}


def load(directory: Path) -> CausalLM:
    config = load_model_config(str(directory), load_format="auto", dtype="float32")
    return load_model(config, torch.device("cpu"))


@torch.inference_mode()
def expected_logits(model: OPTForCausalLM, tokens: list[int]) -> Tensor:
    """transformers' logits of a prompt, [len(tokens), vocab]."""
    logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


@dataclass
class Job:
    """`done` of its tokens are in the cache; `logits` has a row for each of them."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0
    logits: list[Tensor] = field(default_factory=list)


class PagedExecutor:
    """Steps a model over jobs whose blocks lie scattered in a cache full of NaN."""

    def __init__(self, model: CausalLM, config: Any, prompts: list[list[int]], seed: int) -> None:
        self._model = model
        blocks_a_job = -(-POSITIONS // BLOCK_SIZE)
        total = blocks_a_job * len(prompts) + 5
        order = random.Random(seed).sample(range(total), total)
        self.jobs = [
            Job(tokens, order[i * blocks_a_job : (i + 1) * blocks_a_job])
            for i, tokens in enumerate(prompts)
        ]
        heads, head_dim = (
            config.num_attention_heads,
            config.hidden_size // config.num_attention_heads,
        )
        self._kv = torch.full(
            (total, config.num_hidden_layers, 2, heads, BLOCK_SIZE, head_dim), float("nan")
        )

    def cast(self, dtype: torch.dtype) -> None:
        """Keep the cache in another number format."""
        self._kv = self._kv.to(dtype)

    @torch.inference_mode()
    def step(self, work: list[tuple[int, int]], *, fresh_kernel: bool, padding: int = 0) -> None:
        """Run (job, token count) pairs as one batch, decodes first, with rows of padding at the
        end.

        `fresh_kernel` serves whole prompts by prefill_attention, else they too read the paged
        cache.
        """
        work = sorted(work, key=lambda pair: pair[1] > 1)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        fresh: list[tuple[int, int]] = []
        for row, (index, count) in enumerate(work):
            job = self.jobs[index]
            if fresh_kernel and job.done == 0 and count == len(job.tokens):
                fresh.append((len(ids), len(ids) + count))
            for position in range(job.done, job.done + count):
                ids.append(job.tokens[position])
                positions.append(position)
                slots.append(
                    job.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                )
                rows.append(row)
        batch = AttentionBatch(
            slots=torch.tensor(slots + [-1] * padding),
            block_tables=torch.tensor([self.jobs[i].blocks for i, _ in work], dtype=torch.int32),
            table_rows=torch.tensor(rows + [0] * padding, dtype=torch.int32),
            context_lens=torch.tensor(
                [p + 1 for p in positions] + [0] * padding, dtype=torch.int32
            ),
            num_decode_tokens=sum(count == 1 for _, count in work),
            fresh_prefills=fresh,
        )
        hidden = self._model.forward(
            torch.tensor(ids + [0] * padding),
            torch.tensor(positions + [0] * padding),
            batch,
            self._kv,
        )
        logits = self._model.logits(hidden)
        assert torch.isfinite(logits).all()
        start = 0
        for index, count in work:
            self.jobs[index].logits.extend(logits[start : start + count])
            self.jobs[index].done += count
            start += count
