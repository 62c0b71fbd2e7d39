"""The model's process is killed repeatedly under load: clients get errors, the server is soon back,
and nothing is left behind.

`make endurance` kills it ten times, `make test-all` once. `make test` kills it under one stream,
see test_life_cycle.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.system import restart_limit
from launched import is_serving, server_leaving_nothing
from running_server import job_held
from serving_client import GrpcStream
from waiting import wait_for

KILLS = 10
STREAMS, SEATS = 16, 8
ERROR_S, READY_S = 3.0, 15.0
DEADLINE_S = 120.0


@pytest.mark.repeated
def test_the_stub_is_killed_under_load(
    tiny_config: EngineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
) -> None:
    kills = KILLS if is_long else 1
    monkeypatch.setattr(restart_limit, "_MAX_RESTARTS", kills)
    error_s = ready_s = 0.0
    with server_leaving_nothing(tiny_config, tmp_path) as server:
        prefix = server.runtime.shared_memory_prefix
        num_names = len(names(prefix))
        for number in range(kills):
            with job_held(server, partial(load, server), STREAMS) as streams:
                killed_s = time.monotonic()
                os.kill(server.runtime.stub_pid(), signal.SIGKILL)
                for stream in streams:
                    assert stream.until_error(DEADLINE_S)
                error_s = max(error_s, time.monotonic() - killed_s)
            for stream in streams:
                stream.cancel()
            wait_for(lambda number=number: is_serving(server, number + 1), DEADLINE_S)
            ready_s = max(ready_s, time.monotonic() - killed_s)
            wait_for(lambda: len(names(prefix)) == num_names)
        assert server.restarts == kills
    if is_long:
        assert error_s <= ERROR_S
        assert ready_s <= READY_S
    row(
        {
            "kills": kills,
            "streams at each": STREAMS,
            "the last error after, s": round(error_s, 1),
            "answers again after, s": round(ready_s, 1),
            "names left in /dev/shm": len(names(prefix)),
        }
    )


def names(prefix: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{prefix}*"))


def load(server: TritonServer) -> list[GrpcStream]:
    """Sends as many jobs as run at once, and as many more, which wait."""
    streams = [
        GrpcStream(
            server.endpoints.grpc_url, text_input="a", stream=True, max_tokens=3500, ignore_eos=True
        )
        for _ in range(STREAMS)
    ]
    for stream in streams[:SEATS]:
        stream.first_token()
    return streams
