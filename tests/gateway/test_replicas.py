"""Two servers behind gateways: where jobs go, and what happens when a server is lost or full."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.liveness import ProcessLife
from replicas import QUEUED, REQUEST_TIMEOUT_S, RUNNING, SHORT, Front, Replicas, running_replicas
from running_gateway import running_gateway
from running_server import job_held, rank_stopped
from serving_client import (
    GrpcStream,
    generate,
    unfinished_jobs,
    wait_until_idle,
)
from waiting import wait_for

ATTEMPTS = 10
LONG = {**SHORT, "max_tokens": 800, "stream": True}
RETRIED = "fastserve_gateway_jobs_retried_total"
MOVED = "fastserve_gateway_jobs_moved_total"
IGNORE_EOS = {"ignore_eos": True}
DONE = "data: [DONE]"
LOST = 'data: {"error":{"message":"the model server takes no requests now; try again later",'


@pytest.fixture(scope="module")
def replicas(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    config = tiny_config.with_keys(
        policy="fcfs", max_num_seqs=RUNNING, max_queued_requests=QUEUED, prefix_caching=True
    )
    with running_replicas(config, tmp_path_factory.mktemp("replicas")) as running:
        yield running


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers do not notice that a server or its model's process hangs, and restart nothing."""
    monkeypatch.setattr(ProcessLife, "find_fault", lambda life, sign: None)


@pytest.fixture(autouse=True)
def at_rest(front: Front) -> None:
    """The test before may have killed a server, and what the gateway knows of loads may be old."""
    front.wait_until_up()
    wait_for(front.is_idle)


def prompt_about(topic: str) -> str:
    return f"A long story about {topic}. " * 40


class Streams:
    """Streams of a gateway, each read by a thread."""

    def __init__(self, front: Front, number: int, **fields: Any) -> None:
        self._front = front
        self._fields = {**LONG, **fields}
        self.num_begun = 0
        self._counting = threading.Lock()
        self._pool = ThreadPoolExecutor(2 * QUEUED)
        self._reads: list[Future[str]] = []
        self.start(number)

    def start(self, number: int = 1) -> None:
        for _ in range(number):
            self._reads.append(self._pool.submit(self._read, len(self._reads)))

    @property
    def number(self) -> int:
        return len(self._reads)

    def wait_until_begun(self, number: int) -> None:
        wait_for(lambda: self.num_begun >= number, REQUEST_TIMEOUT_S)

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
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if not last:
                    with self._counting:
                        self.num_begun += 1
                last = line
        return last


# --- where jobs go --------------------------------------------------------------------------------


def spread_jobs(front: Front) -> Counter[int]:
    """Sends as many jobs as the servers have places for; returns how many each server gets."""
    before = front.sent()
    with front.replicas.held():  # else a server might end its jobs before the next ones come
        streams = Streams(front, 2 * QUEUED, max_tokens=100)
        wait_for(lambda: front.replicas.num_unfinished() == 2 * QUEUED)
    assert streams.end() == (2 * QUEUED, 0)
    return front.sent() - before


@pytest.mark.usefixtures("patient")
def test_jobs_spread_over_the_servers(front: Front) -> None:
    spread = spread_jobs(front)
    assert min(spread[0], spread[1]) >= RUNNING


@pytest.mark.parametrize("topic", ["boats", "trees", "soup"])
def test_a_prompt_goes_where_its_beginning_is(front: Front, topic: str) -> None:
    prompt = prompt_about(topic)
    number = front.server_of(prompt=prompt)

    def is_kept() -> bool:
        before = front.sent()
        answer = front.complete(prompt=f"{prompt} And so on.").json()
        assert list((front.sent() - before).elements()) == [number]
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    # A request that comes at once may find that the job before it still has its blocks.
    wait_for(is_kept)


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


@pytest.mark.usefixtures("patient")
def test_a_full_server_is_passed_over(front: Front, replicas: Replicas) -> None:
    """Its queue is filled behind the gateway's back, and a session's next turn would go there."""
    turn = {"session_id": "full", "prompt": prompt_about("queues")}
    first = front.server_of(**turn)
    second = 1 - first
    with ExitStack() as stack:

        def fill(server: TritonServer) -> None:
            endpoints = server.endpoints
            stack.enter_context(rank_stopped(server.runtime))  # until the test's end
            for _ in range(QUEUED):
                job = GrpcStream(
                    endpoints.grpc_url, IGNORE_EOS, text_input="a", max_tokens=3000, stream=True
                )
                stack.callback(job.cancel)
            wait_for(lambda: unfinished_jobs(endpoints.metrics_url) == QUEUED)

        fill(replicas[first])
        before = front.sent()
        assert front.complete(**turn).status_code == 200
        assert (front.sent() - before)[second] == 1
        assert front.is_up(first)
        fill(replicas[second])
        answer = front.complete(**turn)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert "Retry-After" in answer.headers
    for number in range(2):
        wait_until_idle(replicas[number].endpoints)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("kind", ["server", "stub"])
