"""Beside a tenant that attacks, no honest request fails, nothing restarts, and memory is bounded.

`make endurance` has five minutes of it, `make test` seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest
from attacker import Attacker
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from running_gateway import RunningGateway, running_gateway
from serving_client import metric, wait_until_idle

DEADLINE_S = 120.0
REQUESTS_PER_S, TOKENS = 4.0, 12
ATTACKS_AT_ONCE = 6
# Of the manifests, in deploy/kubernetes/base/gateway.yaml.
FLAGS = ("--max-body-bytes=2097152", "--max-held-bytes=8388608")
MOST_MIB = 512
KEYS = {"alice": "A-key-000000", "bob": "B-key-000000", "mallory": "M-key-000000"}

pytestmark = [pytest.mark.timeout(1200), pytest.mark.usefixtures("unharmed")]


@pytest.fixture(scope="module")
def guarded(
    chatty_server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway whose clients have keys."""
    directory = tmp_path_factory.mktemp("attacked")
    keys = directory / "keys"
    keys.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()), encoding="utf-8")
    url = f"grpc://{chatty_server.endpoints.grpc_url}"
    flags = (*FLAGS, "--api-keys-file", str(keys), "--response-store-mib", "16")
    with running_gateway(url, Path(directory / "gateway.log"), *flags) as gateway:
        yield gateway


@dataclass
class Honest:
    """What honest tenants saw."""

    seconds: list[float]
    peak_mib: float

    @property
    def p95_s(self) -> float:
        return statistics.quantiles(self.seconds, n=20)[-1]


async def honest_load(gateway: RunningGateway, seconds: float) -> Honest:
    """Alice and Bob ask in turn, at a steady rate, and check each answer."""
    times: list[float] = []
    peak = 0.0
    process = psutil.Process(gateway.process.pid)

    async def ask(http: httpx2.AsyncClient, number: int) -> None:
        name = ("alice", "bob")[number % 2]
        began_s = time.monotonic()
        answer = await http.post(
            f"{gateway.api_url}/completions",
            json={"model": MODEL_NAME, "prompt": f"{number} times", "max_tokens": TOKENS}
            | {"ignore_eos": True},
            headers={"Authorization": f"Bearer {KEYS[name]}"},
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == TOKENS
        times.append(time.monotonic() - began_s)

    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with (
        httpx2.AsyncClient(timeout=DEADLINE_S) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(round(seconds * REQUESTS_PER_S)):
            await asyncio.sleep(started_s + number / REQUESTS_PER_S - loop.time())
            peak = max(peak, process.memory_info().rss / 2**20)
            group.create_task(ask(http, number))
    return Honest(times, peak)


async def beside(attacker: Attacker, gateway: RunningGateway, seconds: float) -> Honest:
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(attacker.run(over, ATTACKS_AT_ONCE))
        try:
            return await honest_load(gateway, seconds)
        finally:
            over.set()


def test_an_attacker_hurts_nobody(
    guarded: RunningGateway,
    chatty_server: TritonServer,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
) -> None:
    url = chatty_server.endpoints.metrics_url
    restarts = metric(url, "fastserve_worker_restarts_total")
    alone = asyncio.run(honest_load(guarded, 60.0 if is_long else 5.0))
    attacker = Attacker(guarded.url, KEYS["mallory"])
    attacked = asyncio.run(beside(attacker, guarded, 300.0 if is_long else 15.0))
    wait_until_idle(chatty_server.endpoints)
    row(
        {
            "attacks": attacker.sent.total(),
            "answers": dict(attacker.statuses.most_common()),
            "P95 alone, s": f"{alone.p95_s:.3f}",
            "P95 beside it, s": f"{attacked.p95_s:.3f}",
            "gateway's peak, MiB": f"{attacked.peak_mib:.0f}",
        }
    )
    assert guarded.process.poll() is None
    assert metric(url, "fastserve_worker_restarts_total") == restarts
    assert attacked.peak_mib < MOST_MIB
    assert len(attacker.sent) > 10
