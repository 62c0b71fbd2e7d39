"""Whether this process sends traces: OpenTelemetry's environment variables say so.

Nothing of OpenTelemetry is imported unless they name an endpoint.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fastserve_client.errors import ClientError

if TYPE_CHECKING:
    from fastserve_client.tracer import Tracer

# The first that is set counts.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"


class TracesError(ClientError):
    """The environment asks for traces that cannot be sent."""


def open_tracer(service_name: str) -> Tracer | None:
    """The tracer that the environment asks for. None: it names no endpoint, or disables traces.

    Args:
        service_name: of the spans, unless the environment has another one.

    Raises:
        TracesError: OpenTelemetry is not installed, or the endpoint or protocol cannot be used.
    """
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if variable is None or _is_disabled():
        return None
    endpoint = os.environ[variable]
    if not endpoint.startswith(("http://", "https://")):
        raise TracesError(f"{variable}: got {endpoint!r}; must begin with http:// or https://")
    for name in _PROTOCOLS:
        protocol = os.environ.get(name, _PROTOCOL)
        if protocol != _PROTOCOL:
            raise TracesError(f"{name}: got {protocol!r}; traces are sent as {_PROTOCOL} only")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from fastserve_client.tracer import Tracer
    except ModuleNotFoundError as error:
        raise TracesError(
            f"{variable} is set, but {error}; pip install '.[traces]', or unset the variable"
        ) from None
    return Tracer(service_name, OTLPSpanExporter(), endpoint)


def _is_disabled() -> bool:
    return (
        os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none"
    )
