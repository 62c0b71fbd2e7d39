"""A server whose log has no room serves."""

from __future__ import annotations

from pathlib import Path

from fastserve_backend.config import EngineConfig
from fastserve_client import FastServeClient
from running_server import running_server


def test_a_server_whose_log_has_no_room_answers_all_the_same(tiny_config: EngineConfig) -> None:
    with (
        running_server(tiny_config, Path("/dev/full")) as server,
        FastServeClient(server.endpoints.grpc_url) as client,
    ):
        for _ in range(3):
            assert len(client.generate("Hi", max_tokens=8, ignore_eos=True).token_ids) == 8
        assert server.restarts == 0
