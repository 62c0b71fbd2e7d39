"""All three ports listen on a host given by name or IPv6 address. Errors name an unusable
address."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.errors import LaunchError, OldTritonError, PortInUseError
from fastserve_backend.serving.installation import TritonInstallation
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.public_host import check_public_host
from fastserve_client import FastServeClient
from serving_client import ANSWER_TIMEOUT_S
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
        assert "fastserve_jobs" in httpx2.get(endpoints.metrics_url, timeout=ANSWER_TIMEOUT_S).text
    finally:
        server.stop()


@pytest.mark.parametrize("purpose", ["http", "grpc", "metrics"])
def test_busy_port_is_named_before_anything_starts(purpose: str, tiny_config: EngineConfig) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, f"{purpose}_port": port}
        message = rf"^{purpose}-port: cannot listen on .*:{port} .* with --{purpose}-port, or 0"
        with pytest.raises(PortInUseError, match=message):
            TritonServer(tiny_config, **ports).start()


def test_an_old_server_listens_for_others_only_if_told_to(
    tiny_config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OldTritonError, match=r"^host: got 0\.0\.0\.0 with tritonserver 24\.10"):
        TritonServer(tiny_config, host="0.0.0.0", http_port=0, grpc_port=0, metrics_port=0).start()
    check_public_host("0.0.0.0", TritonInstallation.find(), True)
    assert "without any authentication" in caplog.text


@pytest.mark.parametrize("port", [-1, 65536, 10**20])
def test_no_port_is_taken_for_another(port: int, tiny_config: EngineConfig) -> None:
    with pytest.raises(LaunchError, match=f"^grpc-port: got {port}; must be 0 to 65535"):
        TritonServer(tiny_config, grpc_port=port).start()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "192.0.2.1"])
def test_a_host_that_is_not_this_machine_is_an_error(host: str, tiny_config: EngineConfig) -> None:
    with pytest.raises(LaunchError, match=rf"host: got {host!r}; .*; choose .* with --host"):
        TritonServer(tiny_config, host=host).start()
