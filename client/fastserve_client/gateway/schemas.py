"""Bodies of requests. What a field means is OpenAI's; values are checked by the model's server."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from typing_extensions import TypedDict  # pydantic takes typing's only since Python 3.12

from fastserve_client.options import Prompt, SamplingOptions
from fastserve_client.protocol import MAX_INT32, MAX_SEED

MAX_CHOICES = 128
"""OpenAI's limit of ``n``."""
MAX_LOGIT_BIASES = 300
"""OpenAI's, and the server's."""

# Values of a field that may hold millions are checked as a whole, and at the first that is wrong:
# pydantic would keep an error for each, and for each member of a union.


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str) or _all(int, value) or _all(str, value):
        return value
    if _all(list, value) and all(value) and _all(int, list(chain.from_iterable(value))):
        return value
    raise ValueError("must be text, token ids, or a list of at least one of them")


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if _all(dict, value):
        texts = [part.get("text") for part in value if part.get("type") == "text"]
        if len(texts) == len(value) and _all(str, texts):
            return "".join(texts)
    raise ValueError("must be text, or a list of parts of type text")


def _check_stop(value: Any) -> Any:
    if value is None or isinstance(value, str) or value == [] or _all(str, value):
        return value
    raise ValueError("must be text or a list of texts")


def _check_biases(value: Any) -> Any:
    if value is None or (
        isinstance(value, dict)
        and len(value) <= MAX_LOGIT_BIASES
        and set(map(type, value.values())) <= {int, float}
    ):
        return value
    raise ValueError(f"must give at most {MAX_LOGIT_BIASES} token ids a number each")


def _all(kind: type, value: Any) -> bool:
    # A bool is an int to Python, and is no token. Without Python for each: there may be millions.
    return isinstance(value, list) and set(map(type, value)) == {kind}


_UNSUPPORTED = {
    "tools": "must be empty or left out",
    "functions": "must be empty or left out",
    "suffix": "must be empty or left out",
    "best_of": "must be at most n or left out",
}
"""Fields without which the answer would be another than the one asked for, and what they may be."""
_MAX_KIND_CHARS = 32
_JSON_KINDS = {list: "a list", dict: "an object", str: "a text", int: "a number", float: "a number"}


def _asks_for_nothing(name: str, value: Any, num_choices: int) -> bool:
    """Whether one of ``_UNSUPPORTED`` leaves the answer as it is; agents send empty lists."""
    if name == "best_of" and type(value) is int:
        return value <= num_choices
    return not value


def _got(value: Any) -> str:
    """A field's value without what may be a prompt."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str):
        return f"type {kind[:_MAX_KIND_CHARS]!r}"
    if type(value) is int and abs(value) <= MAX_INT32:
        return str(value)
    return _JSON_KINDS.get(type(value), "a value")


class _Fields(BaseModel):
    """Strict: no "5" for 5. Fields that are not declared are kept, so that they can be named."""

    model_config = ConfigDict(strict=True, extra="allow")

    def unknown_fields(self) -> list[str]:
        """Fields that nothing here reads; null asks for nothing."""
        return [name for name, value in (self.model_extra or {}).items() if value is not None]


class StreamOptions(_Fields):
    include_usage: bool | None = None


class JSONSchema(_Fields):
    """The answer follows it, ``strict`` or not."""

    name: str
    description: str | None = None
    strict: bool | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(_Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema goes with the type json_schema, and with no other")
        return self


class _GenerationRequest(_Fields):
    """What completions and chat completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, PlainValidator(_check_stop)] = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float] | None, PlainValidator(_check_biases)] = None
    response_format: ResponseFormat | None = None
    structured_output: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_structured_output(self) -> _GenerationRequest:
        formatted = self.response_format is not None and self.response_format.type != "text"
        if formatted and self.structured_output is not None:
            raise ValueError("structured_output: response_format is given too; give one of them")
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> _GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream")
        return self

    @model_validator(mode="after")
    def _check_unsupported(self) -> _GenerationRequest:
        for name in _UNSUPPORTED:
            value = (self.model_extra or {}).get(name)
            if not _asks_for_nothing(name, value, self.num_choices):
                raise ValueError(f"{name}: got {_got(value)}; not supported; {_UNSUPPORTED[name]}")
        return self

    @property
    def num_choices(self) -> int:
        """``n``: answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def unknown_fields(self) -> list[str]:
        names = [name for name in super().unknown_fields() if name not in _UNSUPPORTED]
        wanted = self.response_format
        for prefix, part in (
            ("stream_options", self.stream_options),
            ("response_format", wanted),
            ("response_format.json_schema", wanted and wanted.json_schema),
        ):
            if part:
                names += [f"{prefix}.{name}" for name in part.unknown_fields()]
        return names

    def _common_options(self) -> SamplingOptions:
        return SamplingOptions(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=None if self.stop == [] else self.stop,
            ignore_eos=self.ignore_eos,
            logit_bias=self.logit_bias or None,
            structured_output=self._structured_output(),
        )

    def _structured_output(self) -> dict[str, Any] | None:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return self.structured_output
        if wanted.json_schema is None:
            return {"json_object": True}
        return {"json_schema": wanted.json_schema.json_schema}

    def choice_seed(self, choice: int) -> int | None:
        """Seed of answer ``choice`` to a prompt: the next whole number for each next answer.

        OpenAI's seeds may be negative, the server's are 64 bits without a sign.
        """
        return None if self.seed is None else (self.seed + choice) % (MAX_SEED + 1)


class CompletionRequest(_GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_check_prompt)]
    logprobs: int | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.echo:
            raise ValueError("echo: not supported; must be false or left out")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """One or more."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def options(self) -> SamplingOptions:
        """All but the seed. ``max_tokens`` is the server's default, 16, as OpenAI's."""
        return SamplingOptions(**self._common_options(), logprobs=self.logprobs)


class ChatMessage(TypedDict):
    """One of many, perhaps: a dictionary takes a quarter of the memory of a model's object."""

    __pydantic_config__ = ConfigDict(strict=True, extra="allow")  # type: ignore[misc]

    role: str
    content: Annotated[str, PlainValidator(_check_content)]
    """Text parts are joined."""


class ChatRequest(_GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs")
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise ValueError("max_tokens: max_completion_tokens is given too; give one of them")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """One conversation, copied without fields that nothing here reads."""
        return [[{"role": one["role"], "content": one["content"]} for one in self.messages]]

    def unknown_fields(self) -> list[str]:
        known = ChatMessage.__annotations__.keys()
        nested = {
            f"messages.{name}"
            for one in self.messages
            for name, value in one.items()
            if name not in known and value is not None
        }
        return [*super().unknown_fields(), *sorted(nested)]

    def options(self) -> SamplingOptions:
        """All but the seed. Without ``max_tokens``, as many tokens as fit behind the prompt."""
        options = SamplingOptions(
            **self._common_options(),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )
        if self.max_completion_tokens is not None:
            options["max_tokens"] = self.max_completion_tokens
        elif self.max_tokens is None:
            options["max_tokens"] = MAX_INT32
            options["clip_max_tokens"] = True
        return options
