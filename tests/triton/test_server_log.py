"""A server whose log or disk has no room serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_client import FastServeClient
from running_server import rank_pid, running_server
from serving_client import metric
from small_disk import fill, small_disk
from waiting import wait_for

DISK_BYTES = 16 << 20
TIER_GIB = 4 / 1024
RESTARTS = "fastserve_worker_restarts_total"


def test_a_server_whose_log_has_no_room_answers_all_the_same(tiny_config: EngineConfig) -> None:
    with (
        running_server(tiny_config, Path("/dev/full")) as server,
        FastServeClient(server.endpoints.grpc_url) as client,
    ):
        for _ in range(3):
            assert len(client.generate("Hi", max_tokens=8, ignore_eos=True).token_ids) == 8
        assert server.restarts == 0


@pytest.mark.parametrize("log_is_there", [False, True])
def test_a_disk_that_is_full_while_the_server_runs_ends_nothing(
    tiny_config: EngineConfig, tmp_path: Path, log_is_there: bool
) -> None:
    with small_disk(tmp_path / "small", DISK_BYTES) as disk:
        log_path = (disk if log_is_there else tmp_path) / "server.log"
        config = tiny_config.with_keys(disk_swap_dir=str(disk), disk_swap_gib=TIER_GIB)
        with (
            running_server(config, log_path) as server,
            FastServeClient(server.endpoints.grpc_url) as client,
        ):
            fill(disk)

            def answer(session: int) -> tuple[int, ...]:
                name = f"session-{session}"
                made = client.generate(
                    "Hi", max_tokens=8, ignore_eos=True, temperature=0.0, session_id=name
                )
                return made.token_ids

            expected = answer(0)
            assert all(answer(session) == expected for session in range(4))
            # The next rank finds no room for its sessions.
            os.kill(rank_pid(server.runtime), signal.SIGKILL)
            fill(disk)
            wait_for(lambda: metric(server.endpoints.metrics_url, RESTARTS) == 1)
            assert all(answer(session) == expected for session in range(4))
            assert server.restarts == 0
        if not log_is_there:
            assert log_path.read_text(encoding="utf-8").count("No space left on device") <= 1
