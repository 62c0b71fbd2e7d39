"""Errors of starting and supervising a tritonserver."""

from __future__ import annotations

from fastserve_backend.errors import FastServeError


class LaunchError(FastServeError):
    """The server could not be started, or could not be kept running. The message is one for the
    operator: it says why and, where there is one, the remedy."""


class PortInUseError(LaunchError):
    """Another process listens on a port that the server needs.

    Attributes:
        port: the busy TCP port.
    """

    def __init__(self, purpose: str, host: str, port: int, reason: str) -> None:
        super().__init__(
            f"{purpose}-port: cannot listen on {host}:{port} ({reason}); choose another one with "
            f"--{purpose}-port, or 0 for any free port"
        )
        self.port = port


class ModelLoadError(LaunchError):
    """The server runs, but the model refused to load; starting again would change nothing."""
