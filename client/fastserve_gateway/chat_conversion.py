"""Turns requests of other APIs into chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import dropwhile
from typing import Any

from pydantic import ValidationError

from fastserve_gateway.errors import from_validation, invalid
from fastserve_gateway.schemas import ChatRequest

PARAGRAPH = "\n\n"
"""Between texts that a template takes as one."""
FIELDS_OF_CHAT = (
    *("min_p", "seed", "stop_token_ids", "min_tokens", "ignore_eos", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("bad_words", "allowed_token_ids", "truncate_prompt_tokens", "skip_special_tokens"),
    *("structured_output", "chat_template_kwargs"),
)
"""Fields that only chat completions have. The other APIs take them with the same meaning."""

TemplateVariables = dict[str, tuple[str, ...]]
"""For each field that is for the chat template: the variables that it becomes."""


class FieldNames:
    """Names of an API's fields for those of chat completions.

    Args:
        patterns: regular expressions for the beginning of a path in a chat completion's body, and
            what stands there in the other API.
        tools: the paths of the chat completion's tools in the request. None: the same.
    """

    def __init__(
        self, patterns: Sequence[tuple[str, str]], tools: Sequence[str] | None = None
    ) -> None:
        self._patterns = patterns
        self._tools = tools

    def with_tools(self, tools: Sequence[str]) -> FieldNames:
        """The same for a request of which some tools are left out."""
        return FieldNames(self._patterns, tools)

    def of(self, path: str) -> str:
        for pattern, new in self._patterns:
            if match := re.match(pattern, path):
                path = match.expand(new) + path[match.end() :]
                break
        if self._tools is None:
            return path
        tools = self._tools
        return re.sub(r"^tools\.(\d+)", lambda found: tools[int(found[1])], path)


def chat_request(fields: Mapping[str, Any], names: FieldNames) -> ChatRequest:
    """A chat completion with these fields, without those that are None.

    Raises:
        ApiError: a field is wrong (400); the error has the other API's name for it.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(given)
    except ValidationError as error:
        found = from_validation(error)
        path = found.body["error"]["param"]
        if path is None:
            raise found from None
        raise invalid(names.of(path), str(found).removeprefix(f"{path}: ")) from None


def thinking_variables(thinks: bool) -> dict[str, bool]:
    """The variables by which templates let the model think first, or not."""
    return {"enable_thinking": thinks, "thinking": thinks}


def with_variables(variables: Mapping[str, Any], kwargs: Any) -> Any:
    """The field ``chat_template_kwargs``, whose own variables come first. What is no object stays
    as it is, to be refused."""
    if kwargs is None:
        return variables or None
    return {**variables, **kwargs} if isinstance(kwargs, dict) else kwargs


def join_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Joins the system messages at the beginning to one: most templates take only one."""
    rest = list(dropwhile(lambda one: one["role"] == "system", messages))
    system = [one["content"] for one in messages[: len(messages) - len(rest)]]
    return [{"role": "system", "content": PARAGRAPH.join(system)}, *rest] if system else rest


def named_tool(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The ``tool_choice`` for a choice with the tool's ``name``.

    Raises ApiError: the name is no text (400). A chat completion's error would show its own form.
    """
    name = choice.get("name")
    if not isinstance(name, str):
        raise invalid("tool_choice.name", "must be text")
    return {"type": "function", "function": {"name": name}}


def text_field(item: Mapping[str, Any], name: str, path: str) -> str:
    """A field that must be text. Raises ApiError (400).

    Args:
        path: of the item in the request.
    """
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{path}.{name}", "must be text")
    return value
