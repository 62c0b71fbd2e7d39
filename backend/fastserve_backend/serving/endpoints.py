"""Addresses of a server, checked before anything slow starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fastserve_client.listening import ListenError, PortBusy, numeric_address, reserve

from fastserve_backend.serving.errors import LaunchError, PortInUseError

_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True)
class Endpoints:
    """Where a server listens. Ports are TCP ports; 0 is any free port until ``claim``."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def reachable_host(self) -> str:
        """``host``, or loopback if the server listens on all interfaces."""
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

    @contextmanager
    def claim(self) -> Iterator[Endpoints]:
        """Reserve the ports during the block, because the server itself listens only after the
        model has loaded. Then only a process that asks for one of these numbers can take it.

        Yields:
            The endpoints with free ports in place of zeros, and with an address in place of a
            host's name, which the server's HTTP would not look up.

        Raises:
            PortInUseError: names the port and the flag that changes it.
            LaunchError: ``host`` is not an address of this machine, a port is invalid, or two are
                the same.
        """
        wanted = (
            (self.http_port, "http-port"),
            (self.grpc_port, "grpc-port"),
            (self.metrics_port, "metrics-port"),
        )
        with ExitStack() as held:
            try:
                host = numeric_address(self.host)
                reserved = [held.enter_context(reserve(host, *one)) for one in wanted]
            except PortBusy as error:
                raise PortInUseError(str(error)) from None
            except ListenError as error:
                raise LaunchError(str(error)) from None
            ports = [one.getsockname()[1] for one in reserved]
            if len(set(ports)) < len(ports):
                got = ", ".join(map(str, ports))
                raise LaunchError(f"http-port, grpc-port, metrics-port: got {got}; must differ")
            yield Endpoints(host, *ports)

    def _authority(self, port: int) -> str:
        host = self.reachable_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
