"""What a client sends with a conversation, so that the model calls the tools of the demo."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastserve_client.options import Message

from fastserve_chat.call_messages import assistant_message, function_call, tool_message
from fastserve_chat.demo_tools import CALCULATOR, CLOCK, NO_TOOL


@dataclass(frozen=True, slots=True)
class Demo:
    tools: Sequence[Mapping[str, Any]]
    """OpenAI's objects."""
    tool_choice: Literal["auto", "required"]
    """For the first request of a turn."""
    examples: Sequence[Message]
    """Messages to send before the conversation, in requests with tools."""
    temperature: float | None
    """For requests with tools; None: the model's own."""

    @classmethod
    def of_model(cls, *, knows_tools: bool) -> Demo:
        """For a model whose chat template takes tools, or for any other.

        Others, such as the embedded model, have hardly seen tools. They get worked examples, choose
        a tool for each message, and are not left to chance.
        """
        if knows_tools:
            return cls((_CALCULATOR, _CLOCK), "auto", (), None)
        return cls((_CALCULATOR, _CLOCK, _NOTHING), "required", tuple(_examples()), 0.0)


def call_messages(call_id: str, name: str, arguments: str, result: str) -> tuple[Message, Message]:
    """The messages of a call, whose arguments are JSON text, and of its result."""
    call = function_call(call_id, name, arguments)
    return assistant_message("", calls=[call]), tool_message(call_id, result)


def _function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


_CALCULATOR = _function(
    CALCULATOR,
    "Computes with numbers, + - * / and parentheses.",
    expression={"type": "string", "pattern": "^[0-9+*/(). -]{1,40}$"},
)
_CLOCK = _function(CLOCK, "Tells the date and the time.")
_NOTHING = _function(NO_TOOL, "Answers without a tool.")

# Chosen by trying: the embedded model then mostly chooses the right tool for a plain question, and
# mostly says what the tool says.
_WORKED = (
    (CALCULATOR, "What is 7 * 8?", "7 * 8", "56", "7 * 8 = 56."),
    (NO_TOOL, "Hello!", "", "", "Hello! How can I help you?"),
    (
        CLOCK,
        "What time is it?",
        "",
        "14:05, Monday, 3 March 2025",
        "It is 14:05 on Monday, 3 March 2025.",
    ),
    (CALCULATOR, "How much is 250 plus 75?", "250 + 75", "325", "250 plus 75 is 325."),
    (NO_TOOL, "What is the capital of Italy?", "", "", "The capital of Italy is Rome."),
    (
        CLOCK,
        "Which day is today?",
        "",
        "09:30, Tuesday, 4 March 2025",
        "It is 09:30 on Tuesday, 4 March 2025.",
    ),
    (CALCULATOR, "What is 12 percent of 450?", "12 / 100 * 450", "54", "12 percent of 450 is 54."),
    (NO_TOOL, "Tell me a story.", "", "", "There was a queue, and it was short. The end."),
    (
        CLOCK,
        "What is the date today?",
        "",
        "18:20, Wednesday, 5 March 2025",
        "It is 18:20 on Wednesday, 5 March 2025.",
    ),
    (CALCULATOR, "Multiply 341 by 22.", "341 * 22", "7502", "341 times 22 is 7502."),
    (
        CLOCK,
        "What's the time?",
        "",
        "07:45, Thursday, 6 March 2025",
        "It is 07:45 on Thursday, 6 March 2025.",
    ),
)
"""The tool, the question, the calculator's expression, the result and the answer."""


def _examples() -> Iterator[Message]:
    for number, (name, question, expression, result, answer) in enumerate(_WORKED):
        arguments = {"expression": expression} if expression else {}
        told = f"{expression} = {result}" if expression else result
        yield {"role": "user", "content": question}
        yield from call_messages(f"example{number:02d}", name, json.dumps(arguments), told)
        yield assistant_message(answer)
