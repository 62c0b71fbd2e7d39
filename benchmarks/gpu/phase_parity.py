"""Phase "parity": the engine's greedy tokens against those of transformers, while jobs are swapped,
and while they copy the KV of a common prefix from each other.

An answer equals the reference's greedy one exactly if each token is the reference's most likely
next token. One forward pass over prompt and answer shows this for all positions. Weights are spread
so widely that float32 rounding hardly ever decides a token. Where the two most likely tokens are as
close as that, either is right.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.sampling_params import SamplingParams
from fastserve_kernels.weight_quantization import quantize_groups
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from benchmarks.gpu.phase_context import CheckFailed, Context
from benchmarks.replay import Answer, run_jobs

VOCABULARY = 600
POSITIONS = 400
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,  # four heads of 64
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_LLAMA = LlamaConfig(**SHAPE, intermediate_size=512, num_key_value_heads=2)
INT4 = "LLaMA, weights in INT4"
MODELS = {
    "LLaMA, grouped KV heads": _LLAMA,
    "OPT": OPTConfig(**SHAPE, ffn_dim=512, word_embed_proj_dim=256),
    "GPT-NeoX": GPTNeoXConfig(**SHAPE, intermediate_size=512),
    "Gemma 2, windows and soft caps": Gemma2Config(
        **SHAPE, intermediate_size=512, num_key_value_heads=2, head_dim=64, sliding_window=50
    ),
    "gpt-oss, sinks and experts": GptOssConfig(
        **SHAPE,
        intermediate_size=256,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=50,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    INT4: _LLAMA,
}
ONLY_SWAPPED = tuple(MODELS)[3:]
"""Models whose prefix copies are not checked, for their time."""
SPREAD, POSITIONS_SPREAD = 0.2, 0.8
"""Standard deviations of random weights. Strong positions keep greedy answers from settling."""
NEAR_TIE = 1e-3
"""Tolerance of a logit: several times the error of rounding, far less than that of a wrong key."""
NUM_JOBS, NUM_TOKENS, BLOCK_SIZE = 12, 200, 16
FEW_BLOCKS = 70
"""Blocks: far fewer than the jobs need, so that they lose theirs again and again."""
BEGINNING = 40
"""Length of the common prefix of every other prompt: two blocks and a half."""
MOST_ENGINES = 3
"""Engines at a time, because an engine's start takes longer than its answers."""
SEED = 3


def run(context: Context) -> None:
    device = context.device.torch_device
    num_tokens, positions, few = (
        (40, 128, 14) if context.tiny else (NUM_TOKENS, POSITIONS, FEW_BLOCKS)
    )
    # With room for all, later jobs copy the common prefix from the first ones.
    ways = {"swapped": few, "copied": NUM_JOBS * positions // BLOCK_SIZE}
    prompts = _prompts(positions - num_tokens)
    models = dict(list(MODELS.items())[: 1 if context.tiny else None])
    directories = {name: context.scratch / name for name in models}
    references = {
        name: _reference(config, directories[name]).to(device) for name, config in models.items()
    }
    if INT4 in references:
        _round_linears(references[INT4])

    def answers_of(name: str, blocks: int) -> tuple[list[Answer], Engine]:
        quantization = "int4" if name == INT4 else None
        return _answers(
            context, directories[name], quantization, prompts, num_tokens, positions, blocks
        )

    wrong = []
    with ThreadPoolExecutor(1 if context.tiny else MOST_ENGINES) as pool:
        runs = {
            (name, way): pool.submit(answers_of, name, blocks)
            for name in models
            for way, blocks in ways.items()
            if way == "swapped" or name not in ONLY_SWAPPED
        }
        for (name, way), future in runs.items():
            answers, engine = future.result()
            reference, blocks = references[name], ways[way]
            differing = sum(
                _num_differing(reference, device, prompt, answer.token_ids)
                for prompt, answer in zip(prompts, answers, strict=True)
            )
            done = {
                "swapped": engine.counters.swap_in_bytes,
                "copied": sum(answer.stats.num_cached_tokens for answer in answers),
            }
            context.recorder.row(
                "token parity with transformers",
                {"model": name, "dtype": "float32", "KV blocks": blocks},
                {
                    "jobs": len(answers),
                    "tokens": sum(len(answer.token_ids) for answer in answers),
                    "tokens that differ": differing,
                    "preemptions": engine.counters.preemptions,
                    "MB swapped in": done["swapped"] / 1e6,
                    "prompt tokens copied": done["copied"],
                },
            )
            if differing:
                wrong.append(f"{name}: {differing} tokens are not the reference's")
            if not done[way]:
                wrong.append(f"{name}: nothing was {way}, so that was not checked")
            if len({tuple(answer.token_ids) for answer in answers}) < len(answers):
                wrong.append(f"{name}: answers are alike, so that they show little")
    if wrong:
        raise CheckFailed("; ".join(wrong))


def _reference(config: PreTrainedConfig, directory: Path) -> nn.Module:
    """transformers' model of random weights, saved to ``directory`` with a tokenizer."""
    torch.manual_seed(SEED)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and name.endswith("weight")
            spread = POSITIONS_SPREAD if "embed_positions" in name else SPREAD
            parameter.normal_(1.0 if is_scale else 0.0, spread)
    model.save_pretrained(directory)
    _save_tokenizer(directory)
    return model


@torch.no_grad()
def _round_linears(model: nn.Module) -> None:
    """Rounds the weights as an engine with ``quantization: int4`` does."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(
                quantize_groups(layer.weight, bits=4, group=64).dequantized(torch.float32)
            )


def _save_tokenizer(directory: Path) -> None:
    """A tokenizer of single bytes: prompts are token ids, but an engine turns answers into text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def _prompts(most_tokens: int) -> list[list[int]]:
    rng = random.Random(SEED)
    beginning = _random_tokens(rng, BEGINNING)
    prompts = []
    for number in range(NUM_JOBS):
        prompt = beginning if number % 2 else []
        own = rng.randint(1, most_tokens - len(prompt))
        prompts.append(prompt + _random_tokens(rng, own))
    return prompts


def _answers(
    context: Context,
    directory: Path,
    quantization: str | None,
    prompts: list[list[int]],
    num_tokens: int,
    positions: int,
    blocks: int,
) -> tuple[list[Answer], Engine]:
    """The engine's answers, and the engine, already closed.

    Args:
        blocks: for each group of layers.
    """
    groups = load_model_config(str(directory), load_format="dummy").layer_groups
    config = EngineConfig().with_keys(
        model=str(directory),
        quantization=quantization,
        device=context.device.torch_device.type,
        max_num_seqs=5,
        max_model_len=positions,
        block_size=BLOCK_SIZE,
        device_blocks=blocks * len(groups.kind_of_group),
        swap_space_gib=0.1,
        policy="skip_join_mlfq",
        base_quantum_ms=0.01,
    )
    engine = Engine(config, start_timeout_s=context.left_s(), check_integrity=True)
    try:
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        jobs = [(prompt, params) for prompt in prompts]
        return run_jobs(engine, jobs, context.left_s()), engine
    finally:
        engine.close()


def _random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(4, VOCABULARY) for _ in range(count)]


@torch.inference_mode()
def _num_differing(
    reference: nn.Module, device: torch.device, prompt: list[int], answer: list[int]
) -> int:
    """Number of the answer's tokens that are not the reference's most likely next token."""
    tokens = torch.tensor([prompt + answer], device=device)
    logits = reference(tokens).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, tokens[0, len(prompt) :, None])[:, 0]
    return int((logits.amax(-1) - chosen > NEAR_TIE).sum())
