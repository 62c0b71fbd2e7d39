"""A test's own tritonserver on free ports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from tiny_model import START_TIMEOUT_S


@contextmanager
def running_server(config: EngineConfig, log_path: Path) -> Iterator[TritonServer]:
    """Runs a server that has generated a token when the block begins, and is gone after it."""
    server = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log_path)
    server.start(START_TIMEOUT_S)
    try:
        yield server
    finally:
        server.stop()
