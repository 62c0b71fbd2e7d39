"""Two servers behind gateways: where jobs go, and what happens when a server is lost or full."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from gateway_thread import gateway_thread
from lone_gateway import settings
from running_gateway import running_gateway
from serving_client import GrpcStream, metric, unfinished_jobs, wait_until_idle
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

RESTART_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 60.0
RUNNING, QUEUED = 2, 6
"""Most jobs of a server that run, and most that are unfinished."""
SHORT: dict[str, Any] = {
    "model": "fastserve", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True,
}  # fmt: skip
LONG = {**SHORT, "max_tokens": 800, "stream": True}
RETRIED = "fastserve_gateway_jobs_retried_total"
IGNORE_EOS = {"ignore_eos": True}
DONE = "data: [DONE]"
LOST = 'data: {"error":{"message":"the model server takes no requests now; try again later",'


class Replicas:
    """The servers, each on a core of its own and on ports that stay the same."""

    def __init__(self, config: EngineConfig, log_path: Path) -> None:
        self._config = config
        self._log_path = log_path
        self._servers = [self._server(number, 0, 0, 0) for number in range(2)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._start, range(2)))

    def __getitem__(self, number: int) -> TritonServer:
        return self._servers[number]

    def url(self, number: int) -> str:
        return f"grpc://{self[number].endpoints.grpc_url}"

    def restart(self, number: int) -> None:
        """Drains one server, as SIGTERM does, and starts another one in its place."""
        old = self[number]
        old.stop()
        ports = old.endpoints.http_port, old.endpoints.grpc_port, old.endpoints.metrics_port
        self._servers[number] = self._server(number, *ports)
        with ThreadPoolExecutor() as pool:
            pool.submit(self._start, number).result()

    def stop(self) -> None:
        with ThreadPoolExecutor() as pool:
            list(pool.map(TritonServer.stop, self._servers))

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


@dataclass(frozen=True)
class Front:
    """A gateway to all replicas."""

    url: str
    replicas: Replicas

    def of_server(self, name: str, number: int) -> float:
        try:
            return metric(f"{self.url}/metrics", name, server=self.replicas.url(number))
        except KeyError:
            return 0.0

    def sent(self) -> Counter[int]:
        """Jobs by server."""
        name = "fastserve_gateway_jobs_sent_total"
        return Counter({number: int(self.of_server(name, number)) for number in range(2)})

    def is_up(self, number: int) -> bool:
        return self.of_server("fastserve_gateway_server_up", number) == 1

    def wait_until_up(self) -> None:
        wait_for(lambda: self.is_up(0) and self.is_up(1), RESTART_TIMEOUT_S)

    def picture(self, number: int) -> dict[str, Any]:
        """The state of one server."""
        url = f"{self.url}/live/events?model=fastserve&server={number}"
        with httpx2.stream("GET", url, timeout=REQUEST_TIMEOUT_S) as events:
            data = next(line for line in events.iter_lines() if line.startswith("data: "))
        picture: dict[str, Any] = json.loads(data.removeprefix("data: "))
        return picture

    def has_waiting_jobs(self, number: int) -> bool:
        picture = self.picture(number)
        return bool(picture["running"] == RUNNING and picture["waiting"])

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


@pytest.fixture(scope="module")
def replicas(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    config = tiny_config.with_keys(
        policy="fcfs", max_num_seqs=RUNNING, max_queued_requests=QUEUED, prefix_caching=True
    )
    running = Replicas(config, tmp_path_factory.mktemp("replicas"))
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def front(replicas: Replicas) -> Iterator[Front]:
    urls = [replicas.url(number) for number in range(2)]
    with gateway_thread(replace(settings(), urls=urls)) as gateway:
        front = Front(gateway.url, replicas)
        front.wait_until_up()
        yield front


def prompt_about(topic: str) -> str:
    return f"A long story about {topic}. " * 40


class Streams:
    """Streams of a gateway, each read by a thread."""

    def __init__(self, front: Front, number: int, **fields: Any) -> None:
        self._front = front
        self._fields = {**LONG, **fields}
        self._begun = threading.Semaphore(0)
        self._pool = ThreadPoolExecutor(2 * QUEUED)
        self._reads: list[Future[str]] = []
        self.start(number)

    def start(self, number: int = 1) -> None:
        for _ in range(number):
            self._reads.append(self._pool.submit(self._read, len(self._reads)))

    def wait_until_begun(self, number: int) -> None:
        for _ in range(number):
            assert self._begun.acquire(timeout=REQUEST_TIMEOUT_S)

    def end(self) -> tuple[int, int]:
        """How many end as they should, and how many because their server is lost."""
        with self._pool:
            last_events = [read.result() for read in self._reads]
        done = last_events.count(DONE)
        lost = sum(event.startswith(LOST) for event in last_events)
        assert done + lost == len(last_events), last_events
        return done, lost

    def _read(self, number: int) -> str:
        url = f"{self._front.url}/v1/completions"
        body = {**self._fields, "prompt": f"{number} is a number"}
        last = ""
        with httpx2.stream("POST", url, json=body, timeout=REQUEST_TIMEOUT_S) as response:
            for line in filter(None, response.iter_lines()):
                if not last:
                    self._begun.release()
                last = line
        return last


# --- where jobs go --------------------------------------------------------------------------------


def test_jobs_spread_over_the_servers(front: Front) -> None:
    before = front.sent()
    assert Streams(front, 2 * QUEUED, max_tokens=100).end() == (2 * QUEUED, 0)
    spread = front.sent() - before
    assert min(spread[0], spread[1]) >= RUNNING


@pytest.mark.parametrize("topic", ["boats", "trees", "soup"])
def test_a_prompt_goes_where_its_beginning_is(front: Front, topic: str) -> None:
    prompt = prompt_about(topic)
    number = front.server_of(prompt=prompt)
    before = front.sent()
    answer = front.complete(prompt=f"{prompt} And so on.").json()
    assert list((front.sent() - before).elements()) == [number]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("session", ["a", "b", "c"])
def test_a_session_stays_with_its_server(front: Front, session: str) -> None:
    """Its prompts are as long as each other, but begin differently."""
    servers = {
        front.server_of(session_id=session, prompt=f"{turn} {session}. " * 200) for turn in range(3)
    }
    assert len(servers) == 1


def test_gateways_work_side_by_side(front: Front, replicas: Replicas, tmp_path: Path) -> None:
    """Both together fill the servers, though neither knows what the other sends."""
    other_url = ("--url", replicas.url(1))
    with running_gateway(replicas.url(0), tmp_path / "gateway.log", *other_url) as gateway:
        other = Front(gateway.url, replicas)
        other.wait_until_up()
        streams = [Streams(one, QUEUED, max_tokens=100) for one in (front, other)]
        assert [one.end() for one in streams] == [(QUEUED, 0)] * 2
        # Long enough that a few tokens, which may wait at one server, do not decide.
        turn = {"session_id": "shared", "prompt": prompt_about("sharing")}
        session = front.server_of(**turn)
        assert other.complete(**turn).status_code == 200
        assert front.server_of(**turn) == session


# --- servers that are full or lost ----------------------------------------------------------------


def test_a_full_server_is_passed_over(front: Front, replicas: Replicas) -> None:
    """Its queue is filled behind the gateway's back, and a session's next turn would go there."""
    turn = {"session_id": "full", "prompt": prompt_about("queues")}
    first = front.server_of(**turn)
    second = 1 - first
    with ExitStack() as stack:

        def fill(endpoints: Endpoints) -> None:
            for _ in range(QUEUED):
                job = GrpcStream(
                    endpoints.grpc_url, IGNORE_EOS, text_input="a", max_tokens=3000, stream=True
                )
                stack.callback(job.cancel)
            wait_for(lambda: unfinished_jobs(endpoints.metrics_url) == QUEUED)

        fill(replicas[first].endpoints)
        before = front.sent()
        assert front.complete(**turn).status_code == 200
        assert (front.sent() - before)[second] == 1
        assert front.is_up(first)
        fill(replicas[second].endpoints)
        answer = front.complete(**turn)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert "Retry-After" in answer.headers
    for number in range(2):
        wait_until_idle(replicas[number].endpoints)


def test_a_server_that_hangs_gets_nothing_until_it_goes_on(
    front: Front, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session goes on at the other server meanwhile."""
    monkeypatch.setattr("fastserve_gateway.fleet.watched_server.SILENT_S", 1.0)
    turn = {"session_id": "hung", "prompt": prompt_about("clocks")}
    hung = front.server_of(**turn)
    os.kill(replicas[hung].pid, signal.SIGSTOP)
    try:
        wait_for(lambda: not front.is_up(hung))
        assert front.server_of(**turn) == 1 - hung
    finally:
        os.kill(replicas[hung].pid, signal.SIGCONT)
    front.wait_until_up()


