"""The header that both launcher and stub know. The launcher imports no numpy."""

from __future__ import annotations

GRPC_STATUS_HEADER = "triton_grpc_error"
"""Header of a gRPC stream that wants errors as the status of the call. Servers before 26.04 forward
it as a request parameter, because they need such a stream answered in another way."""
