"""Whether this process sends traces: OpenTelemetry's environment variables say so.

Nothing of OpenTelemetry is imported unless they name an endpoint.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastserve_client.endpoint import without_keys
from fastserve_client.errors import ClientError

if TYPE_CHECKING:
    from fastserve_client.tracer import Tracer

# The first that is set counts.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_HEADERS = ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")


class TracesError(ClientError):
    """The environment asks for traces that cannot be sent."""


def open_tracer(service_name: str) -> Tracer | None:
    """The tracer that the environment asks for. None: it names no endpoint, or disables traces.

    Args:
        service_name: of the spans, unless the environment has another one.

    Raises:
        TracesError: OpenTelemetry is not installed, or one of its variables cannot be used. The
            message has no key of the collector.
    """
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None or _is_disabled():
        return None
    destination = _check_endpoint(variable, os.environ[variable])
    for name in _PROTOCOLS:
        protocol = os.environ.get(name) or _PROTOCOL
        if protocol != _PROTOCOL:
            raise TracesError(f"{name}: got {protocol!r}; traces are sent as {_PROTOCOL} only")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from fastserve_client.tracer import Tracer
    except ModuleNotFoundError as error:
        raise TracesError(
            f"{variable} is set, but {error}; pip install '.[traces]', or unset the variable"
        ) from None
    _check_headers()
    try:
        return Tracer(service_name, OTLPSpanExporter(), destination)
    except ValueError as error:
        raise TracesError(f"a variable of OpenTelemetry cannot be used: {error}") from None


def _check_endpoint(variable: str, endpoint: str) -> str:
    """Returns the endpoint as the log shows it."""
    shown = without_keys(endpoint)
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or too large
        is_usable = False
    if not is_usable:
        allowed = "must begin with http:// or https://, and name a host"
        raise TracesError(f"{variable}: got {shown!r}; {allowed}")
    return shown


def _check_headers() -> None:
    """OpenTelemetry would leave out a malformed header, and log it: mostly the collector's key."""
    from opentelemetry.util.re import parse_env_headers

    logging.getLogger("opentelemetry.util").setLevel(logging.CRITICAL)
    for name in _HEADERS:
        headers = filter(str.strip, os.environ.get(name, "").split(","))
        if not all(parse_env_headers(header, liberal=True) for header in headers):
            raise TracesError(f"{name}: must be NAME=VALUE, separated by commas, in ASCII")


def _is_disabled() -> bool:
    return (
        os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none"
    )