def test_a_server_that_hangs_gets_nothing_until_it_goes_on(
    kind: str, front: Front, replicas: Replicas
) -> None:
    """Also a half-dead one, whose tritonserver says that it is ready. Its streams and a session go
    on at the other server.

    Not tritonserver alone hangs: its model's process would end 15 s later, and the launcher would
    start the server again, perhaps before the streams have ended.
    """
    turn = {"session_id": kind, "prompt": prompt_about("clocks")}
    hung = front.server_of(**turn)
    server = replicas[hung]
    processes = [server.pid] if kind == "server" else []
    pids = [pid for pid in (*processes, server.runtime.stub_pid()) if pid is not None]
    attempts: list[Streams] = []

    def start() -> Streams:
        """Fills the places of the server that is to hang."""
        for earlier in attempts:  # else these would fill the queue of the other server
            assert earlier.end() == (earlier.number, 0)
        attempts[:] = [Streams(front, 0, max_tokens=400)]
        streams, before = attempts[0], front.sent()
        while (sent := front.sent() - before)[hung] < RUNNING:
            streams.start()
            wait_for(lambda: (front.sent() - before).total() == streams.number)
        streams.wait_until_begun(RUNNING + min(sent[1 - hung], RUNNING))
        return streams

    moved = front.of_server(MOVED, hung)
    try:
        with job_held(server, start, RUNNING) as streams:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: not front.is_up(hung) and front.is_up(1 - hung))
        assert streams.end() == (streams.number, 0)
        assert front.of_server(MOVED, hung) == moved + RUNNING
        assert front.server_of(**turn) == 1 - hung
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    front.wait_until_up()


@pytest.mark.usefixtures("patient")
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
    wait_for(front.is_idle)
    assert spread_jobs(front)[0] > 0
    changes = [text for text in caplog.messages if text.startswith(front.replicas.url(0))]
    states = [text.split(": ")[1] for text in changes]  # it may be lost and found, too
    assert [state for state in states if state in ("down", "up")][-2:] == ["down", "up"]


# --- what operators see ---------------------------------------------------------------------------


def test_the_live_view_shows_each_server(front: Front) -> None:
    url = f"{front.url}/live"
    servers = httpx2.get(f"{url}/servers", timeout=REQUEST_TIMEOUT_S).json()["servers"]
    assert servers == [{"model": "fastserve", "server": number} for number in range(2)]

    def iterations() -> list[int]:
        return [front.picture(number)["totals"]["iterations"] for number in range(2)]

    before = iterations()
    assert generate(front.replicas[1].endpoints.grpc_url, text_input="a", max_tokens=2).text
    wait_for(lambda: iterations()[1] > before[1])
    assert iterations()[0] == before[0]
    assert httpx2.get(f"{url}/events?server=2", timeout=REQUEST_TIMEOUT_S).status_code == 400


@pytest.mark.usefixtures("patient")
def test_what_a_lost_server_had_goes_to_the_other(front: Front) -> None:
    num_streams = 2 * RUNNING + 2
    with ExitStack() as held:
        for _ in range(ATTEMPTS):
            streams = Streams(front, num_streams, max_tokens=1200)
            streams.wait_until_begun(RUNNING)
            held.enter_context(front.replicas.held())
            lost = front.replicas.find_with_waiting_jobs(num_streams, streams.num_begun)
            if lost is not None:
                break
            held.close()  # some have ended, or just begin
            assert streams.end() == (num_streams, 0)
        assert lost is not None
        retried, moved = (front.of_server(name, lost) for name in (RETRIED, MOVED))
        os.kill(front.replicas[lost].pid, signal.SIGKILL)
        wait_for(lambda: not front.is_up(lost))
    assert streams.end() == (num_streams, 0)
    assert front.of_server(RETRIED, lost) > retried
    assert front.of_server(MOVED, lost) == moved + RUNNING
    assert httpx2.get(f"{front.url}/health", timeout=REQUEST_TIMEOUT_S).status_code == 200
