"""A request to the model, before it is encoded for gRPC or HTTP."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import index
from typing import Any, Final, cast

from fastserve_client import protocol
from fastserve_client.errors import InvalidRequest, shown
from fastserve_client.options import Message, Prompt, encode_options


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One request to the model."""

    model: str
    inputs: Mapping[str, str | bool | Sequence[int]]
    """Tensors by name: text that is valid UTF-8, a flag, or integers that fit 32 bits."""
    request_id: str = ""
    """Appears in the server's logs. If it is empty, the server makes one up."""
    trace_context: Mapping[str, str] = field(default_factory=dict)
    """``TRACE_HEADERS`` and their values, which a header can carry."""


class EncodedMessages(list[Message]):
    """A conversation that is encoded already, so that sending it takes no time. It must not be
    changed.

    Raises InvalidRequest: a message that JSON cannot carry.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__(messages)
        self.text: Final = _checked_text(protocol.MESSAGES, _encode_messages(messages))


def build_request(
    model: str,
    prompt: Prompt,
    options: Mapping[str, Any],
    *,
    stream: bool,
    perf_metrics: bool = False,
    request_id: str = "",
    trace_context: Mapping[str, str] | None = None,
    output_ids_so_far: Sequence[int] = (),
) -> InferRequest:
    """The request for ``prompt`` with the given ``RequestOptions``.

    Raises:
        InvalidRequest: a value that the wire cannot carry.
        TypeError: an unknown option.
    """
    flags = {
        protocol.STREAM: stream,
        protocol.EXCLUDE_INPUT_IN_OUTPUT: True,
        protocol.RETURN_FINISH_REASON: True,
        protocol.RETURN_NUM_INPUT_TOKENS: True,
        protocol.RETURN_NUM_CACHED_TOKENS: True,
    }
    if options.get(protocol.LOGPROBS) is not None:
        flags[protocol.RETURN_LOGPROBS] = True
        flags[protocol.RETURN_CUMULATIVE_LOGPROB] = True
    if options.get(protocol.PROMPT_LOGPROBS) is not None:
        flags[protocol.RETURN_PROMPT_LOGPROBS] = True
    if perf_metrics:
        flags[protocol.RETURN_PERF_METRICS] = True
    name, value = _prompt_input(prompt)
    parameters = encode_options(options, flags)
    inputs = {name: value, protocol.SAMPLING_PARAMETERS: parameters}
    if len(output_ids_so_far) > 0:
        field = protocol.OUTPUT_IDS_SO_FAR
        inputs[field] = _checked_ids(output_ids_so_far, field)
    return InferRequest(model, inputs, request_id, _trace_headers(trace_context or {}))


def build_watch_request(model: str, interval_s: float) -> InferRequest:
    """The request for pictures of the engine. The server checks the interval.

    Raises:
        InvalidRequest: an interval that the wire cannot carry.
    """
    try:
        interval_ms = round(interval_s * 1000)
    except (OverflowError, ValueError):
        interval_ms = protocol.MAX_INT32 + 1
    if not -protocol.MAX_INT32 <= interval_ms <= protocol.MAX_INT32:
        raise InvalidRequest(f"interval_s: got {shown(interval_s)}; must be a number of seconds")
    return InferRequest(model, {protocol.WATCH_INTERVAL_MS: (interval_ms,), protocol.STREAM: True})


def build_description_request(model: str) -> InferRequest:
    """The request for a ``ModelDescription``."""
    return InferRequest(model, {protocol.TASK: protocol.DESCRIBE})


def build_tokenize_request(
    model: str,
    prompt: str | Sequence[Message],
    options: Mapping[str, Any],
    *,
    return_token_strs: bool,
) -> InferRequest:
    """The request for a ``Tokenization``. ``options`` are some of ``RequestOptions``.

    Raises:
        InvalidRequest: a value that the wire cannot carry.
        TypeError: an unknown option.
    """
    name, value = _prompt_input(prompt)
    parameters = encode_options(options, {protocol.RETURN_TOKEN_STRS: return_token_strs})
    inputs = {protocol.TASK: protocol.TOKENIZE, name: value}
    return InferRequest(model, {**inputs, protocol.SAMPLING_PARAMETERS: parameters})


def build_detokenize_request(model: str, token_ids: Sequence[int]) -> InferRequest:
    """The request for the text of tokens. Raises InvalidRequest: one of them is no token id."""
    ids = _checked_ids(token_ids)
    return InferRequest(model, {protocol.TASK: protocol.DETOKENIZE, protocol.INPUT_IDS: ids})


def _prompt_input(prompt: Prompt) -> tuple[str, str | Sequence[int]]:
    if isinstance(prompt, EncodedMessages):
        return protocol.MESSAGES, prompt.text
    if isinstance(prompt, str):
        return protocol.TEXT_INPUT, _checked_text(protocol.TEXT_INPUT, prompt)
    if isinstance(prompt, Mapping):
        raise InvalidRequest(
            f"{protocol.MESSAGES}: got one message; must be a list of them, which is a conversation"
        )
    if isinstance(
        prompt, bytes | bytearray
    ):  # these are integers too, but hardly meant as token ids
        raise InvalidRequest(
            f"{protocol.TEXT_INPUT}: got {type(prompt).__name__}; must be text, which .decode() "
            "makes of bytes"
        )
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        text = _encode_messages(cast("Sequence[Message]", prompt))
        return protocol.MESSAGES, _checked_text(protocol.MESSAGES, text)
    return protocol.INPUT_IDS, _checked_ids(cast("Sequence[int]", prompt))


def _trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The trace context among ``headers``. A malformed value counts as none, as W3C says."""
    return {
        name: value
        for name in protocol.TRACE_HEADERS
        if (value := headers.get(name)) and value.isascii() and value.isprintable()
    }


def _checked_text(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{name}: got text that is not Unicode (character {error.start}); must be valid UTF-8"
        ) from None
    return text


def _encode_messages(messages: Sequence[Message]) -> str:
    try:
        return json.dumps([dict(message) for message in messages], ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{protocol.MESSAGES}: got a message that JSON cannot carry ({error}); each "
            "must have role and content"
        ) from None


def _checked_ids(token_ids: Sequence[Any], field: str = protocol.INPUT_IDS) -> Sequence[int]:
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return token_ids  # all of them fit
    # There may be millions, and an event loop waits. So no Python code runs for each valid one.
    if not any(map(_is_bool, set(map(type, token_ids)))):
        with suppress(TypeError):
            checked = tuple(map(index, token_ids))  # index() also takes NumPy's integers
            if _is_token_id(min(checked, default=0)) and _is_token_id(max(checked, default=0)):
                return checked
    wrong = next(one for one in token_ids if not _is_token_id(one))
    raise InvalidRequest(
        f"{field}: got {shown(wrong)}, which is no token id; must be integers that fit 32 bits"
    )


def _is_token_id(value: Any) -> bool:
    if _is_bool(type(value)):
        return False
    try:
        return -protocol.MAX_INT32 <= index(value) <= protocol.MAX_INT32
    except TypeError:
        return False


def _is_bool(kind: type) -> bool:
    """Whether it is Python's or NumPy's bool. Those are integers too, but no token ids."""
    return kind.__name__ in ("bool", "bool_")
