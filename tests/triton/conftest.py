from __future__ import annotations

from collections.abc import Callable

import pytest
from fastserve_backend.serving.endpoints import Endpoints
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