def test_a_server_that_is_stopped_and_started_again_costs_no_request(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastserve_gateway")
    done = threading.Event()

    def send_jobs() -> Counter[int]:
        statuses: Counter[int] = Counter()
        while not done.is_set():
            statuses[front.complete(max_tokens=16).status_code] += 1
        return statuses

    with ThreadPoolExecutor() as pool:
        senders = [pool.submit(send_jobs) for _ in range(RUNNING)]
        streams = Streams(front, RUNNING, max_tokens=300)
        streams.wait_until_begun(RUNNING)
        front.replicas.restart(0)
        front.wait_until_up()
        done.set()
        assert {status for sender in senders for status in sender.result()} == {200}
    assert streams.end() == (RUNNING, 0)
    before = front.sent()
    assert Streams(front, 2 * QUEUED, max_tokens=100).end() == (2 * QUEUED, 0)
    assert front.sent()[0] > before[0]
    changes = [text for text in caplog.messages if text.startswith(front.replicas.url(0))]
    assert [text.split(": ")[1] for text in changes][-2:] == ["down", "up"]


# --- what operators see ---------------------------------------------------------------------------


def test_the_live_view_shows_each_server(front: Front) -> None:
    url = f"{front.url}/live"
    servers = httpx2.get(f"{url}/servers").json()["servers"]
    assert servers == [{"model": "fastserve", "server": number} for number in range(2)]
    totals = [front.picture(number)["totals"]["iterations"] for number in range(2)]
    assert totals[0] != totals[1]
    assert httpx2.get(f"{url}/events?server=2").status_code == 400


def test_what_a_lost_server_had_not_begun_goes_to_the_other(front: Front) -> None:
    """The last test: it leaves one server."""
    num_streams = 2 * RUNNING + 2
    streams = Streams(front, num_streams, max_tokens=1200)
    streams.wait_until_begun(RUNNING)
    lost = next(number for number in cycle(range(2)) if front.has_waiting_jobs(number))
    retried = front.of_server(RETRIED, lost)
    os.kill(front.replicas[lost].pid, signal.SIGKILL)
    wait_for(lambda: not front.is_up(lost))
    assert streams.end() == (num_streams - RUNNING, RUNNING)
    assert front.of_server(RETRIED, lost) > retried
    assert httpx2.get(f"{front.url}/health").status_code == 200
