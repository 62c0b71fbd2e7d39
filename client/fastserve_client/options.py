"""The options of a request, as keyword arguments and as one JSON tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, get_type_hints

from fastserve_client.errors import InvalidRequest, shown

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``. The model defines the roles, such as system, user, assistant and
tool. Content is text or a list of parts of type text. An assistant's message with ``tool_calls``
needs none. Templates may know ``name``, ``tool_call_id`` and ``reasoning_content``, too."""

Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or a conversation for the model's chat template."""


class SamplingOptions(TypedDict, total=False):
    """Sampling and stopping. An option that is left out or ``None`` takes the server's default,
    which may be the model's own.

    The server checks the values, so that every client sees the same limits and messages.
    """

    max_tokens: int | None
    clip_max_tokens: bool | None
    """Lower ``max_tokens`` to what the prompt leaves room for, instead of refusing the request."""
    min_tokens: int | None
    add_special_tokens: bool | None
    """Whether the tokens that the model expects around a prompt are added: by default to a text,
    and not to a conversation, whose template writes them."""
    temperature: float | None
    """0 means greedy."""
    top_p: float | None
    top_k: int | None
    """-1 means all tokens."""
    min_p: float | None
    """Tokens less likely than this share of the likeliest token's probability are not chosen."""
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    """A text or several, which may name special tokens."""
    stop_not_between: Sequence[str] | None
    """Two marks: in an answer that begins with the first, or if that is empty, ``stop`` counts only
    behind the second."""
    stop_token_ids: Sequence[int] | int | None
    """Each of these tokens ends the answer. Its text is not part of it."""
    ignore_eos: bool | None
    skip_special_tokens: bool | None
    """False: special tokens of the answer have their text. The default is True."""
    allowed_token_ids: Sequence[int] | int | None
    """Only these tokens may be chosen."""
    bad_words: str | Sequence[str] | None
    """Words that the answer must not contain."""
    truncate_prompt_tokens: int | None
    """Use only this many of the prompt's last tokens; -1: as many as leave room for the answer."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | None
    """What to add to the logits of tokens, by id: from -100, which bans a token, to 100."""
    structured_output: Mapping[str, Any] | None
    """What the answer has to look like: exactly one of ``json_schema`` (a dict), ``json_object``
    (True), ``regex`` (text), ``choice`` (texts) and ``grammar`` (text, llguidance's Lark)."""
    logprobs: int | None
    """Also return the log-probability of each token, and this many of the most likely ones."""
    prompt_logprobs: int | None
    """The same for each token of the prompt but the first. The server computes the whole prompt
    then, even if it has computed the same prompt before."""
    return_prompt_tokens: bool | None
    """Also return the tokens of the prompt."""


class ServiceOptions(TypedDict, total=False):
    """How urgent a request is, whose it is, and which conversation it goes on. The server checks
    these values too."""

    priority: int | None
    """Lower runs first; the default is 0."""
    ttft_slo_ms: float | None
    """Wanted time to the first token; the default is the server's."""
    tpot_slo_ms: float | None
    """Wanted time for each later token; the default is the server's."""
    tenant: str | None
    """For whom the request runs."""
    session_id: str | None
    """Names the tenant's conversation that the request is a turn of. Its KV is held for a while
    after the answer, for the next turn."""
    cache_salt: str | None
    """Only requests with the same salt use each other's KV. Those without one share theirs."""


class ChatTemplateOptions(TypedDict, total=False):
    """What the model's chat template gets beside a conversation. The server checks it too."""

    tools: Sequence[Mapping[str, Any]] | None
    """Tools that the answer may call, described as in OpenAI's API."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables that the template knows, such as ``enable_thinking``."""
    add_generation_prompt: bool | None
    """Whether the prompt ends with the beginning of an answer; by default it does, unless it ends
    inside the last message."""
    continue_final_message: bool | None
    """The answer goes on with the text of the last message, which is the assistant's."""


class RequestOptions(SamplingOptions, ServiceOptions, ChatTemplateOptions, total=False):
    """All options of a request."""


OPTION_NAMES = frozenset(RequestOptions.__annotations__)

# What JSON can carry, for each type of an option.
_ALLOWED = {
    int | None: "an integer that fits 64 bits",
    float | None: "a finite number",
    bool | None: "a bool",
    str | None: "text",
    str | Sequence[str] | None: "text or a list of texts",
    Sequence[int] | int | None: "a list of token ids",
    Mapping[int, float] | Mapping[str, float] | None: "a mapping that JSON can carry",
    Mapping[str, Any] | None: "a mapping that JSON can carry",
    Sequence[Mapping[str, Any]] | None: "a list of mappings that JSON can carry",
}


def encode_options(options: Mapping[str, Any], flags: Mapping[str, bool]) -> str:
    """The value of the ``sampling_parameters`` tensor: the options, and flags of the protocol.

    There is one JSON tensor instead of a tensor for each value, because the server pays for every
    tensor. Also, JSON integers reach its checks with all their digits. A fixed-width tensor would
    wrap them.

    Raises:
        TypeError: a name that is no option.
        InvalidRequest: a value that JSON cannot carry (NaN, infinity, a foreign type).
    """
    unknown = sorted(options.keys() - OPTION_NAMES)
    if unknown:
        raise TypeError(
            f"unknown option {unknown[0]!r}; there are: {', '.join(sorted(OPTION_NAMES))}"
        )
    fields = []
    for name, value in (*options.items(), *flags.items()):
        if value is None:
            continue
        try:
            fields.append(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError):
            allowed = _ALLOWED[get_type_hints(RequestOptions)[name]]
            raise InvalidRequest(f"{name}: got {shown(value)}; must be {allowed}") from None
    return "{" + ", ".join(fields) + "}"
