"""Addresses of a server, checked before anything slow starts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from fastserve_client.listening import ListenError, PortBusy, listen, numeric_address

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

    def claim(self) -> Endpoints:
        """Listen on each port for a moment, because the server itself would find a busy port only
        after the model has loaded.

        Returns:
            The endpoints with free ports in place of zeros, and with an address in place of a
            host's name, which the server's HTTP would not look up.

        Raises:
            PortInUseError: names the port and the flag that changes it.
            LaunchError: ``host`` is not an address of this machine, or a port is invalid.
        """
        wanted = (
            (self.http_port, "http-port"),
            (self.grpc_port, "grpc-port"),
            (self.metrics_port, "metrics-port"),
        )
        try:
            host = numeric_address(self.host)
            # All ports stay open until the last is found, or two zeros could get the same port.
            with ExitStack() as held:
                listeners = [held.enter_context(listen(host, *one)) for one in wanted]
                return Endpoints(host, *(one.getsockname()[1] for one in listeners))
        except PortBusy as error:
            raise PortInUseError(str(error)) from None
        except ListenError as error:
            raise LaunchError(str(error)) from None

    def _authority(self, port: int) -> str:
        host = self.reachable_host
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
