"""Addresses of a server, checked before anything slow starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from fastserve_client.listening import PORTS, HostError, listen, numeric_address

from fastserve_backend.serving.errors import LaunchError, PortInUseError

_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Endpoints:
    """Where a server listens. Ports are TCP ports; 0 stands for any free one until ``claim``."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def reachable_host(self) -> str:
        """``host``, or loopback where the server listens on all interfaces."""
        return _WILDCARD_HOSTS.get(self.host, self.host)

    @property
    def http_url(self) -> str:
        return f"http://{self._authority(self.http_port)}"

    @property
    def grpc_url(self) -> str:
        """``host:port``, as tritonclient wants it."""
        return self._authority(self.grpc_port)

    @property
    def metrics_url(self) -> str:
        return f"http://{self._authority(self.metrics_port)}/metrics"

    def claim(self) -> Endpoints:
        """Listens on each port for a moment; returns the endpoints with free ports for zeros, and
        with an address for the name of a host, which the server's HTTP would not look up.

        The server itself would find a busy port only after the model has loaded.

        Raises:
            PortInUseError: names the port and the flag that changes it.
            LaunchError: ``host`` is not an address of this machine.
        """
        try:
            host = numeric_address(self.host)
        except HostError as error:
            raise LaunchError(str(error)) from None
        # All are held until the last is found: two zeros must not get the same port.
        with ExitStack() as held:
            http, grpc, metrics = (
                _listen(purpose, host, port, held)
                for purpose, port in (
                    ("http", self.http_port),
                    ("grpc", self.grpc_port),
                    ("metrics", self.metrics_port),
                )
            )
        return Endpoints(host, http, grpc, metrics)

    def _authority(self, port: int) -> str:
        host = self.reachable_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(purpose: str, host: str, port: int, held: ExitStack) -> int:
    if port not in PORTS:
        raise LaunchError(f"{purpose}_port: got {port}; must be 0 to 65535")
    try:
        probe = held.enter_context(listen(host, port))
    except HostError as error:
        raise LaunchError(str(error)) from None
    except OSError as error:
        raise PortInUseError(purpose, host, port, str(error.strerror)) from None
    free_port: int = probe.getsockname()[1]
    return free_port
