"""Body of ``POST /v1/responses``, and the chat completion that it asks for."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any

from fastserve_client import protocol
from pydantic import Field, PrivateAttr, model_validator

from fastserve_gateway.chat_conversion import (
    FIELDS_OF_CHAT,
    FieldNames,
    TemplateVariables,
    chat_request,
    join_system,
    named_tool,
    thinking_variables,
    with_variables,
)
from fastserve_gateway.errors import invalid
from fastserve_gateway.json_size import check_field_size
from fastserve_gateway.list_fields import IncludedField, MetadataField
from fastserve_gateway.message_parts import got_type
from fastserve_gateway.responses_input import FindItem, has_references, input_messages
from fastserve_gateway.responses_tools import ResponsesTools, function_name
from fastserve_gateway.schemas import ChatRequest, RequestBody
from fastserve_gateway.strict_fields import StrictFields
from fastserve_gateway.tool_fields import OtherToolsField

RESPONSES_FIELDS = FieldNames(
    (
        (r"messages\b(\.\d+)*", "input"),
        (r"max_completion_tokens\b", "max_output_tokens"),
        (r"response_format(\.json_schema)?\b", "text.format"),
        (r"tools\.(\d+)\.function\b", r"tools.\1"),
        (r"tool_choice\.function\b", "tool_choice"),
        (r"reasoning_effort\b", "reasoning.effort"),
    )
)
"""Of a chat completion's fields in this API."""

_FIELDS_OF_CHAT = (*FIELDS_OF_CHAT, "stop", "top_k")
_UNSUPPORTED = ("background", "conversation", "prompt")
"""Fields that would change the answer, or how it comes."""
_LOGPROBS = "message.output_text.logprobs"
"""The only value of ``include`` about something that an answer of this server can have."""
_MAX_ID_CHARS = 128
_MAX_USER_CHARS = 512
"""As of a value of ``metadata``. Both are stored with the response, and sent back."""


class TextConfig(StrictFields):
    format: dict[str, Any] | None = None


class ReasoningConfig(StrictFields):
    effort: str | None = None


class ResponsesRequest(RequestBody):
    """Body of ``POST /v1/responses``."""

    input: Any
    """Text, or a list of items. A large list is checked item by item, up to its first mistake."""
    instructions: str | None = None
    tools: OtherToolsField | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: IncludedField = None
    reasoning: ReasoningConfig | None = None
    metadata: MetadataField = None
    store: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=_MAX_ID_CHARS)] | None = None
    truncation: Any = None
    user: Annotated[str, Field(max_length=_MAX_USER_CHARS)] | None = None

    _chat: ChatRequest = PrivateAttr()
    _tools: ResponsesTools = PrivateAttr()
    _own: list[dict[str, Any]] = PrivateAttr()
    """The messages of ``input``, as far as it has them itself."""
    _left_out: list[str] = PrivateAttr()
    """Paths of what of ``input`` the model does not get."""

    @model_validator(mode="after")
    def _build_chat(self) -> ResponsesRequest:
        extra = self.model_extra or {}
        for name in _UNSUPPORTED:
            if extra.get(name):
                raise invalid(name, "not supported; must be left out")
        for name, value in (("tool_choice", self.tool_choice), ("text", self.text)):
            _check_returned(name, value.format if isinstance(value, TextConfig) else value)
        effort = self.reasoning and self.reasoning.effort
        wants_logprobs = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        self._tools = ResponsesTools(self.tools or ())
        self._left_out = []
        self._own = input_messages(self.input, self._left_out)
        fields = {
            "model": self.model,
            "stream": self.stream,
            "messages": self._messages((), self._own),
            "tools": self.tools and self._tools.chat_tools,
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text and _response_format(self.text.format),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": wants_logprobs or None,
            "top_logprobs": self.top_logprobs,
            "reasoning_effort": effort,
            **{name: extra.get(name) for name in _FIELDS_OF_CHAT},
            "chat_template_kwargs": with_variables(
                thinking_variables(effort != "none") if effort else {},
                extra.get("chat_template_kwargs"),
            ),
        }
        self._chat = chat_request(fields, self._names)
        return self

    @property
    def response_tools(self) -> ResponsesTools:
        return self._tools

    def chat(
        self,
        history: Sequence[Mapping[str, Any]],
        own: Sequence[Mapping[str, Any]] | None = None,
    ) -> ChatRequest:
        """The chat completion that it asks for.

        Args:
            history: the messages of earlier responses.
            own: those of ``input``; None: it refers to none of these responses.
        """
        own = self._own if own is None else own
        if not history and own is self._own:
            return self._chat
        return self._chat.model_copy(update={"messages": self._messages(history, own)})

    def input_messages(self, find_item: FindItem) -> list[dict[str, Any]]:
        """The messages of ``input``. Raises ApiError: ``find_item`` does."""
        if not has_references(self.input):
            return self._own
        return input_messages(self.input, [], find_item)

    def field_names(self) -> dict[str, str]:
        """See ``TaskBody``: counting tokens is no job."""
        return {protocol.TEXT_INPUT: "input"}

    def unknown_fields(self) -> list[str]:
        names = super().unknown_fields()
        for prefix, part in (("text", self.text), ("reasoning", self.reasoning)):
            names += [f"{prefix}.{name}" for name in part.unknown_fields()] if part else []
        if self.truncation not in (None, "disabled"):
            names.append("truncation")
        names += [*self._tools.left_out, *self._left_out]
        return [*names, *map(self._names.of, self._chat.unknown_fields())]

    @property
    def _names(self) -> FieldNames:
        return RESPONSES_FIELDS.with_tools(self._tools.paths)

    def read_elsewhere(self) -> Container[str]:
        return (*_FIELDS_OF_CHAT, *_UNSUPPORTED)

    def template_variables(self) -> TemplateVariables:
        effort = self.reasoning and self.reasoning.effort
        names = (*thinking_variables(True), "reasoning_effort")
        return {"reasoning.effort": names} if effort else {}

    def _messages(
        self, history: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        instructions = [{"role": "system", "content": self.instructions}]
        return join_system([*(instructions if self.instructions else ()), *history, *own])


def _check_returned(name: str, value: Any) -> None:
    """A value that comes back in the response must be JSON, which 1e999 is not once it is read."""
    try:
        check_field_size(value)
    except ValueError as error:
        raise invalid(name, str(error)) from None


def _chat_tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") not in ("function", "custom"):
        allowed = "must be 'function' or 'custom'"
        raise invalid("tool_choice", f"{got_type(choice)}; not supported; {allowed}")
    namespace, chosen = choice.get("namespace"), named_tool(choice)
    if isinstance(namespace, str):
        chosen["function"]["name"] = function_name(choice["name"], namespace)
    return chosen


def _response_format(wanted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if wanted is None or wanted.get("type") != "json_schema":
        return None if wanted is None else dict(wanted)
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
