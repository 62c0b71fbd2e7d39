"""Beside a tenant that attacks, no honest request fails, nothing restarts, and memory is bounded.

`make endurance` has five minutes of it, `make test` seconds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import psutil
import pytest
from attacker import ENDLESS, KINDS, Counts, attacking
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from running_gateway import RunningGateway, running_gateway
from serving_client import metric, wait_until_idle

DEADLINE_S = 120.0
REQUESTS_PER_S, TOKENS = 4.0, 12
ROUNDS = 5
"""Honest requests are alone and beside the attacker in turns. So what else runs on the machine
delays both alike."""
ALONE_S, ATTACKED_S, SHORT_S = 12.0, 60.0, 2.5
"""How long a turn is: alone, beside the attacker, and either in a short run."""
KIND_ROUNDS, KIND_S = 3, 8.0
"""Of each kind of attack alone."""
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

    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0

    @property
    def p50_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p95_s(self) -> float:
        return statistics.quantiles(self.seconds, n=20)[-1]


@dataclass
class Turns:
    """Honest tenants alone, and beside the attacker."""

    alone: Honest = field(default_factory=Honest)
    attacked: Honest = field(default_factory=Honest)
    counts: Counts = field(default_factory=Counts)
    cores: dict[str, float] = field(default_factory=dict)
    """What gateway, server and attacker used on the average beside the attacker."""

    def columns(self) -> dict[str, object]:
        alone, attacked = self.alone, self.attacked
        return {
            "attacks": self.counts.sent.total(),
            "answers": ", ".join(f"{status} × {n}" for status, n in self.answers),
            "P50 alone, ms": f"{1e3 * alone.p50_s:.0f}",
            "beside it": f"{1e3 * attacked.p50_s:.0f}",
            "P95 alone, ms": f"{1e3 * alone.p95_s:.0f}",
            "P95 beside it": f"{1e3 * attacked.p95_s:.0f}",
            "ratio": f"{attacked.p95_s / alone.p95_s:.2f}",
            **{f"cores, {name}": f"{cores:.2f}" for name, cores in self.cores.items()},
        }

    @property
    def answers(self) -> list[tuple[str, int]]:
        return self.counts.statuses.most_common()


def in_turns(
    gateway: RunningGateway,
    server: TritonServer,
    rounds: int,
    alone_s: float,
    attacked_s: float,
    kinds: Sequence[str] = (),
) -> Turns:
    turns = Turns()
    root = psutil.Process(server.pid)
    processes = {
        "gateway": [psutil.Process(gateway.process.pid)],
        "server": [root, *root.children(recursive=True)],
    }
    used_s = dict.fromkeys(processes, 0.0)
    passed_s = 0.0
    for number in range(rounds):
        asyncio.run(honest_load(gateway, alone_s, turns.alone))
        with attacking(gateway.url, KEYS["mallory"], kinds, seed=number) as counts:
            before_s = {name: busy_s(them) for name, them in processes.items()}
            began_s = time.monotonic()
            asyncio.run(honest_load(gateway, attacked_s, turns.attacked))
            passed_s += time.monotonic() - began_s
            for name, them in processes.items():
                used_s[name] += busy_s(them) - before_s[name]
        turns.counts.add(counts)
        wait_until_idle(server.endpoints)
    used_s["attacker"] = turns.counts.busy_s
    turns.cores = {name: seconds / passed_s for name, seconds in used_s.items()}
    return turns


async def honest_load(gateway: RunningGateway, seconds: float, honest: Honest) -> None:
    """Alice and Bob ask in turn, at a steady rate, and check each answer."""
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
        honest.seconds.append(time.monotonic() - began_s)

    loop = asyncio.get_running_loop()
    started_s = loop.time()
    async with (
        httpx2.AsyncClient(timeout=DEADLINE_S) as http,
        asyncio.TaskGroup() as group,
    ):
        for number in range(round(seconds * REQUESTS_PER_S)):
            await asyncio.sleep(started_s + number / REQUESTS_PER_S - loop.time())
            honest.peak_mib = max(honest.peak_mib, process.memory_info().rss / 2**20)
            group.create_task(ask(http, number))


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
    if is_long:
        turns = in_turns(guarded, chatty_server, ROUNDS, ALONE_S, ATTACKED_S)
    else:
        turns = in_turns(guarded, chatty_server, 1, SHORT_S, 3 * SHORT_S)
    peak_mib = max(turns.alone.peak_mib, turns.attacked.peak_mib)
    row({**turns.columns(), "gateway's peak, MiB": f"{peak_mib:.0f}"})
    assert guarded.process.poll() is None
    assert metric(url, "fastserve_worker_restarts_total") == restarts
    assert peak_mib < MOST_MIB
    assert len(turns.counts.sent) == len(KINDS) if is_long else turns.counts.sent
    assert "415" not in turns.counts.statuses  # the gateway has read the attacks


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


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_of_attack_costs(
    guarded: RunningGateway,
    chatty_server: TritonServer,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
    kind: str,
) -> None:
    if not is_long:
        pytest.skip("measures for minutes: --endurance")
    row(in_turns(guarded, chatty_server, KIND_ROUNDS, KIND_S, KIND_S, [kind]).columns())
