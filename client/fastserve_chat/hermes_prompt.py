"""Conversations with tools for chat templates that know none, in the manner of Hermes models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastserve_client.options import Message

_INSTRUCTIONS = """\
You can call these tools. Each line describes one in JSON.
<tools>
{tools}
</tools>
To call a tool, write its name and its arguments in JSON, in this form:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def knows_tools(template: str) -> bool:
    """Whether a chat template has a place for tools."""
    return "tools" in template


def in_hermes_form(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Messages without fields of tools. Tools are text of the system message, calls of the
    assistant's messages, and their results of the user's."""
    told: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        plain = _result(message) if is_result else _plain(message)
        if is_result and after_result:
            before = told.pop()
            plain = {**before, "content": f"{before['content']}\n{plain['content']}"}
        told.append(plain)
        after_result = is_result
    if not tools:
        return told
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    if told[0]["role"] == "system":
        first = told.pop(0)
        text = f"{first['content']}\n\n{text}"
    return [{"role": "system", "content": text}, *told]


def _result(message: Message) -> Message:
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    return {"role": "user", "content": text}


def _plain(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    parts = [message["content"]] if message["content"] else []
    parts += [_call(call) for call in message["tool_calls"]]
    return {"role": message["role"], "content": "\n".join(parts)}


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = {}
    name = json.dumps(function.get("name"), ensure_ascii=False)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
