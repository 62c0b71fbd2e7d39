"""Reads and checks a request: tensors, ``sampling_parameters`` and request parameters.

Triton checks little: the number of inputs, and the type and shape of each tensor, as config.pbtxt
gives them. NaN, -1, NUL and invalid UTF-8 pass, so everything is checked here. This module knows
numpy arrays and strings, not Triton's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from fastserve_client import protocol
from numpy.typing import NDArray

from fastserve_backend.checkpoints.chat_options import ChatOptions
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.job import ServiceLevel
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.serving.request_values import (
    RequestValues,
    json_value,
    single_value,
    tensor_value,
    to_bool,
    to_float,
    to_int,
    to_logit_bias,
    to_object,
    to_seconds,
    to_structured_output,
    to_text,
    to_token_ids,
    to_tools,
    to_words,
)

# Enough for a million tokens of escaped text. All other requests wait while JSON is read.
MAX_MESSAGES_BYTES = 16 << 20

_MESSAGE_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning"),
)

_TASK_FIELDS: dict[str, tuple[str, ...]] = {
    protocol.DESCRIBE: (),
    protocol.TOKENIZE: (
        *(protocol.TEXT_INPUT, protocol.MESSAGES, *protocol.CHAT_OPTIONS),
        *(protocol.ADD_SPECIAL_TOKENS, protocol.RETURN_TOKEN_STRS),
    ),
    protocol.DETOKENIZE: (protocol.INPUT_IDS,),
}
_ANY_TASKS_FIELDS = (protocol.TASK, protocol.SAMPLING_PARAMETERS, protocol.REQUEST_ID)
_NO_TOKENS = np.empty(0, np.int32)
_TASK_KEYS = (*protocol.PARAMETER_KEYS, protocol.RETURN_TOKEN_STRS)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A valid request. Exactly one of ``text``, ``input_ids`` and ``messages`` is set."""

    text: str | None
    input_ids: NDArray[np.int32] | None
    """[n]"""
    messages: list[Any] | None
    """A conversation for the model's chat template: a list of at least one element of any type,
    which is not checked yet."""
    chat: ChatOptions
    """What the chat template gets beside ``messages``."""
    add_special_tokens: bool
    """The tokenizer adds the tokens that the model expects around a prompt."""
    stream: bool
    include_input: bool
    """``text_output`` begins with the prompt's text; never with ``stream`` or ``messages``."""
    params: SamplingParams
    clip_max_tokens: bool
    """``params.max_tokens`` may be lowered to what fits."""
    truncate_prompt_tokens: int | None
    """See ``RequestChecks.kept_tokens``."""
    output_ids_so_far: NDArray[np.int32]
    """[n]: the answer goes on after these tokens; n is 0 for a new answer."""
    service: ServiceLevel
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_cached_tokens: bool
    return_num_output_tokens: bool
    return_cumulative_logprob: bool
    return_logprobs: bool
    return_prompt_logprobs: bool
    return_prompt_tokens: bool
    return_perf_metrics: bool
    request_id: str
    """From the request parameters; empty: they have none."""
    trace_context: Mapping[str, str]
    """See ``RequestValues.trace_context``."""


