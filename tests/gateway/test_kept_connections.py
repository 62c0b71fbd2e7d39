"""Proxies reuse connections to the gateway: none may close while a request is on its way."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest
from relay import Relay
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway, running_gateway

LATENCY_S = 0.05
PROXY_KEEPS_S = 1.0
GATEWAY_KEEPS_S = 10
# Idle times of the proxy's connections, just below and just above its limit.
IDLE_S = [PROXY_KEEPS_S + step / 100 for step in range(-20, 21, 4)]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[RunningGateway]:
    flags = ["--keep-alive-s", str(GATEWAY_KEEPS_S)]
    with running_gateway("127.0.0.1:9", tmp_path / "gateway.log", *flags) as running:
        yield running


@pytest.fixture
def far_url(gateway: RunningGateway) -> Iterator[str]:
    """The gateway's address over a link with latency."""
    relay = Relay(gateway.url.removeprefix("http://"), latency_s=LATENCY_S)
    yield f"http://127.0.0.1:{relay.port}/v1/models"
    relay.close()


def test_no_request_is_lost_while_a_proxy_lets_go_of_its_connection(far_url: str) -> None:
    limits = httpx2.Limits(keepalive_expiry=PROXY_KEEPS_S)

    def statuses(idle_s: float) -> list[int]:
        with httpx2.Client(limits=limits, timeout=REQUEST_TIMEOUT_S) as proxy:
            first = proxy.get(far_url).status_code
            time.sleep(idle_s)
            return [first, proxy.get(far_url).status_code]

    with ThreadPoolExecutor(len(IDLE_S)) as pool:
        assert list(pool.map(statuses, IDLE_S)) == [[200, 200]] * len(IDLE_S)
