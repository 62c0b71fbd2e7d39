"""A server is killed in the middle of many streams, with another one beside it and alone: each
stream goes on, and has the same tokens as without the kill.

`make endurance` has 64 streams, `make test-all` eight. `make test` moves answers of more kinds, see
test_moved_answers.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from gateway_thread import gateway_thread
from lone_gateway import settings
from replicas import Front, running_replicas
from same_answers import Ask, Asked, check_same
from tiny_model import START_TIMEOUT_S

MANY_STREAMS, FEW_STREAMS = 64, 8
MANY_TOKENS, FEW_TOKENS = 800, 300
BLOCK_TOKENS = 16
MOVED = "fastserve_gateway_jobs_moved_total"
NOT_MOVED = "fastserve_gateway_moves_failed_total"
ATTEMPTS = 5


@pytest.mark.repeated
@pytest.mark.parametrize("num_servers", [2, 1])
def test_all_streams_outlive_their_server(
    num_servers: int,
    chatty_config: EngineConfig,
    tmp_path: Path,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # On a busy machine a server may take long to start.
    monkeypatch.setattr("fastserve_gateway.fleet.kept_answer.MOVE_DEADLINE_S", START_TIMEOUT_S)
    number = MANY_STREAMS if is_long else FEW_STREAMS
    num_tokens = MANY_TOKENS if is_long else FEW_TOKENS
    config = chatty_config.with_keys(
        max_model_len=MANY_TOKENS + BLOCK_TOKENS,
        max_num_seqs=MANY_STREAMS,
        device_blocks=MANY_STREAMS * (MANY_TOKENS // BLOCK_TOKENS + 2),
    )
    body = {
        "model": "fastserve", "prompt": "Hello", "ignore_eos": True, "max_tokens": num_tokens,
        "stream": True, "stream_options": {"include_usage": True}, "temperature": 1.2,
    }  # fmt: skip
    asks = [Ask("completions", {**body, "seed": seed}) for seed in range(number)]
    with running_replicas(config, tmp_path, num_servers) as replicas:
        urls = [replicas.url(server) for server in range(num_servers)]
        with gateway_thread(replace(settings(), urls=urls)) as gateway:
            front = Front(gateway.url, replicas)
            front.wait_until_up()
            expected = Asked(front.url, asks).answers()
            for attempt in range(ATTEMPTS):
                with replicas.slow(attempt):
                    asked = Asked(front.url, asks)
                    asked.wait_until_begun(number)
                with replicas.held():
                    pid = replicas[0].pid
                    assert pid is not None
                    os.kill(pid, signal.SIGKILL)
                found = asked.answers()
                if front.of_all(MOVED):
                    break
                front.wait_until_up()  # all had ended
            for after, before in zip(found, expected, strict=True):
                check_same(after, before)
            num_moved = front.of_all(MOVED)
            assert num_moved > 0
            assert front.of_all(NOT_MOVED) == 0
    row({"servers": num_servers, "streams": number, "moved": int(num_moved), "same": len(found)})