def decode_request(tensors: Mapping[str, NDArray[Any]], parameters: str) -> GenerateRequest:
    """Reads a request.

    Args:
        tensors: the request's tensors by name; strings are objects of type ``bytes``.
        parameters: the request parameters: a JSON object, or empty.

    Raises:
        InvalidRequestError: names the first field that is wrong.
    """
    values = RequestValues(tensors, parameters)  # first: the prompt's name may be misspelled
    prompt = _prompt(tensors, protocol.PROMPTS)
    if prompt.text == "":
        raise InvalidRequestError(protocol.TEXT_INPUT, "", "must not be empty")
    stream = values.boolean(protocol.STREAM)
    exclude_input = values.get(protocol.EXCLUDE_INPUT_IN_OUTPUT, to_bool)
    answer_only = protocol.STREAM if stream else protocol.MESSAGES if prompt.messages else None
    if answer_only is not None and exclude_input is False:
        raise InvalidRequestError(
            protocol.EXCLUDE_INPUT_IN_OUTPUT,
            False,
            f"must be true, or left out, with {answer_only}",
        )
    return_logprobs = values.boolean(protocol.RETURN_LOGPROBS)
    return_cumulative_logprob = values.boolean(protocol.RETURN_CUMULATIVE_LOGPROB)
    return_prompt_logprobs = values.boolean(protocol.RETURN_PROMPT_LOGPROBS)
    return GenerateRequest(
        text=prompt.text,
        input_ids=prompt.input_ids,
        messages=prompt.messages,
        chat=_chat_options(values, prompt),
        add_special_tokens=_adds_special_tokens(values, prompt),
        stream=stream,
        include_input=answer_only is None and not exclude_input,
        params=_sampling_params(
            values, return_logprobs or return_cumulative_logprob, return_prompt_logprobs
        ),
        clip_max_tokens=values.boolean(protocol.CLIP_MAX_TOKENS),
        truncate_prompt_tokens=values.get(protocol.TRUNCATE_PROMPT_TOKENS, to_int),
        # A copy: Triton's request may end before its prompt is prepared.
        output_ids_so_far=tensors.get(protocol.OUTPUT_IDS_SO_FAR, _NO_TOKENS).reshape(-1).copy(),
        service=ServiceLevel(
            priority=values.get(protocol.PRIORITY, to_int) or 0,
            ttft_slo_s=values.get(protocol.TTFT_SLO_MS, to_seconds),
            tpot_slo_s=values.get(protocol.TPOT_SLO_MS, to_seconds),
            tenant=values.get(protocol.TENANT, to_text) or "",
            session_id=values.get(protocol.SESSION_ID, to_text) or "",
            cache_salt=values.get(protocol.CACHE_SALT, to_text) or "",
        ),
        return_finish_reason=values.boolean(protocol.RETURN_FINISH_REASON),
        return_num_input_tokens=values.boolean(protocol.RETURN_NUM_INPUT_TOKENS),
        return_num_cached_tokens=values.boolean(protocol.RETURN_NUM_CACHED_TOKENS),
        return_num_output_tokens=values.boolean(protocol.RETURN_NUM_OUTPUT_TOKENS),
        return_cumulative_logprob=return_cumulative_logprob,
        return_logprobs=return_logprobs,
        return_prompt_logprobs=return_prompt_logprobs,
        return_prompt_tokens=values.boolean(protocol.RETURN_PROMPT_TOKENS),
        return_perf_metrics=values.boolean(protocol.RETURN_PERF_METRICS),
        request_id=values.get(protocol.REQUEST_ID, to_text) or "",
        trace_context=values.trace_context(),
    )


def decode_watch(tensors: Mapping[str, NDArray[Any]], parameters: str) -> float | None:
    """Seconds between two pictures of the engine; None: the request is for tokens.

    Raises:
        InvalidRequestError: the interval is wrong, or another field is given beside it.
    """
    name = protocol.WATCH_INTERVAL_MS
    if name not in tensors:
        return None
    values = RequestValues(tensors, parameters)
    for other in values.given():
        if other not in (name, protocol.STREAM):
            allowed = f"only {protocol.STREAM} may be given beside it"
            raise InvalidRequestError(f"{other}, {name}", f"{other} and {name}", allowed)
    if not values.boolean(protocol.STREAM):
        raise InvalidRequestError(protocol.STREAM, False, f"must be true with {name}")
    interval_ms = to_int(name, tensor_value(name, tensors[name]))
    low, high = protocol.MIN_WATCH_INTERVAL_MS, protocol.MAX_WATCH_INTERVAL_MS
    if not low <= interval_ms <= high:
        raise InvalidRequestError(name, interval_ms, f"must be from {low} to {high}")
    return interval_ms / 1000


