"""How the model's answers are read, and what its jobs need for that."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.call_ids import with_short_ids
from fastserve_chat.hermes_prompt import in_hermes_form, knows_tools
from fastserve_chat.parts import PartReader
from fastserve_chat.reasoning_formats import (
    REASONING_FORMATS,
    ReasoningFormat,
    is_switched_off,
    reasoning_format_of,
)
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import (
    DEFAULT_TOOL_FORMAT,
    TOOL_FORMATS,
    ToolFormat,
    tool_format_of,
)
from fastserve_client.errors import InvalidRequest
from fastserve_client.options import Prompt, RequestOptions

from fastserve_gateway.chat_conversion import TemplateVariables
from fastserve_gateway.errors import invalid
from fastserve_gateway.fleet.fleet import Fleet
from fastserve_gateway.schemas import ChatRequest

AUTO, NONE = "auto", "none"
_KEPT_S = 60.0
"""How long a description counts: the server may start anew, with another model."""
_DESCRIBE_TIMEOUT_S = 30.0
"""A server that works answers at once. Requests that wait for it hold their bodies."""
_ONE_CALL = "single tool-calls"
"""Templates of Llama 3 refuse a history with more, and say so."""
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class FormatNames:
    """The operator's choice of formats: a name, ``AUTO`` or ``NONE``.

    Raises InvalidRequest: there is no such format.
    """

    tools: str = AUTO
    reasoning: str = AUTO

    def __post_init__(self) -> None:
        for flag, name, known in (
            ("tool_format", self.tools, TOOL_FORMATS),
            ("reasoning_format", self.reasoning, REASONING_FORMATS),
        ):
            if name not in (AUTO, NONE, *known):
                names = ", ".join((AUTO, NONE, *known))
                raise InvalidRequest(f"{flag}: got {name!r}; must be one of {names}")


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """The formats of one model. A chat request becomes jobs by ``prompts`` and ``options``, and
    each answer's text becomes parts by a ``reader`` of its own.

    All raise ApiError: the request wants what the model's formats do not allow.
    """

    template: str
    """The source of its chat template."""
    tools: ToolFormat | None
    """None: requests with tools are refused."""
    reasoning: ReasoningFormat | None
    """None: all reasoning is content."""

    @classmethod
    def of(cls, template: str, names: FormatNames) -> ModelFormats:
        tools, reasoning = TOOL_FORMATS.get(names.tools), REASONING_FORMATS.get(names.reasoning)
        if names.tools == AUTO:
            told = TOOL_FORMATS[DEFAULT_TOOL_FORMAT]  # in the words of ``in_hermes_form``
            tools = tool_format_of(template) if knows_tools(template) else told
        if names.reasoning == AUTO:
            reasoning = reasoning_format_of(template)
        return cls(template, tools, reasoning)

    def unused(self, variables: TemplateVariables) -> list[str]:
        """The fields none of whose variables the chat template has."""
        return [
            field
            for field, names in variables.items()
            if not any(name in self.template for name in names)
        ]

    def prompts(self, request: ChatRequest) -> Sequence[Prompt]:
        """One conversation for the model's chat template."""
        if knows_tools(self.template):
            length = self.tools.id_length if self.tools else None
            messages = request.template_messages
            return [with_short_ids(messages, length) if length else messages]
        tools = _definitions(request) if _callable_tools(request) else []
        return [in_hermes_form(request.template_messages, tools)]

    def options(self, request: ChatRequest) -> RequestOptions:
        """All options but the seed, with the grammar that the request needs."""
        form = self._form(request)
        options = request.options()
        options.update(form.server_options())
        if form.reasoning is not None and options.get("stop"):
            opening = "" if form.is_opened else form.reasoning.open
            options["stop_not_between"] = [opening, form.reasoning.close]
        if knows_tools(self.template) and _callable_tools(request):
            options["tools"] = _definitions(request)
        return options

    def reader(self, request: ChatRequest) -> PartReader:
        """A reader for one answer to the request."""
        return self._form(request).reader()

    def splits_reasoning(self, request: ChatRequest) -> bool:
        """Whether an answer may have reasoning, whose tokens are to be counted."""
        return self._form(request).reasoning is not None

    def _form(self, request: ChatRequest) -> AnswerFormat:
        tools = _callable_tools(request)
        if tools and self.tools is None:
            raise invalid("tools", "must be left out; this gateway reads no calls")
        schema = _wanted_schema(request)
        is_text = schema is None and request.wanted_output is not None
        if tools and is_text:
            raise invalid("structured_output", "with tools it must be a JSON schema")
        choice = request.tool_choice
        if isinstance(choice, dict):
            tools = tuple(one for one in tools if one.name == choice["function"]["name"])
        variables = request.template_variables
        is_off = is_text or is_switched_off(self.template, variables, request.told_texts)
        marks = None if is_off else self.reasoning
        form = AnswerFormat(
            tool_format=self.tools or TOOL_FORMATS[DEFAULT_TOOL_FORMAT],
            tools=tools,
            needs_call=choice == "required" or isinstance(choice, dict),
            allows_several=request.parallel_tool_calls is not False
            and not isinstance(choice, dict),
            schema=schema,
            reasoning=marks,
            is_opened=marks is not None
            and request.add_generation_prompt is not False
            and not request.continue_final_message
            and marks.is_opened(self.template, variables),
        )
        if form.enforces_calls and _ONE_CALL in self.template:
            return replace(form, allows_several=False)
        return form


def _callable_tools(request: ChatRequest) -> tuple[Tool, ...]:
    """None with the choice ``none``: the model does not see the tools then."""
    if request.tool_choice == NONE:
        return ()
    functions = (tool.function for tool in request.tools)
    return tuple(
        Tool(
            one.name,
            _NO_PARAMETERS if one.parameters is None else one.parameters,
            bool(one.strict),
        )
        for one in functions
    )


def _wanted_schema(request: ChatRequest) -> dict[str, Any] | None:
    """The schema of the content; None: it has none, or another form, or one that is not valid."""
    match request.wanted_output:
        case {"json_schema": dict(schema), **others} if not others:
            return schema
        case {"json_object": True, **others} if not others:
            return {"type": "object"}
    return None


def _definitions(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools as the request has them."""
    return [tool.definition() for tool in request.tools]


@dataclass(slots=True)
class DescribedFormats:
    """The formats of the model that its servers describe."""

    fleet: Fleet
    names: FormatNames
    _formats: ModelFormats | None = field(default=None, init=False)
    _context_tokens: int = field(default=0, init=False)
    _asked_s: float = field(default=0.0, init=False)

    async def current(self) -> ModelFormats:
        """Raises ClientError: the server does not answer."""
        if self._formats is None or time.monotonic() - self._asked_s > _KEPT_S:
            model = await self.fleet.describe(timeout_s=_DESCRIBE_TIMEOUT_S)
            self._formats = ModelFormats.of(model.template_with_tools, self.names)
            self._context_tokens = model.max_model_len
            self._asked_s = time.monotonic()
        return self._formats

    async def context_tokens(self) -> int:
        """The longest that prompt and answer may be together. Raises ClientError."""
        await self.current()
        return self._context_tokens
