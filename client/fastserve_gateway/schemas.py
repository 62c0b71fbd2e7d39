"""Bodies of requests. Fields have OpenAI's meaning, and the model's server checks their values."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastserve_client.message_text import joined_text
from fastserve_client.options import Message, Prompt, RequestOptions
from fastserve_client.protocol import MAX_INT32, MAX_SEED, STRUCTURED_OUTPUT
from pydantic import BeforeValidator, Field, model_validator

from fastserve_gateway.chat_history import as_template_takes, check_newest
from fastserve_gateway.chat_message import MAX_MESSAGES, ChatMessage, for_template
from fastserve_gateway.json_size import check_field_size
from fastserve_gateway.list_fields import (
    AllowedTokenIdsField,
    BadWordsField,
    LogitBiasField,
    PromptField,
    StopField,
    StopTokenIdsField,
)
from fastserve_gateway.shown_values import shown_value
from fastserve_gateway.strict_fields import (
    MAX_NAME_CHARS,
    MAX_NAMES,
    Body,
    StrictFields,
    unknown_keywords,
)
from fastserve_gateway.tool_fields import (
    MAX_TOOLS,
    FunctionTool,
    ToolChoice,
    ToolsField,
    check_tools,
    unknown_tool_fields,
)

MAX_CHOICES = 128
"""OpenAI's limit of ``n``."""
MAX_TENANT_CHARS = 128
"""The server's limit. Names become labels of metrics before the server sees them."""
MAX_LOGPROBS = 20
"""The server's limit."""
MAX_SESSION_ID_CHARS = 128
"""The server's limit."""
MAX_CACHE_SALT_CHARS = 128
"""The server takes twice as many, because a tenant's name comes before the salt."""


def _without_false(value: Any) -> Any:
    """``logprobs`` is a flag for chat and a number for completions; false is both's default."""
    return None if value is False else value


_OTHER_FORM = (
    "must be left out; response_format or structured_output says what an answer looks like"
)
_UNSUPPORTED = {
    "tools": "must be empty or left out",  # of completions
    "functions": "must be empty or left out; tools takes its place",
    "function_call": "must be empty or left out; tool_choice takes its place",
    "suffix": "must be empty or left out",
    "best_of": "must be at most n or left out",
    # Fields of vLLM and llama.cpp.
    "guided_json": _OTHER_FORM,
    "guided_regex": _OTHER_FORM,
    "guided_choice": _OTHER_FORM,
    "guided_grammar": _OTHER_FORM,
    "structured_outputs": _OTHER_FORM,
    "grammar": _OTHER_FORM,
    "json_schema": _OTHER_FORM,
}
"""Fields that would change the answer, and the values at which they change nothing."""

JSONField = Annotated[dict[str, Any], BeforeValidator(check_field_size)]
"""A field that may hold any JSON object, such as a schema."""


def _asks_for_nothing(name: str, value: Any, num_choices: int) -> bool:
    """Whether a field of ``_UNSUPPORTED`` changes nothing. Agents send empty lists."""
    if name == "best_of" and type(value) is int:
        return value <= num_choices
    if name == "function_call" and value in ("auto", "none"):
        return True  # without functions, which are refused
    return not value


class StreamOptions(StrictFields):
    include_usage: bool | None = None


class JSONSchema(StrictFields):
    """A schema that the answer follows, whether ``strict`` or not."""

    name: str
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[JSONField, Field(alias="schema")]


TIER_PRIORITIES = {"auto": 0, "default": 0, "priority": -1, "flex": 1}
"""The priority of each of OpenAI's service tiers. Others are ignored."""


