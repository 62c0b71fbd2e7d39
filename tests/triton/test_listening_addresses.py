"""A host by name and by IPv6 address: all three ports listen there."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient
from tiny_model import START_TIMEOUT_S, engine_options


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("localhost", "127.0.0.1"),
        pytest.param(
            "::1", "[::1]", marks=pytest.mark.skipif(not has_ipv6(), reason="has no IPv6")
        ),
    ],
)
def test_all_ports_listen(tiny_model: Path, tmp_path: Path, host: str, address: str) -> None:
    config = EngineConfig().with_keys(**engine_options(tiny_model))
    server = TritonServer(
        config, host=host, http_port=0, grpc_port=0, metrics_port=0, log_path=tmp_path / "log"
    )
    try:
        server.start(START_TIMEOUT_S)
        endpoints = server.endpoints
        assert endpoints.grpc_url.rpartition(":")[0] == address
        for url in (f"grpc://{endpoints.grpc_url}", endpoints.http_url):
            with FastServeClient(url) as client:
                assert client.generate("Hello", max_tokens=3, ignore_eos=True).token_ids
        assert "fastserve_jobs" in httpx.get(endpoints.metrics_url).text
    finally:
        server.stop()
