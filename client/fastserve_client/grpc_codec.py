"""Requests and responses of the model as KServe v2 protobuf messages.

The messages are built and read directly. ``tritonclient``'s ``InferInput`` and ``InferResult`` go
through numpy arrays, a detour for responses that hold one token.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2

from fastserve_client.request import InferRequest
from fastserve_client.response import Outputs, unreadable


def encode_request(request: InferRequest) -> Any:
    """A ``ModelInferRequest``."""
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.request_id)
    for name, value in request.inputs.items():
        if isinstance(value, bool):
            datatype, length, raw = "BOOL", 1, struct.pack("<?", value)
        elif isinstance(value, str):
            data = value.encode("utf-8")
            datatype, length, raw = "BYTES", 1, struct.pack("<I", len(data)) + data
        else:
            datatype, length, raw = "INT32", len(value), _little_endian(value)
        message.inputs.add(name=name, datatype=datatype, shape=[length])
        message.raw_input_contents.append(raw)
    return message


def _little_endian(values: Sequence[int]) -> bytes:
    if isinstance(values, array) and sys.byteorder == "little":  # quicker for a million of them
        return values.tobytes()
    return struct.pack(f"<{len(values)}i", *values)


def is_last(response: Any) -> bool:
    """Whether a ``ModelInferResponse`` is the last one. The server then ends the call."""
    name = "triton_final_response"
    return name in response.parameters and bool(response.parameters[name].bool_param)


def decode_response(response: Any) -> Outputs:
    """The outputs of a ``ModelInferResponse``.

    Raises:
        ServerError: it cannot be read.
    """
    try:
        return {
            output.name: _DECODERS[output.datatype](raw)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
    except (KeyError, ValueError, struct.error) as error:
        raise unreadable(response.model_name, error) from error


def _decode_strings(raw: bytes) -> list[str]:
    strings = []
    position = 0
    while position < len(raw):
        (length,) = struct.unpack_from("<I", raw, position)
        position += 4
        if position + length > len(raw):
            raise ValueError("a string is longer than its tensor")
        strings.append(raw[position : position + length].decode("utf-8"))
        position += length
    return strings


def _decode_int32(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)


def _decode_uint32(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def _decode_int64(raw: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(raw) // 8}q", raw)


def _decode_fp32(raw: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(raw) // 4}f", raw)


_DECODERS: dict[str, Any] = {
    "BYTES": _decode_strings,
    "INT32": _decode_int32,
    "UINT32": _decode_uint32,
    "INT64": _decode_int64,
    "FP32": _decode_fp32,
}
