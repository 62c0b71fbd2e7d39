"""Fixture: the gateway to the shared server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from running_gateway import RunningGateway, running_gateway


@pytest.fixture(scope="session")
def gateway(
    endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with running_gateway(f"grpc://{endpoints.grpc_url}", log_path) as running:
        yield running
