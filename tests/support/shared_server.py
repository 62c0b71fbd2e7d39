"""Fixtures: the servers that the tests of several folders share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from running_server import running_server
from tiny_model import TINY_OPT, engine_options


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small OPT, random weights, byte-level tokenizer: quick, and with long contexts."""
    directory = tmp_path_factory.mktemp("tiny-opt")
    (directory / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
    return directory


@pytest.fixture(scope="session")
def tiny_config(tiny_model: Path) -> EngineConfig:
    return EngineConfig().with_keys(**engine_options(tiny_model))


@pytest.fixture(scope="session")
def server(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TritonServer]:
    """A server for all tests that neither harm it nor need another configuration."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with running_server(tiny_config, log_path) as running:
        yield running


@pytest.fixture(scope="session")
def endpoints(server: TritonServer) -> Endpoints:
    return server.endpoints


@pytest.fixture(scope="session")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with the embedded model, which is trained and has a chat template."""
    config = EngineConfig().with_keys(
        model=EMBEDDED_MODEL, dtype="float32", max_model_len=2048, swap_space_gib=0.1
    )
    log_path = tmp_path_factory.mktemp("chat") / "server.log"
    with running_server(config, log_path) as server:
        yield server


@pytest.fixture(scope="session")
def chat_endpoints(chat_server: TritonServer) -> Endpoints:
    return chat_server.endpoints
