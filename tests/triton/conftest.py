from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from running_server import running_server
from serving_client import ended_jobs, used_blocks, wait_until_idle
from waiting import wait_for


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, endpoints: Endpoints) -> str:
    """The shared server's URL for ``fastserve_client``. Each test runs over both transports."""
    return endpoints.http_url if request.param == "http" else f"grpc://{endpoints.grpc_url}"


@pytest.fixture
def wait_until_cancelled(endpoints: Endpoints) -> Callable[[], None]:
    """A function that waits until the server has cancelled the test's job and freed its memory.

    Free memory alone proves little: metrics come late, and the longest job ends by itself.
    """
    url = endpoints.metrics_url
    wait_until_idle(endpoints)
    before = ended_jobs(url, "cancelled")

    def wait() -> None:
        wait_for(lambda: ended_jobs(url, "cancelled") > before)
        wait_for(lambda: used_blocks(url) == 0)

    return wait


@pytest.fixture(scope="session")
def chat_endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """A server with the embedded model, which is trained and has a chat template."""
    config = EngineConfig().with_keys(
        model=EMBEDDED_MODEL, dtype="float32", max_model_len=2048, swap_space_gib=0.1
    )
    log_path = tmp_path_factory.mktemp("chat") / "server.log"
    with running_server(config, log_path) as server:
        yield server.endpoints
