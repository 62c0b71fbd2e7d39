"""Models and engines for tests of several ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fastserve_backend import LLM
from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor import rank_processes
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import Ready, Setup
from transformers import GPTNeoXConfig, GptOssConfig, LlamaConfig, OPTConfig
from waiting import DEADLINE_S

VOCAB_SIZE = 381  # an odd number, so that ranks have parts of different sizes
POSITIONS = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
MODELS = {
    "opt": OPTConfig(**SHAPE, ffn_dim=128, word_embed_proj_dim=64),
    "opt_350m": OPTConfig(**SHAPE, ffn_dim=128, word_embed_proj_dim=32, do_layer_norm_before=False),
    "llama": LlamaConfig(
        **SHAPE | {"num_attention_heads": 8, "num_key_value_heads": 4}, intermediate_size=130
    ),
    "gpt_neox": GPTNeoXConfig(**SHAPE, intermediate_size=128),
    # Two ranks have experts of different numbers.
    "gpt_oss": GptOssConfig(
        **SHAPE,
        intermediate_size=64,
        head_dim=16,
        num_key_value_heads=2,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=20,
    ),
}
START_TIMEOUT_S = 600.0  # emulated ranks start at low priority, beside all other tests


@contextmanager
def started_ranks(
    model: Path, arrivals: int | None = None, **keys: Any
) -> Iterator[tuple[DistributedExecutor, Ready]]:
    """Starts ranks without an engine; yields their executor and what the ranks report when
    ready."""
    executor = DistributedExecutor(arrivals=arrivals)
    keys = {"dtype": "float32", "device": "cpu"} | keys
    config = EngineConfig().with_keys(model=str(model), **keys)
    try:
        yield executor, executor.start(Setup.of(config), START_TIMEOUT_S)
    finally:
        with pytest.MonkeyPatch.context() as patch:
            # The product would kill ranks that a busy machine keeps from ending by themselves.
            patch.setattr(rank_processes, "STOP_TIMEOUT_S", DEADLINE_S)
            executor.close()


def run_ranks_by(program: ModuleType, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ranks run ``program`` from now on."""
    script = directory / "python"
    # ``program`` takes the place of "-m" and the worker's module.
    script.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {program.__file__} "$@"\n')
    script.chmod(0o700)
    monkeypatch.setattr(rank_processes, "python_executable", lambda: str(script))


# Fewer blocks and seats than the jobs need, and the policy that preempts the most.
LIMITS = {
    "device_blocks": 60,
    "swap_space_gib": 0.05,
    "max_num_seqs": 4,
    "policy": "skip_join_mlfq",
}


class ParallelLLM(LLM):
    """An LLM that checks its block tables at each step, and gives access to its ranks."""

    def __init__(
        self,
        model: Path,
        tokenizer: Path,
        tensor_size: int,
        num_stages: int,
        *,
        kind: type[DistributedExecutor] = DistributedExecutor,
        **keys: Any,
    ) -> None:
        self.executors: list[DistributedExecutor] = []
        """Another one after each restart; the last is in use."""

        def make() -> DistributedExecutor:
            self.executors.append(kind())
            return self.executors[-1]

        config = EngineConfig().with_keys(
            model=str(model),
            tokenizer=str(tokenizer),
            dtype="float32",
            device="cpu",
            tensor_parallel_size=tensor_size,
            pipeline_parallel_size=num_stages,
            **(LIMITS | keys),
        )
        self.engine = Engine(config, make_executor=make, check_integrity=True)
