"""The values of a request's fields, from all places where they may be, and their types.

Each ``to_…`` converts the value of the field ``name``, or raises InvalidRequestError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import numpy as np
from fastserve_client import protocol
from numpy.typing import NDArray

from fastserve_backend.checkpoints.chat_options import MAX_TOOLS_CHARS
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.sampling_params import MAX_LOGIT_BIASES
from fastserve_backend.serving.grpc_status import GRPC_STATUS_HEADER

# Enough for all stop words at their longest, and for little else.
MAX_SAMPLING_PARAMETERS_BYTES = 1 << 20

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)
_BOOLEANS = {"true": True, "false": False}
# Headers of a gRPC call that the server makes request parameters.
_HEADERS = (GRPC_STATUS_HEADER, *protocol.TRACE_HEADERS)
_ONLY_IN_REQUEST = (protocol.REQUEST_ID, *_HEADERS)
_SPECS = {spec.name: spec for spec in protocol.INPUTS}


class RequestValues:
    """One value for each name: from its tensor, else ``sampling_parameters``, else the request
    parameters."""

    def __init__(
        self,
        tensors: Mapping[str, NDArray[Any]],
        parameters: str,
        keys: Sequence[str] = protocol.PARAMETER_KEYS,
    ) -> None:
        """``keys`` may be in ``sampling_parameters`` and request parameters."""
        unknown = [name for name in tensors if name not in _SPECS]
        if unknown:
            raise InvalidRequestError(unknown[0], "a tensor", "no input has this name")
        self._tensors = tensors
        sampling = _sampling_object(tensors.get(protocol.SAMPLING_PARAMETERS))
        request = _json_object("parameters", parameters) if parameters else {}
        self._sources = (sampling, request)
        unknown = [key for key in sampling if key not in keys]
        unknown += [key for key in request if key not in (*keys, *_ONLY_IN_REQUEST)]
        if unknown:
            value = sampling.get(unknown[0], request.get(unknown[0]))
            close = get_close_matches(unknown[0], [*protocol.PROMPTS, *keys], n=1)
            remedy = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(keys)}"
            raise InvalidRequestError(unknown[0], value, f"unknown parameter; {remedy}")

    def get(self, name: str, convert: Callable[[str, Any], Any]) -> Any:
        """The converted value; None: no source has one, or only JSON's null."""
        tensor = self._tensors.get(name)
        if tensor is not None:
            return convert(name, tensor_value(name, tensor))
        for source in self._sources:
            if source.get(name) is not None:
                return convert(name, source[name])
        return None

    def given(self) -> list[str]:
        """Names of all values, from all sources."""
        keys = [key for source in self._sources for key in source if key not in _HEADERS]
        return [*self._tensors, *keys]

    def trace_context(self) -> dict[str, str]:
        """W3C's headers. Values that are no text count as none."""
        request = self._sources[1]
        found = {name: request.get(name) for name in protocol.TRACE_HEADERS}
        return {name: value for name, value in found.items() if isinstance(value, str)}

    def boolean(self, name: str) -> bool:
        return self.get(name, to_bool) or False


def _sampling_object(tensor: NDArray[Any] | None) -> dict[str, Any]:
    if tensor is None:
        return {}
    name = protocol.SAMPLING_PARAMETERS
    encoded = single_value(name, tensor)
    if len(encoded) > MAX_SAMPLING_PARAMETERS_BYTES:
        allowed = f"at most {MAX_SAMPLING_PARAMETERS_BYTES} bytes"
        raise InvalidRequestError(name, f"{len(encoded)} bytes", allowed)
    return _json_object(name, to_text(name, encoded))


def _json_object(name: str, text: str) -> dict[str, Any]:
    value = json_value(text)
    if not isinstance(value, dict):
        raise InvalidRequestError(name, text, "must be a JSON object")
    return value


def json_value(text: str) -> Any:
    """The value; None for invalid JSON. A leading byte order mark is ignored (RFC 8259, 8.1)."""
    try:
        return json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError):
        return None


def single_value(name: str, tensor: NDArray[Any]) -> Any:
    """The only element. Raises InvalidRequestError: there are more, or none."""
    # The server has checked the shape, but some releases do not check optional inputs.
    if tensor.size != 1:
        raise InvalidRequestError(name, f"{tensor.size} values", "must be one value")
    return tensor.reshape(-1)[0]


def tensor_value(name: str, tensor: NDArray[Any]) -> Any:
    """The value of an input: Python's, or a list of numpy's. Raises InvalidRequestError."""
    if _SPECS[name].variable_length:
        return list(tensor.reshape(-1))
    value = single_value(name, tensor)
    return value.item() if isinstance(value, np.generic) else value


def to_text(name: str, value: Any) -> str:
    """The text of a string, which is ``bytes`` in a tensor and ``str`` in JSON."""
    try:
        if isinstance(value, bytes):
            return value.decode("utf-8")
        if isinstance(value, str):
            value.encode("utf-8")  # JSON can spell a lone surrogate, which no output could carry
            return value
    except UnicodeError:
        raise InvalidRequestError(name, value, "must be valid UTF-8") from None
    raise InvalidRequestError(name, value, "must be a string")


def to_int(name: str, value: Any) -> int:
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise InvalidRequestError(name, value, "must be an integer")


def to_float(name: str, value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass
    raise InvalidRequestError(name, value, "must be a number")


def to_seconds(name: str, milliseconds: Any) -> float:
    return to_float(name, milliseconds) / 1e3


def to_bool(name: str, value: Any) -> bool:
    if isinstance(value, str):
        value = _BOOLEANS.get(value.lower(), value)
    if isinstance(value, bool):
        return value
    raise InvalidRequestError(name, value, "must be true or false")


def to_words(name: str, value: Any) -> tuple[str, ...]:
    words = value if isinstance(value, list) else [value]
    return tuple(to_text(name, word) for word in words)


def to_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """From a list, one token, or the JSON text of either: request parameters cannot be lists."""
    found = json_value(value) if isinstance(value, str) else value
    token_ids = found if isinstance(found, list) else [value if found is None else found]
    return tuple(to_int(name, token_id) for token_id in token_ids)


def to_object(name: str, value: Any) -> dict[str, Any]:
    """From a JSON object or its text: request parameters cannot be objects."""
    if isinstance(value, str):
        return _json_object(name, value)
    if isinstance(value, dict):
        return value
    raise InvalidRequestError(name, value, "must be a JSON object")


def to_tools(name: str, value: Any) -> list[Any]:
    """From a list or its text: request parameters cannot be lists."""
    if isinstance(value, str) and len(value) > MAX_TOOLS_CHARS:  # before it takes time to read
        allowed = f"at most {MAX_TOOLS_CHARS} characters of JSON"
        raise InvalidRequestError(name, f"{len(value)} characters", allowed)
    found = json_value(value) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise InvalidRequestError(name, value, "must be a JSON list")
    return found


def to_structured_output(name: str, value: Any) -> StructuredOutput:
    return StructuredOutput.of(to_object(name, value))


def to_logit_bias(name: str, value: Any) -> dict[int, float]:
    biases = to_object(name, value)
    if len(biases) > MAX_LOGIT_BIASES:  # before any of them is converted
        raise InvalidRequestError(name, f"{len(biases)} tokens", f"at most {MAX_LOGIT_BIASES}")
    converted = {
        to_int(name, token_id): to_float(f"{name}[{token_id}]", bias)
        for token_id, bias in biases.items()
    }
    if len(converted) < len(biases):
        raise InvalidRequestError(name, "a token twice", "each token may be there once")
    return converted
