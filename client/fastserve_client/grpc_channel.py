"""What both gRPC transports share: the channel, its method, and its errors."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import ClientError, error_from_status

_OPTIONS = (
    # A prompt or a response can exceed gRPC's default limit of 4 MiB. The server has limits.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # By default a channel that lost its server tries again after 1 s, then later and later.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # In spite of its name: how long an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 10_000),
    # A host that vanished closes no connection. The connection breaks if data is not acknowledged
    # for this long: with keepalive, gRPC makes this the socket's TCP_USER_TIMEOUT too.
    ("grpc.keepalive_timeout_ms", 10_000),
    # Where nothing is sent, pings find out. By default a gRPC server hangs up on a client that
    # pings a silent stream more often than every 5 minutes.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.http2.max_pings_without_data", 0),
)

END_S = 1.0
"""How long to wait for the end of a call whose last response has come.

It comes at once, and must not be cut short. If a call is cancelled in that moment, tritonserver
24.10 keeps it for ever, with some 25 kB, and can then not unload the model. So such a call is left
to its end, and the channel stays open for it.
"""


def open_channel(api: Any, endpoint: Endpoint, *more_options: tuple[str, Any]) -> Any:
    """A channel of ``api``, which is ``grpc`` or ``grpc.aio``; it connects at the first call."""
    options = (*_OPTIONS, *more_options)
    if not endpoint.uses_tls:
        return api.insecure_channel(endpoint.target, options=options)
    credentials = grpc.ssl_channel_credentials(_system_roots())
    return api.secure_channel(endpoint.target, credentials, options=options)


def stream_method(channel: Any) -> Any:
    """``ModelStreamInfer`` for one request a call, as gRPC's method of that kind.

    On the wire this is the bidirectional method, with a client that half-closes after its only
    request. The server closes its side after the last response, so no final marker is needed. To
    gRPC, request and end are then one operation. It needs no task or thread of its own, and its
    failure does not hide the call's status. (A bidirectional call of grpc.aio that ends while it
    sends, by its deadline for example, says INTERNAL, or that it was cancelled.)
    """
    return channel.unary_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )


def status_error(url: str, error: grpc.RpcError) -> ClientError:
    """The error for the status with which a call ended."""
    return error_from_status(url, error.code().name, error.details() or "")


def _system_roots() -> bytes | None:
    # The certificates that OpenSSL trusts, so that SSL_CERT_FILE works here as for HTTP. None if
    # the system has no single file of them: gRPC then takes its own.
    path = ssl.get_default_verify_paths().cafile
    return None if path is None else Path(path).read_bytes()
