"""The requests of one turn of a conversation in which the model may call the demo's tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastserve_client.options import Message, RequestOptions

from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.demo import Demo, call_messages
from fastserve_chat.demo_tools import NO_TOOL, run_demo_tool
from fastserve_chat.hermes_prompt import in_hermes_form, knows_tools
from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, PartReader
from fastserve_chat.reasoning_formats import reasoning_format_of
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import tool_format_of

_MOST_ROUNDS = 4
"""Requests with tools in one turn. The one after them must answer."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    messages: Sequence[Message]
    options: RequestOptions
    """Options of the server. The user's own beat them."""
    reader: PartReader


@dataclass(frozen=True, slots=True)
class DoneCall:
    """A call that was run."""

    name: str
    result: str


class DemoTurn:
    """Decides what to ask the model next, until it answers without a call.

    Args:
        template: the source of the model's chat template.
        conversation: ends with the user's message.
    """

    def __init__(self, template: str, conversation: Sequence[Message]) -> None:
        self._template = template
        self._knows_tools = knows_tools(template)
        self._demo = Demo.of_model(knows_tools=self._knows_tools)
        self._conversation = conversation
        self._num_rounds = 0
        self._needs_no_tool = False
        self.messages: list[Message] = []
        """The calls of the turn, and their results."""

    def next_request(self) -> TurnRequest:
        must_call = self._demo.tool_choice == "required" and self._num_rounds == 0
        may_call = must_call or (
            self._demo.tool_choice == "auto" and self._num_rounds < _MOST_ROUNDS
        )
        self._num_rounds += 1
        reasoning = reasoning_format_of(self._template)
        form = AnswerFormat(
            tool_format=tool_format_of(self._template),
            tools=tuple(map(_tool, self._demo.tools)) if may_call else (),
            needs_call=must_call,
            allows_several=not must_call,
            reasoning=reasoning,
            is_opened=reasoning is not None and reasoning.is_opened(self._template, {}),
        )
        options = form.server_options()
        if self._needs_no_tool:
            return TurnRequest(_without_calls(self._conversation), options, form.reader())
        messages = [*self._conversation, *self.messages]
        options["temperature"] = self._demo.temperature
        if self._knows_tools:
            options["tools"] = list(self._demo.tools)
            return TurnRequest(messages, options, form.reader())
        # Behind the system's message, which must be the first.
        place = int(messages[0]["role"] == "system")
        messages[place:place] = self._demo.examples
        return TurnRequest(in_hermes_form(messages, self._demo.tools), options, form.reader())

    def on_answer(self, parts: Iterable[AnswerPart]) -> list[DoneCall]:
        """Runs the calls of an answer.

        Returns:
            The calls. An empty list ends the turn.
        """
        calls: list[CallStart] = []
        arguments: list[str] = []
        for part in parts:
            if isinstance(part, CallStart):
                calls.append(part)
                arguments.append("")
            elif isinstance(part, CallArguments):
                arguments[part.index] += part.text
        done = []
        for call, text in zip(calls, arguments, strict=True):
            result = run_demo_tool(call.name, text)
            self.messages += call_messages(call.id, call.name, text, result)
            done.append(DoneCall(call.name, result))
        self._needs_no_tool = any(call.name == NO_TOOL for call in calls)
        return done


def _tool(definition: Message) -> Tool:
    function = definition["function"]
    return Tool(function["name"], function["parameters"])


def _without_calls(messages: Iterable[Message]) -> list[Message]:
    return [
        message for message in messages if message["role"] != "tool" and "tool_calls" not in message
    ]