@dataclass(frozen=True, slots=True)
class DescribeTask:
    """Wants a description of the model."""


@dataclass(frozen=True, slots=True)
class TokenizeTask:
    """Wants the tokens of ``text``, which may be empty, or of ``messages``, which are not checked
    yet."""

    text: str | None
    messages: list[Any] | None
    chat: ChatOptions
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeTask:
    """Wants the text of these tokens, [n] with n > 0, which are not checked yet."""

    input_ids: NDArray[np.int32]


Task = DescribeTask | TokenizeTask | DetokenizeTask


def decode_task(tensors: Mapping[str, NDArray[Any]], parameters: str) -> Task | None:
    """The task of a request that is no job; None: the request is for tokens.

    Raises:
        InvalidRequestError: names the first field that is wrong, or not allowed with the task.
    """
    if protocol.TASK not in tensors:
        return None
    task = to_text(protocol.TASK, single_value(protocol.TASK, tensors[protocol.TASK]))
    if task not in _TASK_FIELDS:
        allowed = "must be one of " + ", ".join(_TASK_FIELDS)
        raise InvalidRequestError(protocol.TASK, task, allowed)
    fields = _TASK_FIELDS[task]
    values = RequestValues(tensors, parameters, _TASK_KEYS)
    for name in values.given():
        if name not in fields and name not in _ANY_TASKS_FIELDS:
            allowed = f"not with the task {task}, which takes {', '.join(fields) or 'nothing'}"
            raise InvalidRequestError(name, "a value", allowed)
    if task == protocol.DESCRIBE:
        return DescribeTask()
    prompt = _prompt(tensors, [name for name in protocol.PROMPTS if name in fields])
    if prompt.input_ids is not None:
        return DetokenizeTask(prompt.input_ids.copy())  # as for `output_ids_so_far`
    return TokenizeTask(
        text=prompt.text,
        messages=prompt.messages,
        chat=_chat_options(values, prompt),
        add_special_tokens=_adds_special_tokens(values, prompt),
        return_token_strs=values.boolean(protocol.RETURN_TOKEN_STRS),
    )


class _Prompt(NamedTuple):
    text: str | None = None
    input_ids: NDArray[np.int32] | None = None
    messages: list[Any] | None = None


def _prompt(tensors: Mapping[str, NDArray[Any]], names: Sequence[str]) -> _Prompt:
    """The only one of these fields that is given. A text may be empty."""
    given = [name for name in names if name in tensors]
    if len(given) != 1:
        allowed = f"exactly one of {', '.join(names)} is required"
        if protocol.TASK not in tensors:
            allowed += f" (or {protocol.WATCH_INTERVAL_MS}, or {protocol.TASK})"
        what = " and ".join(given) or "none"
        raise InvalidRequestError(", ".join(given or names), what, allowed)
    name, tensor = given[0], tensors[given[0]]
    if name == protocol.INPUT_IDS:
        if tensor.size == 0:
            raise InvalidRequestError(name, [], "at least one token id is required")
        return _Prompt(input_ids=tensor.reshape(-1))
    encoded = single_value(name, tensor)
    if name == protocol.MESSAGES and len(encoded) > MAX_MESSAGES_BYTES:
        raise InvalidRequestError(
            name, f"{len(encoded)} bytes", f"at most {MAX_MESSAGES_BYTES} bytes"
        )
    text = to_text(name, encoded)
    if name == protocol.MESSAGES:
        return _Prompt(messages=_messages(text))
    return _Prompt(text=text)


def _messages(text: str) -> list[Any]:
    """A conversation from JSON. The error quotes none of its text."""
    messages = json_value(text)
    if not isinstance(messages, list) or not messages:
        allowed = "must be a JSON list of at least one message"
        raise InvalidRequestError(protocol.MESSAGES, f"{len(text)} characters", allowed)
    return messages


