from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer

START_TIMEOUT_S = 120.0

TINY_OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "num_attention_heads": 4,
    "ffn_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "do_layer_norm_before": True,
    "activation_function": "relu",
    "torch_dtype": "float32",
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OPT, random weights, byte-level tokenizer: quick, and with long contexts."""
    directory = tmp_path_factory.mktemp("tiny-opt")
    (directory / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
    return directory


def engine_options(model: Path) -> dict[str, Any]:
    return {
        "model": str(model),
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 4096,
        "device_blocks": 240,  # 3840 tokens, less than the model's 4096
        "swap_space_gib": 0.1,
    }


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path) -> EngineConfig:
    return EngineConfig().with_keys(**engine_options(tiny_model))


@pytest.fixture(scope="session")
def server(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """The server that all tests share that do not kill it."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    triton = TritonServer(tiny_config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    triton.start(START_TIMEOUT_S)
    yield triton
    triton.stop()


@pytest.fixture(scope="session")
def endpoints(server: TritonServer) -> Endpoints:
    return server.endpoints
