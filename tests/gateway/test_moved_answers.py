"""Answers whose server is lost in the middle go on as if nothing had happened: at the other server,
or at the same one when its launcher has started it again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from matrices import rounds
from replicas import Front, Replicas, running_replicas
from running_server import rank_stopped
from same_answers import Ask, Asked, check_same
from serving_client import settle
from tiny_model import engine_options
from tool_model import END_OF_THOUGHT, save_tool_model
from waiting import wait_for

ATTEMPTS = 10
MOVED = "fastserve_gateway_jobs_moved_total"
NOT_MOVED = "fastserve_gateway_moves_failed_total"
NUM_TOKENS = 400

LONG: dict[str, Any] = {
    "model": "fastserve", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip
QUESTION = "Tell me a story"
ASKED = [{"role": "user", "content": QUESTION}]
TEXT = {**LONG, "prompt": "Once upon a time"}
CHAT = {**LONG, "messages": ASKED, "chat_template_kwargs": {"thinking": False}}
SEEDED = {"seed": 7, "temperature": 1.2, "top_p": 0.95}
GREEDY = {"temperature": 0}

CITY = "[a-z]{150,200}"
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "pattern": f"^{CITY}$"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}
# A few thoughts, and then calls.
CALLS = {"logit_bias": {str(END_OF_THOUGHT): 3.0}, "stream": True}
CALLING = {
    "chat/completions": {
        **LONG, **SEEDED, **CALLS, "ignore_eos": None, "messages": ASKED, "tool_choice": "required",
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in TOOLS.items()
        ],
    },
    "responses": {
        **SEEDED, **CALLS, "model": "fastserve", "max_output_tokens": NUM_TOKENS, "input": QUESTION,
        "tool_choice": "required",
        "tools": [
            {"type": "function", "name": name, "parameters": schema}
            for name, schema in TOOLS.items()
        ],
    },
    "messages": {
        **SEEDED, **CALLS, "model": "fastserve", "max_tokens": NUM_TOKENS, "messages": ASKED,
        "tool_choice": {"type": "any"},
        "tools": [{"name": name, "input_schema": schema} for name, schema in TOOLS.items()],
    },
}  # fmt: skip
ASKS = {
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
REQUESTS = {
    name: Ask("completions" if "prompt" in body else "chat/completions", body)
    for name, body in ASKS.items()
} | {f"calls, {route}": Ask(route, body) for route, body in CALLING.items()}


@pytest.fixture(scope="module", params=[2, 1], ids=["two servers", "one server"])
def replicas(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replicas]:
    """Their tokens are bytes, so many of them are parts of characters."""
    model = save_tool_model(tmp_path_factory.mktemp("model"))
    config = EngineConfig().with_keys(**engine_options(model))
    with running_replicas(config, tmp_path_factory.mktemp("replicas"), request.param) as running:
        yield running


@pytest.fixture(autouse=True)
def at_rest(front: Front) -> None:
    front.wait_until_up()
    wait_for(front.is_idle)


def lose_a_server(front: Front, pid_of: Callable[[TritonServer], int]) -> list[Any]:
    """The answers to all requests. A process of a server is killed in the middle of some."""
    asks = list(REQUESTS.values())
    for attempt in range(ATTEMPTS):
        with front.replicas.slow(attempt):
            asked = Asked(front.url, asks)
            asked.wait_until_begun(sum(ask.streams for ask in asks))
        num_moved = front.of_all(MOVED)
        with front.replicas.held():
            kill_busiest(front, pid_of)
        answers = asked.answers()
        if front.of_all(MOVED) > num_moved:
            return answers
        front.wait_until_up()
    raise AssertionError(f"the answers were too short {ATTEMPTS} times")


def kill_busiest(front: Front, pid_of: Callable[[TritonServer], int]) -> None:
    servers = range(len(front.replicas))
    server = max(servers, key=lambda number: front.replicas.num_jobs(number, "running"))
    os.kill(pid_of(front.replicas[server]), signal.SIGKILL)
    if len(servers) > 1:
        wait_for(lambda: not front.is_up(server))


@pytest.mark.usefixtures("patient")
@pytest.mark.one_of("pid_of")
@pytest.mark.parametrize(
    "pid_of",
    [lambda server: server.pid, lambda server: server.runtime.stub_pid()],
    ids=["tritonserver", "the model's process"],
)
def test_answers_outlive_their_server(front: Front, pid_of: Callable[[TritonServer], int]) -> None:
    expected = Asked(front.url, list(REQUESTS.values())).answers()
    for name, answer in zip(REQUESTS, expected, strict=True):
        if name.startswith("calls"):
            assert re.search(CITY, str(answer))
    found = lose_a_server(front, pid_of)
    for name, before, after in zip(REQUESTS, expected, found, strict=True):
        if name == "text, random":
            assert after["usage"] == before["usage"]
        else:
            check_same(after, before)
    assert front.of_all(NOT_MOVED) == 0


@pytest.mark.usefixtures("patient")
@pytest.mark.slow
def test_an_upgrade_of_all_servers_loses_no_stream(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each server is drained for less time than the answers take, and started again. Meanwhile the
    other one answers. `make test` upgrades one."""
    monkeypatch.setattr("fastserve_backend.serving.process.DRAIN_TIMEOUT_S", 0.1)
    monkeypatch.setattr("fastserve_backend.serving.process._SILENT_DRAIN_S", 0.05)
    # Each with a beginning of its own: the gateway sends the same ones to the same server.
    text, chat = REQUESTS["text, seeded"], REQUESTS["chat, seeded"]
    asks = [Ask(text.route, {**text.body, "prompt": f"{n} times upon a time"}) for n in range(4)]
    asks += [
        Ask(chat.route, {**chat.body, "messages": [{"role": "user", "content": f"{n} stories"}]})
        for n in range(4)
    ]
    expected = Asked(front.url, asks).answers()

    def check(asked: Asked) -> None:
        for after, before in zip(asked.answers(), expected, strict=True):
            check_same(after, before)

    def ask_others() -> None:
        if len(front.replicas) > 1:
            check(Asked(front.url, asks))

    for server in range(rounds(1, many=len(front.replicas))):
        for attempt in range(ATTEMPTS):
            num_moved = front.of_server(MOVED, server)
            with front.replicas.slow(attempt):
                asked = Asked(front.url, asks)
                asked.wait_until_begun(len(asks))
            with rank_stopped(front.replicas[server].runtime):
                settle(front.replicas[server].endpoints)
                if has_jobs := front.replicas.num_jobs(server, "running") > 0:
                    front.replicas.restart(server, ask_others)
            front.wait_until_up()
            check(asked)
            if has_jobs:
                assert front.of_server(MOVED, server) > num_moved
                break
        else:
            raise AssertionError(f"the server had no job {ATTEMPTS} times")
    assert front.of_all(NOT_MOVED) == 0
