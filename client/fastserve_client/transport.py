"""What the clients need of gRPC and HTTP, and which of the two a URL names."""

from __future__ import annotations

from typing import Protocol

from fastserve_client.endpoint import Endpoint
from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs


class Call(Protocol):
    """A running request: an iterator over its responses.

    Iterating raises ClientError. After ``cancel`` it ends, or raises RequestCancelled.
    """

    def __next__(self) -> Outputs: ...

    def cancel(self) -> None:
        """Ends the job on the server; idempotent, and from any thread or signal handler."""


class Transport(Protocol):
    """The connection of a synchronous client; thread-safe. Connects at the first request."""

    @property
    def only_streams(self) -> bool:
        """True if a job that does not stream could not be cancelled."""

    def start(self, request: InferRequest, timeout_s: float | None) -> Call:
        """Sends the request; the call ends with RequestTimeout after ``timeout_s``."""

    def is_ready(self, model: str, timeout_s: float) -> bool: ...

    def close(self) -> None:
        """Cancels running requests. Iterating over them raises RequestCancelled."""


class AioCall(Protocol):
    """Like ``Call``. Cancelling the task that waits for a response cancels the call."""

    async def __anext__(self) -> Outputs: ...

    def cancel(self) -> None:
        """Ends the job on the server. Call it from the event loop's thread."""


class AioTransport(Protocol):
    """Like ``Transport``, for the event loop in which it is made."""

    @property
    def only_streams(self) -> bool: ...

    def start(self, request: InferRequest, timeout_s: float | None) -> AioCall: ...

    async def is_ready(self, model: str, timeout_s: float) -> bool: ...

    async def close(self) -> None: ...


# Each is imported only if a URL asks for it: HTTP needs no gRPC, whose import takes a while.


def open_transport(endpoint: Endpoint) -> Transport:
    if endpoint.uses_http:
        from fastserve_client.http_transport import HttpTransport

        return HttpTransport(endpoint)
    from fastserve_client.grpc_transport import GrpcTransport

    return GrpcTransport(endpoint)


def open_aio_transport(endpoint: Endpoint) -> AioTransport:
    if endpoint.uses_http:
        from fastserve_client.http_aio_transport import AioHttpTransport

        return AioHttpTransport(endpoint)
    from fastserve_client.grpc_aio_transport import AioGrpcTransport

    return AioGrpcTransport(endpoint)
