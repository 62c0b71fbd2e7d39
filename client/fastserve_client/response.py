"""The meaning of a response's outputs, for gRPC and HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastserve_client import protocol
from fastserve_client.engine_state import EngineState
from fastserve_client.errors import ServerError
from fastserve_client.model_description import ModelDescription
from fastserve_client.results import (
    Chunk,
    PerfMetrics,
    PromptToken,
    Tokenization,
    TokenLogprob,
)

Outputs = Mapping[str, Sequence[Any]]
"""The elements of output tensors, by name."""
_DECODER = json.JSONDecoder()
# What is shorter is read in about a millisecond.
_LARGE_CHARS = 1 << 16
_JSON_OUTPUTS = (
    protocol.LOGPROBS_OUTPUT,
    protocol.PROMPT_LOGPROBS_OUTPUT,
    protocol.PROMPT_TOKENS,
)


def is_large(outputs: Outputs) -> bool:
    """Whether ``read_chunk`` takes so long that an event loop should not wait for it."""
    lengths = (len(_first(outputs, name) or "") for name in _JSON_OUTPUTS)
    return sum(lengths) > _LARGE_CHARS


def read_chunk(model: str, outputs: Outputs) -> Chunk:
    """The ``Chunk`` of a response with tokens.

    Raises:
        ServerError: the response is not of a fastserve model.
    """
    try:
        return _chunk(outputs)
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(model, error) from error


def read_engine_state(model: str, outputs: Outputs) -> str:
    """The JSON of an ``EngineState``, in a response to a watch.

    Raises:
        ServerError: there is none.
    """
    try:
        (state,) = outputs[protocol.ENGINE_STATE]
        return str(state)
    except (KeyError, ValueError) as error:
        raise unreadable(model, error) from error


def read_description(model: str, outputs: Outputs) -> ModelDescription:
    """The answer to ``build_description_request``.

    Raises:
        ServerError: the response is not of a fastserve model.
    """
    try:
        fields = _task_result(outputs)
        return ModelDescription(
            max_model_len=int(fields["max_model_len"]),
            chat_template=fields["chat_template"],
            tool_template=fields.get("tool_template"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(model, error) from error


def read_tokenization(model: str, outputs: Outputs) -> Tokenization:
    """The answer to ``build_tokenize_request``.

    Raises:
        ServerError: the response is not of a fastserve model.
    """
    try:
        fields = _task_result(outputs)
        token_strs = fields.get("token_strs")
        return Tokenization(
            token_ids=tuple(fields["token_ids"]),
            max_model_len=int(fields["max_model_len"]),
            token_strs=None if token_strs is None else tuple(token_strs),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(model, error) from error


def read_picture(model: str, text: str) -> EngineState:
    """A picture of the engine from its JSON.

    Raises:
        ServerError: it is none.
    """
    try:
        return EngineState.from_json(text)
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(model, error) from error


def read_detokenization(model: str, outputs: Outputs) -> str:
    """The answer to ``build_detokenize_request``.

    Raises:
        ServerError: the response is not of a fastserve model.
    """
    try:
        return str(_task_result(outputs)["text"])
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(model, error) from error


def _task_result(outputs: Outputs) -> Any:
    (text,) = outputs[protocol.TASK_RESULT]
    return json.loads(text)


def _chunk(outputs: Outputs) -> Chunk:
    token_ids = tuple(outputs[protocol.OUTPUT_IDS])
    return Chunk(
        text="".join(outputs[protocol.TEXT_OUTPUT]),
        token_ids=token_ids,
        finish_reason=_first(outputs, protocol.FINISH_REASON),
        num_input_tokens=_first(outputs, protocol.NUM_INPUT_TOKENS),
        logprobs=tuple(map(_token_logprob, _json_list(outputs, protocol.LOGPROBS_OUTPUT))),
        cumulative_logprob=_first(outputs, protocol.CUMULATIVE_LOGPROB),
        perf=_parse_perf(outputs),
        num_cached_tokens=_first(outputs, protocol.NUM_CACHED_TOKENS),
        prompt_logprobs=tuple(
            None if item is None else _token_logprob(item)
            for item in _json_list(outputs, protocol.PROMPT_LOGPROBS_OUTPUT)
        ),
        prompt_tokens=tuple(map(_prompt_token, _json_list(outputs, protocol.PROMPT_TOKENS))),
    )


def unreadable(model: str, error: Exception) -> ServerError:
    """The error for a response that makes no sense."""
    return ServerError(
        f"cannot read the response of model {model!r}: "
        f"{type(error).__name__}: {error}; is it a fastserve model of this version?"
    )


def _first(outputs: Outputs, name: str) -> Any:
    """The only element of an output of dims [1]; ``None`` if the output is absent."""
    output = outputs.get(name)
    return output[0] if output else None


def _json_list(outputs: Outputs, name: str) -> Iterator[Any]:
    """The entries of the list in an output of JSON; none if the output is absent or empty.

    They are read one by one, so that other threads run between them: the reader of a list holds the
    interpreter's lock until its end, and a list about a long prompt may have megabytes.
    """
    text = _first(outputs, name)
    if not text:
        return
    place = _after_space(text, 0)
    if text[place : place + 1] != "[":
        raise ValueError(f"output {name} is no list")
    place = _after_space(text, place + 1)
    while text[place : place + 1] != "]":
        entry, place = _DECODER.raw_decode(text, place)
        yield entry
        place = _after_space(text, place)
        if text[place : place + 1] == ",":
            place = _after_space(text, place + 1)
        elif text[place : place + 1] != "]":
            raise ValueError(f"output {name} is cut off")


def _after_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place


def _token_logprob(item: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(
        token_id=item["token_id"],
        token=item["token"],
        logprob=item["logprob"],
        top=tuple(_token_logprob(other) for other in item.get("top", ())),
        part=_part(item),
        rank=item.get("rank"),
    )


def _prompt_token(item: Mapping[str, Any]) -> PromptToken:
    return PromptToken(item["token_id"], item["token"], _part(item), item.get("special"))


def _part(item: Mapping[str, Any]) -> bytes | None:
    return bytes(item["bytes"]) if "bytes" in item else None


def _parse_perf(outputs: Outputs) -> PerfMetrics | None:
    if protocol.ARRIVAL_TIME_NS not in outputs:
        return None
    return PerfMetrics(**{spec.name: outputs[spec.name][0] for spec in protocol.PERF_OUTPUTS})
