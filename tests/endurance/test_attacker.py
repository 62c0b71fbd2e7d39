"""Beside a tenant that attacks, no honest request fails, nothing restarts, and memory is bounded.

`make endurance` has five minutes of it, `make test` seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
import pytest
from attacker import ENDLESS, KINDS, attacking
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from running_gateway import RunningGateway, running_gateway
from serving_client import metric, wait_until_idle

DEADLINE_S = 120.0
REQUESTS_PER_S, TOKENS = 4.0, 12
KIND_S = 30.0
"""For which each kind of attack is measured alone."""
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


def busy_s(processes: list[psutil.Process]) -> float:
    """The processor time of these processes and of their children."""
    total = 0.0
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # a helper that was replaced
            times = one.cpu_times()
            total += times.user + times.system
    return total


def test_an_attacker_hurts_nobody(
    guarded: RunningGateway,
    chatty_server: TritonServer,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
) -> None:
    url = chatty_server.endpoints.metrics_url
    restarts = metric(url, "fastserve_worker_restarts_total")
    alone = asyncio.run(honest_load(guarded, 60.0 if is_long else 5.0))
    with attacking(guarded.url, KEYS["mallory"]) as counts:
        attacked = asyncio.run(honest_load(guarded, 300.0 if is_long else 15.0))
    wait_until_idle(chatty_server.endpoints)
    row(
        {
            "attacks": counts.sent.total(),
            "answers": dict(counts.statuses.most_common()),
            "P95 alone, s": f"{alone.p95_s:.3f}",
            "P95 beside it, s": f"{attacked.p95_s:.3f}",
            "gateway's peak, MiB": f"{attacked.peak_mib:.0f}",
        }
    )
    assert guarded.process.poll() is None
    assert metric(url, "fastserve_worker_restarts_total") == restarts
    assert attacked.peak_mib < MOST_MIB
    assert len(counts.sent) == len(KINDS) if is_long else counts.sent
    assert "415" not in counts.statuses  # the gateway has read the attacks


async def test_an_endless_template_holds_up_nobody_else(guarded: RunningGateway) -> None:
    async def chat(name: str, content: str) -> httpx2.Response:
        return await http.post(
            f"{guarded.api_url}/chat/completions",
            json={
                "model": MODEL_NAME,
                "max_tokens": 1,
                "messages": [message | {"content": content}],
            },
            headers={"Authorization": f"Bearer {KEYS[name]}"},
        )

    message = {"role": "user"}
    async with httpx2.AsyncClient(timeout=DEADLINE_S) as http:
        endless = [asyncio.create_task(chat("mallory", ENDLESS)) for _ in range(6)]
        await asyncio.wait(endless, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(3):
            assert (await chat("alice", "x")).status_code == 200
        assert not all(one.done() for one in endless)
        for answer in await asyncio.gather(*endless):
            assert answer.status_code == 400
            assert "exceeds 2 s of processor time" in answer.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_what_a_kind_of_attack_costs(
    guarded: RunningGateway,
    chatty_server: TritonServer,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
    kind: str,
) -> None:
    if not is_long:
        pytest.skip("measures for minutes: --endurance")
    gateway = [psutil.Process(guarded.process.pid)]
    root = psutil.Process(chatty_server.pid)
    server = [root, *root.children(recursive=True)]
    before_s = busy_s(gateway), busy_s(server)
    with ExitStack() as stack:
        if kind != "none":
            counts = stack.enter_context(attacking(guarded.url, KEYS["mallory"], [kind]))
        attacked = asyncio.run(honest_load(guarded, KIND_S))
        gateway_s, server_s = busy_s(gateway) - before_s[0], busy_s(server) - before_s[1]
    wait_until_idle(chatty_server.endpoints)
    row(
        {
            "attacks": 0 if kind == "none" else counts.sent.total(),
            "answers": {} if kind == "none" else dict(counts.statuses.most_common()),
            "P50 beside it, s": f"{statistics.median(attacked.seconds):.3f}",
            "P95 beside it, s": f"{attacked.p95_s:.3f}",
            "cores, gateway": f"{gateway_s / KIND_S:.2f}",
            "cores, server": f"{server_s / KIND_S:.2f}",
        }
    )
