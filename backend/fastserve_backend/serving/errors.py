"""Errors of starting and supervising a tritonserver."""

from __future__ import annotations

from fastserve_backend.errors import FastServeError


class LaunchError(FastServeError):
    """The server could not be started or kept running. The message is for the operator: it says why
    and, if there is one, the remedy."""


class PortInUseError(LaunchError):
    """Another process listens on a port that the server needs; the message names its flag."""


class OldTritonError(LaunchError):
    """Others would reach a tritonserver that any client can crash."""


class ModelLoadError(LaunchError):
    """The server runs, but the model failed to load or to answer. Another start would not help."""
