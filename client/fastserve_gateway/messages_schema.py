"""Bodies of ``POST /v1/messages`` and of its ``count_tokens``, as chat completions."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Annotated, Any

from fastserve_client import protocol
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

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
from fastserve_gateway.chat_message import MAX_MESSAGES
from fastserve_gateway.errors import invalid
from fastserve_gateway.list_fields import StopSequencesField
from fastserve_gateway.message_parts import got_type
from fastserve_gateway.messages_input import conversation, system_text
from fastserve_gateway.schemas import ChatRequest, RequestBody
from fastserve_gateway.strict_fields import StrictFields
from fastserve_gateway.tool_fields import OtherToolsField

MESSAGES_FIELDS = FieldNames(
    (
        (r"messages\b.*", "messages"),
        (r"stop\b", "stop_sequences"),
        (r"response_format(\.json_schema)?\b", "output_config.format"),
        (r"tools\.(\d+)\.function\.parameters\b", r"tools.\1.input_schema"),
        (r"tools\.(\d+)\.function\b", r"tools.\1"),
        (r"tool_choice\.function\b", "tool_choice"),
        (r"reasoning_effort\b", "output_config.effort"),
    )
)
"""Of a chat completion's fields in this API."""

# The answer is the same without them.
_HINTS = ("cache_control", "metadata")
_TOOL_HINTS = ("type", "cache_control", "eager_input_streaming")
_ANTHROPICS = "of Anthropic"
"""The type of tools that Anthropic's servers run, which chat completions leave out."""
_BUDGET = "thinking_budget"
_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
"""The types of ``thinking``."""
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _openai_tier(value: Any) -> Any:
    return "default" if value == "standard_only" else value


class OutputConfig(StrictFields):
    format: dict[str, Any] | None = None
    effort: str | None = None


class Thinking(StrictFields):
    type: str
    budget_tokens: int | None = None


class ConversationRequest(RequestBody):
    """Body of ``POST /v1/messages/count_tokens``, and most of that of ``POST /v1/messages``."""

    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """A large list is checked message by message, up to its first mistake."""
    service_tier: Annotated[str | None, BeforeValidator(_openai_tier)] = None
    system: Any = None
    tools: OtherToolsField | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    """The earlier name of ``output_config.format``."""

    _chat: ChatRequest = PrivateAttr()
    _left_out: list[str] = PrivateAttr()
    """Paths of what of the conversation the model does not get."""

    @model_validator(mode="after")
    def _build_chat(self) -> ConversationRequest:
        self._left_out = []
        self._chat = chat_request(self._chat_fields(), MESSAGES_FIELDS)
        return self

    @property
    def chat(self) -> ChatRequest:
        """The chat completion that it asks for."""
        return self._chat

    def field_names(self) -> dict[str, str]:
        """See ``TaskBody``: counting tokens is no job."""
        return {protocol.TEXT_INPUT: "messages"}

    def unknown_fields(self) -> list[str]:
        names = super().unknown_fields()
        for prefix, part in (("thinking", self.thinking), ("output_config", self.output_config)):
            names += [f"{prefix}.{name}" for name in part.unknown_fields()] if part else []
        if self.thinking is not None and self._thinks is None:
            names.append("thinking.type")
        names += self._left_out
        return [*names, *map(MESSAGES_FIELDS.of, self._chat.unknown_fields())]

    def read_elsewhere(self) -> Container[str]:
        return (*_HINTS, *FIELDS_OF_CHAT)

    def template_variables(self) -> TemplateVariables:
        found: TemplateVariables = {}
        if self.thinking is not None:
            if self._thinks is not None:
                found["thinking"] = tuple(thinking_variables(True))
            if self.thinking.budget_tokens is not None:
                found["thinking.budget_tokens"] = (_BUDGET,)
        if self.output_config is not None and self.output_config.effort is not None:
            found["output_config.effort"] = ("reasoning_effort",)
        return found

    def _chat_fields(self) -> dict[str, Any]:
        extra = self.model_extra or {}
        messages = conversation(self.messages, self._left_out)
        # The answer goes on with the last message if that is the assistant's.
        goes_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if self.system is not None and (text := system_text(self.system, self._left_out)):
            messages.insert(0, {"role": "system", "content": text})
        return {
            "model": self.model,
            "stream": self.stream,
            "messages": join_system(messages),
            "tools": self.tools
            and [_chat_tool(tool, f"tools.{place}") for place, tool in enumerate(self.tools)],
            "tool_choice": _chat_tool_choice(self.tool_choice),
            "parallel_tool_calls": False if _forbids_several_calls(self.tool_choice) else None,
            "response_format": _response_format(
                (self.output_config and self.output_config.format) or self.output_format
            ),
            "continue_final_message": goes_on or None,
            "reasoning_effort": self.output_config and self.output_config.effort,
            **{name: extra.get(name) for name in FIELDS_OF_CHAT},
            "chat_template_kwargs": with_variables(
                self._variables(), extra.get("chat_template_kwargs")
            ),
        }

    def _variables(self) -> dict[str, Any]:
        """The variables of the chat template that ``thinking`` stands for."""
        variables: dict[str, Any] = {}
        if self._thinks is not None:
            variables |= thinking_variables(self._thinks)
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            variables[_BUDGET] = self.thinking.budget_tokens
        return variables

    @property
    def _thinks(self) -> bool | None:
        """Whether the model is to think first; None: the request does not say."""
        return None if self.thinking is None else _THINKS.get(self.thinking.type)


class MessagesRequest(ConversationRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: int
    stop_sequences: StopSequencesField = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def _chat_fields(self) -> dict[str, Any]:
        return {
            **super()._chat_fields(),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            # The texts of the tokens say which of several sequences ended the answer.
            "logprobs": True if self.stop_sequences else None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


def _chat_tool(tool: Mapping[str, Any], path: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        return {"type": _ANTHROPICS if isinstance(tool["type"], str) else tool["type"]}
    function = {name: value for name, value in tool.items() if name not in _TOOL_HINTS}
    if "input_schema" not in function:
        raise invalid(f"{path}.input_schema", "must be given")
    function["parameters"] = function.pop("input_schema")
    return {"type": "function", "function": function}


def _chat_tool_choice(choice: Mapping[str, Any] | None) -> Any:
    if choice is None:
        return None
    if choice.get("type") == "tool":
        return named_tool(choice)
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice", f"{got_type(choice)}; must be auto, any, tool or none")
    return _CHOICES[kind]


def _forbids_several_calls(choice: Mapping[str, Any] | None) -> bool:
    value = None if choice is None else choice.get("disable_parallel_tool_use")
    if value is not None and not isinstance(value, bool):
        raise invalid("tool_choice.disable_parallel_tool_use", "must be true or false")
    return value is True


def _response_format(wanted: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Anthropic's formats have no name, which chat completions need."""
    if wanted is None:
        return None
    schema = {name: value for name, value in wanted.items() if name != "type"}
    return {"type": wanted.get("type"), "json_schema": {"name": "answer", **schema}}
