"""Answers whose server is lost in the middle go on at the other one, as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from opinionated_model import save_opinionated_model
from replicas import REQUEST_TIMEOUT_S, Front, Replicas, running_replicas
from tiny_model import engine_options
from waiting import wait_for

ATTEMPTS = 10
MOVED = "fastserve_gateway_jobs_moved_total"
NOT_MOVED = "fastserve_gateway_moves_failed_total"
NUM_TOKENS = 400

LONG: dict[str, Any] = {
    "model": "fastserve", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
TEXT = {**LONG, "prompt": "Once upon a time"}
CHAT = {**LONG, "messages": [{"role": "user", "content": "Tell me a story"}]}
SEEDED = {"seed": 7, "temperature": 1.2, "top_p": 0.95}
GREEDY = {"temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    "text, greedy": {**TEXT, **GREEDY, "frequency_penalty": 0.5, "logprobs": 2},
    "text, seeded": {**TEXT, **SEEDED, "repetition_penalty": 1.1, "min_tokens": 390},
    "text, random": {**TEXT, "echo": True},
    "text, whole": {**TEXT, **SEEDED, "stream": False, "stream_options": None},
    "chat, greedy": {**CHAT, **GREEDY, "presence_penalty": 0.5},
    "chat, seeded": {**CHAT, **SEEDED, "logprobs": True, "top_logprobs": 2},
    "chat, grammar": {
        **CHAT, **SEEDED, "ignore_eos": None,
        "structured_output": {"regex": r"(\d{3}-[a-f]){60,90}"},
    },
    "chat, two choices": {**CHAT, **SEEDED, "n": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Their tokens are bytes, so many of them are parts of characters."""
    model = save_opinionated_model(tmp_path_factory.mktemp("model"), {})
    config = EngineConfig().with_keys(**engine_options(model))
    with running_replicas(config, tmp_path_factory.mktemp("replicas")) as running:
        yield running


@pytest.fixture(autouse=True)
def at_rest(front: Front) -> None:
    front.wait_until_up()
    wait_for(front.is_idle)


class Asked:
    """Requests that run at the same time."""

    def __init__(self, front: Front, bodies: Sequence[dict[str, Any]]) -> None:
        self.num_begun = 0
        self._counting = threading.Lock()
        self._front = front
        self._pool = ThreadPoolExecutor(len(bodies))
        self._answers: list[Future[Any]] = [self._pool.submit(self._read, body) for body in bodies]

    def wait_until_begun(self, number: int) -> None:
        wait_for(lambda: self.num_begun >= number, REQUEST_TIMEOUT_S)

    def answers(self) -> list[Any]:
        with self._pool:
            return [answer.result(REQUEST_TIMEOUT_S) for answer in self._answers]

    def _read(self, body: dict[str, Any]) -> Any:
        route = "completions" if "prompt" in body else "chat/completions"
        url = f"{self._front.url}/v1/{route}"
        if not body["stream"]:
            answer = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S).json()
            return joined([answer])
        events = []
        with httpx2.stream("POST", url, json=body, timeout=REQUEST_TIMEOUT_S) as response:
            for line in filter(None, response.iter_lines()):
                if not events:
                    with self._counting:
                        self.num_begun += 1
                events.append(line.removeprefix("data: "))
        assert events.pop() == "[DONE]", events[-1:]
        return joined([json.loads(event) for event in events])


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the client gets of one answer, without its id and times."""
    assert len({event["id"] for event in events}) == 1
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    tokens: list[Any] = []
    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            part = choice.get("delta", choice.get("message", choice))
            text = part.get("text", part.get("content")) or ""
            texts[index] = texts.get(index, "") + text
            found = choice.get("logprobs") or {}
            tokens += found.get("content") or ()
            tokens += zip(found.get("tokens", ()), found.get("token_logprobs", ()), strict=True)
            if choice["finish_reason"] is not None:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    usage = {**events[-1]["usage"], "prompt_tokens_details": None}
    logprobs: list[float] = []
    return {
        "texts": texts,
        "ends": ends,
        "usage": usage,
        "tokens": without_numbers(tokens, logprobs),
        "logprobs": logprobs,
    }


def without_numbers(value: Any, numbers: list[float]) -> Any:
    """The value without its real numbers, which go to ``numbers``."""
    if isinstance(value, list | tuple):
        return [without_numbers(one, numbers) for one in value]
    if isinstance(value, dict):
        return {name: without_numbers(one, numbers) for name, one in value.items()}
    if isinstance(value, float):
        numbers.append(value)
        return None
    return value


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
    assert {**found, "logprobs": None} == {**expected, "logprobs": None}


def lose_a_server(
    front: Front, bodies: Sequence[dict[str, Any]], pid_of: Callable[[TritonServer], int]
) -> list[Any]:
    """The answers to all of ``bodies``. A process of a server is killed in the middle of some."""
    num_streams = sum(body["stream"] for body in bodies)
    for _ in range(ATTEMPTS):
        asked = Asked(front, bodies)
        asked.wait_until_begun(num_streams)
        num_moved = sum(front.of_server(MOVED, server) for server in range(2))
        with front.replicas.held():
            kill_busiest(front, pid_of)
        answers = asked.answers()
        if sum(front.of_server(MOVED, server) for server in range(2)) > num_moved:
            return answers
        front.wait_until_up()
    raise AssertionError(f"the answers were too short {ATTEMPTS} times")


def kill_busiest(front: Front, pid_of: Callable[[TritonServer], int]) -> None:
    server = max(range(2), key=lambda number: front.replicas.num_jobs(number, "running"))
    os.kill(pid_of(front.replicas[server]), signal.SIGKILL)
    wait_for(lambda: not front.is_up(server))


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    "pid_of",
    [lambda server: server.pid, lambda server: server.runtime.stub_pid()],
    ids=["tritonserver", "the model's process"],
)
def test_answers_outlive_their_server(front: Front, pid_of: Callable[[TritonServer], int]) -> None:
    bodies = list(BODIES.values())
    expected = Asked(front, bodies).answers()
    found = lose_a_server(front, bodies, pid_of)
    for name, before, after in zip(BODIES, expected, found, strict=True):
        if name == "text, random":
            assert after["usage"] == before["usage"]
        else:
            check_same(after, before)
    assert all(front.of_server(NOT_MOVED, server) == 0 for server in range(2))


@pytest.mark.slow
def test_an_upgrade_of_all_servers_loses_no_stream(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server is drained for less time than the answers take, and started again."""
    monkeypatch.setattr("fastserve_backend.serving.process.DRAIN_TIMEOUT_S", 1)
    monkeypatch.setattr("fastserve_backend.serving.process._SILENT_DRAIN_S", 0.2)
    kinds = BODIES["text, seeded"], BODIES["chat, seeded"]
    bodies = [{**kind, "seed": seed, "max_tokens": 2000} for seed in range(2) for kind in kinds]
    expected = Asked(front, bodies).answers()
    num_moved = sum(front.of_server(MOVED, server) for server in range(2))
    done = threading.Event()

    def ask_on() -> int:
        num_asked = 0
        while not done.is_set():
            for after, before in zip(Asked(front, bodies).answers(), expected, strict=True):
                check_same(after, before)
            num_asked += len(bodies)
        return num_asked

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_on)
        for server in range(2):
            front.replicas.restart(server)
            front.wait_until_up()
        done.set()
        assert asking.result() >= len(bodies)
    assert sum(front.of_server(MOVED, server) for server in range(2)) > num_moved
    assert all(front.of_server(NOT_MOVED, server) == 0 for server in range(2))
