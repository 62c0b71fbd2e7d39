"""A gateway on a thread of the test's own process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from fastserve_gateway.app import create_app
from fastserve_gateway.command import GatewayServer
from fastserve_gateway.settings import GatewaySettings

DEADLINE_S = 60.0


@dataclass(frozen=True)
class GatewayThread:
    server: GatewayServer
    address: tuple[str, int]
    _running: Future[None]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address[1]}"

    def stop(self) -> None:
        """Ends the gateway, and returns when it has ended."""
        self.server.should_exit = True
        self._running.result(DEADLINE_S)


@contextmanager
def gateway_thread(
    settings: GatewaySettings, drain_timeout_s: float = 1.0
) -> Iterator[GatewayThread]:
    """Accepts connections when the block begins, and has ended when it is left."""
    server = GatewayServer(create_app(settings), drain_timeout_s=drain_timeout_s)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.run, [listener])
        gateway = GatewayThread(server, listener.getsockname(), running)
        try:
            yield gateway
        finally:
            gateway.stop()
