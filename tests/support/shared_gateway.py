"""Fixtures: the gateways to the shared servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from running_gateway import RunningGateway, running_gateway
from running_server import running_server
from tiny_model import engine_options
from tool_model import save_tool_model


@pytest.fixture(scope="session")
def gateway(
    endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with running_gateway(f"grpc://{endpoints.grpc_url}", log_path) as running:
        yield running


@pytest.fixture(scope="session")
def chat_gateway(
    chat_endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway to the trained model."""
    log_path = tmp_path_factory.mktemp("chat-gateway") / "gateway.log"
    with running_gateway(f"grpc://{chat_endpoints.grpc_url}", log_path) as running:
        yield running


@pytest.fixture(scope="session")
def tool_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    """A gateway to ``tool_model``, which stores responses."""
    model = save_tool_model(tmp_path_factory.mktemp("model"))
    settings = EngineConfig().with_keys(**engine_options(model))
    logs = tmp_path_factory.mktemp("tool-gateway")
    flags = ("--response-store-mib", "1")
    with (
        running_server(settings, logs / "server.log") as server,
        running_gateway(
            f"grpc://{server.endpoints.grpc_url}", logs / "gateway.log", *flags
        ) as running,
    ):
        yield running