def _chat_options(values: RequestValues, prompt: _Prompt) -> ChatOptions:
    if prompt.messages is None:
        for name in protocol.CHAT_OPTIONS:
            if values.get(name, lambda name, value: value) is not None:
                raise InvalidRequestError(name, "a value", f"only with {protocol.MESSAGES}")
    return ChatOptions(
        tools=values.get(protocol.TOOLS, to_tools),
        kwargs=values.get(protocol.CHAT_TEMPLATE_KWARGS, to_object),
        add_generation_prompt=values.get(protocol.ADD_GENERATION_PROMPT, to_bool),
        continue_final_message=values.boolean(protocol.CONTINUE_FINAL_MESSAGE),
    )


def _adds_special_tokens(values: RequestValues, prompt: _Prompt) -> bool:
    given: bool | None = values.get(protocol.ADD_SPECIAL_TOKENS, to_bool)
    if given and prompt.input_ids is not None:
        allowed = f"must be false or left out with {protocol.INPUT_IDS}"
        raise InvalidRequestError(protocol.ADD_SPECIAL_TOKENS, given, allowed)
    return prompt.text is not None if given is None else given


def refuse_unknown_keys(messages: Sequence[Message]) -> None:
    """Raises InvalidRequestError: a message has a key that nothing reads."""
    for index, message in enumerate(messages):
        for key, value in message.items():
            if key not in _MESSAGE_KEYS and value is not None:
                allowed = "unknown; allowed are " + ", ".join(_MESSAGE_KEYS)
                raise InvalidRequestError(f"{protocol.MESSAGES}[{index}]", key, allowed)


def _sampling_params(
    values: RequestValues, needs_logprobs: bool, needs_prompt_logprobs: bool
) -> SamplingParams:
    num_logprobs = values.get(protocol.LOGPROBS, to_int)
    num_prompt_logprobs = values.get(protocol.PROMPT_LOGPROBS, to_int)
    stop = values.get(protocol.STOP_WORDS, to_words)
    other_stop = values.get(protocol.STOP, to_words)
    if stop and other_stop:
        raise InvalidRequestError(
            protocol.STOP, list(other_stop), f"{protocol.STOP_WORDS} is given too; give one of them"
        )

    given = {
        name: value
        for name, convert in _SAMPLING.items()
        if (value := values.get(name, convert)) is not None
    }
    if num_logprobs is None and needs_logprobs:
        num_logprobs = 0
    if num_prompt_logprobs is None and needs_prompt_logprobs:
        num_prompt_logprobs = 0
    return SamplingParams(
        **given,
        stop=stop or other_stop or (),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )


# Fields of SamplingParams, in the order in which they are checked. It has the same names, and the
# defaults.
_SAMPLING: dict[str, Callable[[str, Any], Any]] = {
    protocol.MAX_TOKENS: to_int,
    protocol.MIN_TOKENS: to_int,
    protocol.TEMPERATURE: to_float,
    protocol.TOP_P: to_float,
    protocol.TOP_K: to_int,
    protocol.MIN_P: to_float,
    protocol.REPETITION_PENALTY: to_float,
    protocol.PRESENCE_PENALTY: to_float,
    protocol.FREQUENCY_PENALTY: to_float,
    protocol.SEED: to_int,
    protocol.STOP_TOKEN_IDS: to_token_ids,
    protocol.IGNORE_EOS: to_bool,
    protocol.SKIP_SPECIAL_TOKENS: to_bool,
    protocol.STOP_NOT_BETWEEN: to_words,
    protocol.LOGIT_BIAS: to_logit_bias,
    protocol.ALLOWED_TOKEN_IDS: to_token_ids,
    protocol.BAD_WORDS: to_words,
    protocol.STRUCTURED_OUTPUT: to_structured_output,
}
