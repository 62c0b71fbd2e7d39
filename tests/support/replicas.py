"""Servers of one model, mostly two, and a gateway in front of them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from running_server import rank_stopped, slow_rank
from serving_client import metric, settle, unfinished_jobs
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

RESTART_TIMEOUT_S = 120.0
REQUEST_TIMEOUT_S = 120.0
RUNNING, QUEUED = 2, 6
"""Most jobs of a server that run, and most that are unfinished."""
SHORT: dict[str, Any] = {
    "model": "fastserve", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True,
}  # fmt: skip


class Replicas:
    """The servers, each on a core of its own and on ports that stay the same."""

    def __init__(self, config: EngineConfig, log_path: Path, number: int) -> None:
        self._config = config
        self._log_path = log_path
        self._servers = [self._server(number, 0, 0, 0) for number in range(number)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._start, range(number)))

    def __len__(self) -> int:
        return len(self._servers)

    def __getitem__(self, number: int) -> TritonServer:
        return self._servers[number]

    def url(self, number: int) -> str:
        return f"grpc://{self[number].endpoints.grpc_url}"

    def restart(self, number: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Drains one server, as SIGTERM does, and starts another one in its place.

        Args:
            meanwhile: called while there is none.
        """
        old = self[number]
        ports = old.endpoints.http_port, old.endpoints.grpc_port, old.endpoints.metrics_port
        # The claim goes from the old server to the new one, or others could get the ports between.
        with old._claimed.pop_all(), ThreadPoolExecutor() as pool:
            old.stop()
            meanwhile()
            self._servers[number] = self._server(number, *ports)
            pool.submit(self._start, number).result()

    def stop(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(TritonServer.stop, self._servers))

    @contextmanager
    def held(self) -> Iterator[None]:
        """No job of any server ends during the block, and none shows its state."""
        with ExitStack() as held:
            for server in self._servers:
                held.enter_context(rank_stopped(server.runtime))
            yield

    @contextmanager
    def slow(self, attempt: int) -> Iterator[None]:
        """The ranks are the slower, the more attempts there were before. A reader may be far slower
        than they are, and take answers that have ended for ones that have just begun."""
        with ExitStack() as slowed:
            for server in self._servers:
                slowed.enter_context(slow_rank(server.runtime, 2 ** min(attempt, 5) - 1))
            yield

    def num_unfinished(self) -> float:
        return sum(unfinished_jobs(server.endpoints.metrics_url) for server in self._servers)

    def num_jobs(self, number: int, state: str) -> float:
        return metric(self[number].endpoints.metrics_url, "fastserve_jobs", state=state)

    def find_with_waiting_jobs(self, num_jobs: int, num_begun: int) -> int | None:
        """A server with jobs that wait, if all others of ``num_jobs`` have begun or ended; for
        servers that are held."""
        for server in self._servers:
            settle(server.endpoints)
        num_running = sum(self.num_jobs(number, "running") for number in range(len(self)))
        if num_begun != num_jobs - self.num_unfinished() + num_running:
            return None
        for number in range(len(self)):
            if self.num_jobs(number, "running") == RUNNING and self.num_jobs(number, "waiting"):
                return number
        return None

    def _server(self, number: int, http: int, grpc: int, metrics: int) -> TritonServer:
        log_path = self._log_path / f"server{number}.log"
        return TritonServer(
            self._config, http_port=http, grpc_port=grpc, metrics_port=metrics, log_path=log_path
        )

    def _start(self, number: int) -> None:
        """On a thread, whose core its processes inherit."""
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[number % len(cores)]})
        self[number].start(START_TIMEOUT_S)


@contextmanager
def running_replicas(config: EngineConfig, log_path: Path, number: int = 2) -> Iterator[Replicas]:
    running = Replicas(config, log_path, number)
    try:
        yield running
    finally:
        running.stop()


@dataclass(frozen=True)
class Front:
    """A gateway to all replicas."""

    url: str
    replicas: Replicas

    @property
    def _numbers(self) -> range:
        return range(len(self.replicas))

    def of_server(self, name: str, number: int) -> float:
        try:
            return metric(f"{self.url}/metrics", name, server=self.replicas.url(number))
        except KeyError:
            return 0.0

    def of_all(self, name: str) -> float:
        return sum(self.of_server(name, number) for number in self._numbers)

    def sent(self) -> Counter[int]:
        """Jobs by server."""
        name = "fastserve_gateway_jobs_sent_total"
        return Counter({number: int(self.of_server(name, number)) for number in self._numbers})

    def is_up(self, number: int) -> bool:
        if len(self.replicas) == 1:  # the metric is for several servers
            return httpx2.get(f"{self.url}/health", timeout=REQUEST_TIMEOUT_S).is_success
        return self.of_server("fastserve_gateway_server_up", number) == 1

    def wait_until_up(self) -> None:
        wait_for(lambda: all(map(self.is_up, self._numbers)), RESTART_TIMEOUT_S)

    def picture(self, number: int) -> dict[str, Any]:
        """The state of one server."""
        url = f"{self.url}/live/events?model=fastserve&server={number}"
        with httpx2.stream("GET", url, timeout=REQUEST_TIMEOUT_S) as events:
            data = next(line for line in events.iter_lines() if line.startswith("data: "))
        picture: dict[str, Any] = json.loads(data.removeprefix("data: "))
        return picture

    def is_idle(self) -> bool:
        pictures = map(self.picture, self._numbers)
        return not any(one["running"] + one["waiting"] + one["swapped"] for one in pictures)

    def complete(self, **fields: Any) -> httpx2.Response:
        url = f"{self.url}/v1/completions"
        return httpx2.post(url, json={**SHORT, **fields}, timeout=REQUEST_TIMEOUT_S)

    def server_of(self, **fields: Any) -> int:
        """The server that answers a request with these fields."""
        before = self.sent()
        answer = self.complete(**fields)
        assert answer.status_code == 200, answer.text
        (number,) = (self.sent() - before).elements()
        return number
