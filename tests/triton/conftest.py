from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.models.embedded import EMBEDDED_MODEL
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from tiny_model import START_TIMEOUT_S, TINY_OPT, engine_options


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
    """The server that all tests share that do not kill it."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    triton = TritonServer(tiny_config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    triton.start(START_TIMEOUT_S)
    yield triton
    triton.stop()


@pytest.fixture(scope="session")
def endpoints(server: TritonServer) -> Endpoints:
    return server.endpoints


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, endpoints: Endpoints) -> str:
    """Of the shared server, for ``fastserve_client``: each test runs over both transports."""
    return endpoints.http_url if request.param == "http" else f"grpc://{endpoints.grpc_url}"


@pytest.fixture(scope="session")
def chat_endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """Of a server with the embedded model, which is a trained one and has a chat template."""
    config = EngineConfig().with_keys(
        model=EMBEDDED_MODEL, dtype="float32", max_model_len=2048, swap_space_gib=0.1
    )
    log_path = tmp_path_factory.mktemp("chat") / "server.log"
    triton = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    triton.start(START_TIMEOUT_S)
    yield triton.endpoints
    triton.stop()
