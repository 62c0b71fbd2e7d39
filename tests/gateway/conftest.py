from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from openai import OpenAI
from running_gateway import RunningGateway, running_gateway
from tiny_model import START_TIMEOUT_S, TINY_OPT, engine_options


@pytest.fixture(scope="session")
def tiny_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = tmp_path_factory.mktemp("tiny-opt")
    (directory / "config.json").write_text(json.dumps(TINY_OPT), encoding="utf-8")
    return EngineConfig().with_keys(**engine_options(directory))


@pytest.fixture(scope="session")
def endpoints(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Endpoints]:
    """Of a server that all tests share that do not harm it."""
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    triton = TritonServer(tiny_config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    triton.start(START_TIMEOUT_S)
    yield triton.endpoints
    triton.stop()


@pytest.fixture(scope="session")
def gateway(
    endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with running_gateway(f"grpc://{endpoints.grpc_url}", log_path) as running:
        yield running


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with gateway.client() as client:
        yield client
