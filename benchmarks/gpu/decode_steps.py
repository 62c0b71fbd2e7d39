"""A rank's model in this process, on this device, and decode steps to time it with."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig, Quantization
from fastserve_backend.models.loader import load_model, torch_dtype
from fastserve_backend.rank_protocol.messages import Step
from fastserve_backend.worker.model_runner import LaunchedStep, ModelRunner
from fastserve_backend.worker.step_inputs import StepLimits
from torch import Tensor

from benchmarks.gpu.phase_context import Context
from benchmarks.gpu.random_models import DTYPE, model_of

BLOCK_SIZE = 16
FIRST_TOKEN = 4  # smaller ids are special


@dataclass(frozen=True)
class LoadedModel:
    """A model with random weights and random KV in all its blocks."""

    config: ModelConfig
    kv: Tensor
    runner: ModelRunner

    @property
    def bytes_of_weights(self) -> int:
        return self.config.weight_bytes

    def bytes_of_context(self, tokens: int) -> int:
        return tokens * self.config.kv_bytes_per_block(BLOCK_SIZE) // BLOCK_SIZE


def block_bytes(name: str) -> int:
    """Bytes of one KV block of a built-in model."""
    config = load_model_config(name, load_format="dummy", dtype=DTYPE)
    return config.kv_bytes_per_block(BLOCK_SIZE)


def load(
    context: Context,
    name: str,
    num_blocks: int,
    max_batch: int,
    quantization: Quantization | None = None,
    max_tokens: int | None = None,
) -> LoadedModel:
    """Loads a model with ``num_blocks`` of KV, for steps of up to ``max_batch`` jobs.

    Args:
        max_tokens: of a step; by default a token a job.
    """
    device = context.device.torch_device
    config = load_model_config(
        model_of(context, name),
        load_format="dummy",
        dtype=DTYPE,
        device=device.type,
        quantization=quantization,
    )
    with torch.inference_mode():
        model = load_model(config, device)
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        kv = torch.empty(shape, dtype=torch_dtype(config), device=device)
        for block in kv:  # one at a time, because the generator needs memory too
            block.normal_()
    limits = StepLimits(
        max_tokens=max_tokens or max_batch, max_jobs=max_batch, max_model_len=config.max_model_len
    )
    return LoadedModel(config, kv, ModelRunner(model, config, kv, device, limits))


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def decode_step(step_id: int, batch: int, context: int) -> Step:
    """A greedy step of one token for each of ``batch`` jobs, which attends to ``context`` tokens.

    The jobs' blocks lie scattered among the first ``batch * blocks_of(context)``.
    """
    count = blocks_of(context)
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(batch * count, generator=generator).view(batch, count).tolist()
    return Step.of(
        step_id, [(context - 1, [FIRST_TOKEN + job], table) for job, table in enumerate(tables)]
    )


def mixed_step(step_id: int, batch: int, context: int, prompt: int) -> Step:
    """A `decode_step` with one more job, a prompt of so many tokens, in the blocks after theirs."""
    count = blocks_of(context)
    jobs = [
        (context - 1, [FIRST_TOKEN + job], list(range(job * count, (job + 1) * count)))
        for job in range(batch)
    ]
    tokens = [FIRST_TOKEN + place for place in range(prompt)]
    table = list(range(batch * count, batch * count + blocks_of(prompt)))
    return Step.of(step_id, [*jobs, (0, tokens, table)])


@contextmanager
def steps_ahead(runner: ModelRunner, step: Step) -> Iterator[Callable[[], None]]:
    """Steps as serving sends them: each is sent while the previous one runs, and takes its input
    tokens from that one on the device.

    Yields a function that launches a step and waits for the previous one. So a call of it lasts as
    long as a step, or as the host's work on a step if that is longer.
    """
    runner.run(step)  # the first step's tokens
    rows = array("i", range(step.num_decodes)).tobytes()
    following = msgspec.structs.replace(step, previous_rows=rows)

    def launch() -> LaunchedStep:
        launched = runner.launch(following)
        assert launched is not None, "a rank alone answers"
        return launched

    running = launch()

    def run_one() -> None:
        nonlocal running
        before, running = running, launch()
        before.answer()

    try:
        yield run_one
    finally:
        running.answer()