class ResponseFormat(StrictFields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None
    bare_schema: Annotated[JSONField | None, Field(alias="schema")] = None
    """The schema as in the APIs of llama.cpp, Together and others, with type json_object too."""

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        if self.bare_schema is not None and self.type == "text":
            raise ValueError("schema goes with the types json_object and json_schema")
        num_schemas = (self.json_schema is not None) + (self.bare_schema is not None)
        if self.type == "json_schema" and num_schemas != 1:
            raise ValueError("the type json_schema needs one of json_schema and schema")
        return self

    @property
    def structured_output(self) -> dict[str, Any] | None:
        """The server's field ``structured_output``."""
        if self.json_schema is not None:
            return {"json_schema": self.json_schema.json_schema}
        if self.type == "json_schema":
            return {"json_schema": self.bare_schema}
        if self.type == "json_object" and self.bare_schema:
            return {"json_schema": {"type": "object", **self.bare_schema}}
        return {"json_object": True} if self.type == "json_object" else None


class RequestBody(Body):
    """Fields of each request for tokens: for whom it is, and how urgent."""

    model: str
    stream: bool | None = None
    priority: int | None = None
    service_tier: str | None = None
    tenant: Annotated[str, Field(max_length=MAX_TENANT_CHARS)] | None = None
    session_id: Annotated[str, Field(max_length=MAX_SESSION_ID_CHARS)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None

    @model_validator(mode="after")
    def _check_service_tier(self) -> RequestBody:
        tier_priority = TIER_PRIORITIES.get(self.service_tier or "")
        if self.priority is not None and tier_priority not in (None, self.priority):
            raise ValueError(
                f"service_tier: got {self.service_tier!r}, which is the priority "
                f"{tier_priority}, and another priority; give one of them"
            )
        return self

    def unknown_fields(self) -> list[str]:
        """Includes a tier that nothing here knows."""
        names = super().unknown_fields()
        is_known = self.service_tier is None or self.service_tier in TIER_PRIORITIES
        return names if is_known else [*names, "service_tier"]

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def wanted_priority(self) -> int | None:
        """The priority that the request names; ``None``: it leaves that to the server."""
        if self.priority is None and self.service_tier not in (None, "auto"):
            return TIER_PRIORITIES.get(self.service_tier)
        return self.priority

    @property
    def priority_field(self) -> str:
        """The field that decides the priority."""
        names_tier = self.priority is None and self.service_tier in TIER_PRIORITIES
        return "service_tier" if names_tier else "priority"

    @property
    def answered_tier(self) -> str | None:
        """The field ``service_tier`` of the answer; ``None``: it has none, as with OpenAI."""
        if self.service_tier is None:
            return None
        is_other = self.service_tier == "auto" or self.service_tier not in TIER_PRIORITIES
        return "default" if is_other else self.service_tier


class _GenerationRequest(RequestBody):
    """Fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: StopField = None
    stop_token_ids: StopTokenIdsField = None
    ignore_eos: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: LogitBiasField = None
    allowed_token_ids: AllowedTokenIdsField = None
    bad_words: BadWordsField = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    structured_output: JSONField | None = None

    @model_validator(mode="after")
    def _check_structured_output(self) -> _GenerationRequest:
        formatted = self.response_format and self.response_format.structured_output
        if formatted and self.structured_output is not None:
            raise ValueError("structured_output: response_format is given too; give one of them")
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> _GenerationRequest:
        if self.include_usage and not self.stream:
            raise ValueError("stream_options: only allowed with stream")
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> _GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not allowed with stream, as in vLLM")
        return self

    @model_validator(mode="after")
    def _check_unsupported(self) -> _GenerationRequest:
        for name in _UNSUPPORTED:
            value = (self.model_extra or {}).get(name)
            if not _asks_for_nothing(name, value, self.num_choices):
                got = shown_value(value)
                raise ValueError(f"{name}: got {got}; not supported; {_UNSUPPORTED[name]}")
        return self

    @property
    def num_choices(self) -> int:
        """``n``: answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def unknown_fields(self) -> list[str]:
        """Includes keywords of a schema that the server leaves out."""
        names = super().unknown_fields()
        wanted = self.response_format
        for prefix, part in (
            ("stream_options", self.stream_options),
            ("response_format", wanted),
            ("response_format.json_schema", wanted and wanted.json_schema),
        ):
            if part:
                names += [f"{prefix}.{name}" for name in part.unknown_fields()]
        schema = (self.wanted_output or {}).get("json_schema")
        return [*names, *unknown_keywords(schema, self.schema_field)]

    def read_elsewhere(self) -> Container[str]:
        return _UNSUPPORTED

    def _common_options(self) -> RequestOptions:
        return RequestOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=None if self.stop == [] else self.stop,
            stop_token_ids=None if self.stop_token_ids == [] else self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            add_special_tokens=self.add_special_tokens,
            skip_special_tokens=self.skip_special_tokens,
            logit_bias=self.logit_bias or None,
            prompt_logprobs=self.prompt_logprobs,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words or None,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            structured_output=self.wanted_output,
        )

    @property
    def schema_field(self) -> str:
        """The path of the answer's schema in the body."""
        if self.structured_output is not None:
            return f"{STRUCTURED_OUTPUT}.json_schema"
        is_bare = self.response_format is not None and self.response_format.json_schema is None
        return "response_format.schema" if is_bare else "response_format.json_schema.schema"

    @property
    def wanted_output(self) -> dict[str, Any] | None:
        """The server's field ``structured_output``."""
        formatted = self.response_format and self.response_format.structured_output
        return formatted or self.structured_output

    def choice_seed(self, choice: int) -> int | None:
        """Seed of answer ``choice`` to a prompt: each answer takes the next whole number.

        OpenAI's seeds may be negative. The server's are 64 bits without a sign.
        """
        return None if self.seed is None else (self.seed + choice) % (MAX_SEED + 1)


class CompletionRequest(_GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: PromptField
    logprobs: Annotated[int | None, BeforeValidator(_without_false)] = None
    echo: bool | None = None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """One or more prompts."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def options(self) -> RequestOptions:
        """All options but the seed. ``max_tokens`` has the server's default, 16, as OpenAI's."""
        options = RequestOptions(**self._common_options(), logprobs=self.logprobs)
        if self.only_echoes:
            options["max_tokens"] = 1  # it comes with the prompt, and the client does not get it
        if self.echo and self.logprobs is not None:
            options["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        if self.echo and (self.logprobs is not None or not self.echoes_texts):
            options["return_prompt_tokens"] = True
        return options

    @property
    def only_echoes(self) -> bool:
        """Whether the answer is the prompt and no token more."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def echoes_texts(self) -> bool:
        """Whether ``echo`` repeats the prompts as they are, and not the text of their tokens."""
        return isinstance(self.prompts[0], str) and self.truncate_prompt_tokens is None


class ChatRequest(_GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[
        list[Annotated[ChatMessage, BeforeValidator(as_template_takes)]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(check_newest),
    ]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    given_tools: Annotated[ToolsField | None, Field(alias="tools")] = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: JSONField | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template, unless ``chat_template_kwargs`` has it."""

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        check_tools(self.given_tools or [], self.tool_choice)
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs")
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise ValueError("max_tokens: max_completion_tokens is given too; give one of them")
        return self

    @property
    def tools(self) -> list[FunctionTool]:
        """The functions that the model gets to know."""
        given = self.given_tools or ()
        return [one for one in given if one.is_served][:MAX_TOOLS]

    @property
    def prompts(self) -> Sequence[Prompt]:
        return [self.template_messages]

    @property
    def template_messages(self) -> list[Message]:
        """The conversation without fields that nothing here reads. It must not be changed."""
        return [for_template(one) for one in self.messages]

    def unknown_fields(self) -> list[str]:
        # Each name once, though each message may have it.
        nested: set[str] = set()
        for name in self._unknown_message_fields():
            nested.add(name)
            if len(nested) == MAX_NAMES:
                break
        tools = unknown_tool_fields(self.given_tools or [])
        return [*super().unknown_fields(), *sorted(nested), *tools]

    def _unknown_message_fields(self) -> Iterator[str]:
        known = ChatMessage.__annotations__.keys()
        for message in self.messages:
            for name, value in message.items():
                if name not in known and value is not None:
                    yield f"messages.{name[:MAX_NAME_CHARS]}"
            parts = message["content"]
            for part in parts if isinstance(parts, list) else ():
                for name, value in part.items():
                    if name not in ("type", "text") and value is not None:
                        yield f"messages.content.{name[:MAX_NAME_CHARS]}"

    def told_texts(self) -> list[str]:
        """What the model is told, in order."""
        told = (one for one in self.messages if one["role"] in ("system", "user"))
        return [joined_text(one["content"]) or "" for one in told]

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template gets beside the conversation and the tools."""
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return {**effort, **(self.chat_template_kwargs or {})}

    def options(self) -> RequestOptions:
        """All options but the seed. Without ``max_tokens`` the answer may take what the prompt
        leaves."""
        options = RequestOptions(
            **self._common_options(), logprobs=(self.top_logprobs or 0) if self.logprobs else None
        )
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        elif self.max_tokens is None:
            options["max_tokens"] = MAX_INT32
            options["clip_max_tokens"] = True
        options["chat_template_kwargs"] = self.template_variables or None
        options["add_generation_prompt"] = self.add_generation_prompt
        options["continue_final_message"] = self.continue_final_message
        return options
