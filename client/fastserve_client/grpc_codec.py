"""Requests and responses of the model as KServe v2 protobuf messages.

The messages are built and read directly. ``tritonclient``'s ``InferInput`` and ``InferResult`` go
through numpy arrays, a detour for responses that hold one token.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tritonclient.grpc import service_pb2

from fastserve_client import protocol
from fastserve_client.errors import InvalidRequest, ServerError
from fastserve_client.options import Message, Prompt, encode_options
from fastserve_client.results import Chunk, PerfMetrics, TokenLogprob


def build_request(
    model: str,
    prompt: Prompt,
    options: Mapping[str, Any],
    *,
    stream: bool,
    perf_metrics: bool = False,
    request_id: str = "",
) -> Any:
    """A ``ModelInferRequest``.

    Raises:
        InvalidRequest: something that the wire cannot carry.
        TypeError: an unknown option.
    """
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    if isinstance(prompt, str):
        _add_text(request, protocol.TEXT_INPUT, prompt)
    elif prompt and isinstance(prompt[0], Mapping):
        _add_text(request, protocol.MESSAGES, _encode_messages(cast("Sequence[Message]", prompt)))
    else:
        _add_token_ids(request, cast("Sequence[int]", prompt))
    flags = {
        protocol.STREAM: stream,
        protocol.EXCLUDE_INPUT_IN_OUTPUT: True,
        protocol.RETURN_FINISH_REASON: True,
        protocol.RETURN_NUM_INPUT_TOKENS: True,
    }
    if options.get(protocol.LOGPROBS) is not None:
        flags[protocol.RETURN_LOGPROBS] = True
        flags[protocol.RETURN_CUMULATIVE_LOGPROB] = True
    if perf_metrics:
        flags[protocol.RETURN_PERF_METRICS] = True
    _add_text(request, protocol.SAMPLING_PARAMETERS, encode_options(options, flags))
    return request


def parse_response(response: Any) -> Chunk:
    """The ``Chunk`` in a ``ModelInferResponse``.

    Raises:
        ServerError: the response lacks an output that every response has, or cannot be read.
    """
    try:
        values = {
            output.name: _DECODERS[output.datatype](raw)
            for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        token_ids = tuple(values[protocol.OUTPUT_IDS])
        texts = values[protocol.TEXT_OUTPUT]
        logprobs = values.get(protocol.LOGPROBS_OUTPUT)
        return Chunk(
            text="".join(texts),
            token_ids=token_ids,
            finish_reason=_first(values, protocol.FINISH_REASON),
            num_input_tokens=_first(values, protocol.NUM_INPUT_TOKENS),
            logprobs=_parse_logprobs(logprobs[0]) if logprobs else (),
            cumulative_logprob=_first(values, protocol.CUMULATIVE_LOGPROB),
            perf=_parse_perf(values),
        )
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise ServerError(
            f"cannot read the response of model {response.model_name!r}: "
            f"{type(error).__name__}: {error}; is it a fastserve model of this version?"
        ) from error


def build_watch_request(model: str, interval_s: float) -> Any:
    """A ``ModelInferRequest`` for pictures of the engine; the server checks the interval.

    Raises:
        InvalidRequest: an interval that the wire cannot carry.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    try:
        raw = struct.pack("<i", round(interval_s * 1000))
    except (struct.error, ValueError, OverflowError):
        raise InvalidRequest(
            f"interval_s: got {interval_s!r}; must be a number of seconds"
        ) from None
    _add_tensor(request, protocol.WATCH_INTERVAL_MS, "INT32", 1, raw)
    _add_tensor(request, protocol.STREAM, "BOOL", 1, b"\x01")
    return request


def parse_engine_state(response: Any) -> str:
    """The JSON of the picture in a ``ModelInferResponse``.

    Raises:
        ServerError: there is none.
    """
    try:
        (output,), (raw,) = response.outputs, response.raw_output_contents
        if output.name != protocol.ENGINE_STATE:
            raise ValueError(f"output {output.name!r}")
        (text,) = _decode_strings(raw)
        return text
    except (ValueError, struct.error) as error:
        raise ServerError(
            f"cannot read the picture of model {response.model_name!r}: {error}; is it a "
            "fastserve model of this version?"
        ) from error


def _add_tensor(request: Any, name: str, datatype: str, length: int, raw: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[length])
    request.raw_input_contents.append(raw)


def _add_text(request: Any, name: str, text: str) -> None:
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name}: got text that is not Unicode (character {error.start}); must be valid UTF-8"
        ) from None
    _add_tensor(request, name, "BYTES", 1, struct.pack("<I", len(data)) + data)


def _encode_messages(messages: Sequence[Message]) -> str:
    try:
        return json.dumps([dict(message) for message in messages], ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{protocol.MESSAGES}: got a message that is no mapping of strings ({error}); each "
            "must have role and content"
        ) from None


def _add_token_ids(request: Any, token_ids: Sequence[int]) -> None:
    try:
        raw = struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise InvalidRequest(
            f"{protocol.INPUT_IDS}: got a value that is no token id ({error}); "
            "must be integers that fit 32 bits"
        ) from None
    _add_tensor(request, protocol.INPUT_IDS, "INT32", len(token_ids), raw)


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


def _first(values: Mapping[str, Any], name: str) -> Any:
    """The only element of an output of dims [1]; ``None`` where the output is absent."""
    output = values.get(name)
    return output[0] if output else None


def _parse_logprobs(text: str) -> tuple[TokenLogprob, ...]:
    return tuple(_token_logprob(item) for item in json.loads(text)) if text else ()


def _token_logprob(item: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(
        token_id=item["token_id"],
        token=item["token"],
        logprob=item["logprob"],
        top=tuple(_token_logprob(other) for other in item.get("top", ())),
    )


def _parse_perf(values: Mapping[str, Any]) -> PerfMetrics | None:
    if protocol.ARRIVAL_TIME_NS not in values:
        return None
    return PerfMetrics(**{spec.name: values[spec.name][0] for spec in protocol.PERF_OUTPUTS})
