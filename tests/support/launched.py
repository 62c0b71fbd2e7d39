"""Servers that a test starts for itself, by a launcher in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.serving.runtime import RuntimeDirectory
from running_server import running_server
from serving_client import GENERATE, post
from tiny_model import START_TIMEOUT_S
from waiting import wait_for

SERVE = """
import sys
from pathlib import Path
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer, serve

def on_ready():
    print(server.runtime.path, server.endpoints.http_port, flush=True)
    print(server.endpoints.grpc_port, server.endpoints.metrics_port, flush=True)

config = EngineConfig.from_yaml(Path(sys.argv[1]))
log_path = Path(sys.argv[2])
server = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
sys.exit(serve(server, on_ready))
"""


@contextmanager
def leaving_nothing() -> Iterator[list[tuple[RuntimeDirectory, Endpoints]]]:
    """The block adds the servers that it started. At its end they must have left nothing."""
    started: list[tuple[RuntimeDirectory, Endpoints]] = []
    yield started
    for runtime, endpoints in started:
        wait_for(lambda runtime=runtime: not runtime.processes())
        wait_for(lambda runtime=runtime: not runtime.path.exists())
        assert not list(Path("/dev/shm").glob(f"{runtime.shared_memory_prefix}*"))
        # Others may have taken the ports since then.
        ports = {endpoints.http_port, endpoints.grpc_port, endpoints.metrics_port}
        assert not ports & listening_ports(psutil.Process())


@contextmanager
def server_leaving_nothing(config: EngineConfig, directory: Path) -> Iterator[TritonServer]:
    """Runs a server, which must have left nothing at the end. ``directory`` gets its log."""
    with (
        leaving_nothing() as started,
        running_server(config, directory / "server.log") as server,
    ):
        started.append((server.runtime, server.endpoints))
        yield server


@contextmanager
def launched_alone(
    config: EngineConfig, directory: Path
) -> Iterator[tuple[subprocess.Popen[str], RuntimeDirectory, Endpoints]]:
    """A launcher in a process of its own, which the block ends. It must then have left nothing.

    Args:
        directory: gets the configuration and the log.
    """
    config_path = directory / "engine.yaml"
    config_path.write_text(config.to_yaml(), encoding="utf-8")
    with leaving_nothing() as started:
        launcher = start_launcher(config_path, directory / "server.log")
        runtime, endpoints = server_of(launcher)
        started.append((runtime, endpoints))
        yield launcher, runtime, endpoints


def listening_ports(process: psutil.Process) -> set[int]:
    """TCP ports on which the process or one of its descendants listens."""
    ports: set[int] = set()
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # it has just ended
            connections = one.net_connections("tcp")
            ports |= {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    return ports


def start_server(config: EngineConfig, log_path: Path) -> TritonServer:
    server = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    server.start(START_TIMEOUT_S)
    return server


def start_launcher(
    config_path: Path, log_path: Path, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVE, str(config_path), str(log_path)]
    environment = os.environ | dict(variables or {})
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def server_of(launcher: subprocess.Popen[str]) -> tuple[RuntimeDirectory, Endpoints]:
    assert launcher.stdout is not None
    path, http_port = launcher.stdout.readline().split()
    grpc_port, metrics_port = launcher.stdout.readline().split()
    endpoints = Endpoints("127.0.0.1", int(http_port), int(grpc_port), int(metrics_port))
    return RuntimeDirectory(Path(path)), endpoints


def is_serving(server: TritonServer, restarts: int) -> bool:
    """Whether the server answers after at least this many restarts."""
    if server.restarts < restarts:
        return False
    try:
        body = {"text_input": "hello", "max_tokens": 1}
        return post(server.endpoints.http_url, GENERATE, body).status_code == 200
    except httpx2.TransportError:
        return False
