"""What a chat template gets beside the messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_backend.errors import InvalidRequestError

# The tools of some dozens of servers of tools. All other requests wait while a template lists them.
MAX_TOOLS = 1024
MAX_TOOLS_CHARS = 512 << 10
# Enough for documents that a template puts into the prompt.
MAX_KWARGS_CHARS = 256 << 10

_KWARGS = "chat_template_kwargs"
# Variables that have request fields of their own, and two names that other servers refuse too: a
# request cannot bring a template.
_TAKEN = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("chat_template", "tokenize"),
)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a conversation; errors name the request's fields.

    Raises:
        InvalidRequestError: one of them cannot be used, or two of them exclude each other.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    """Descriptions of tools, as in OpenAI's API. An empty list counts as None."""
    kwargs: Mapping[str, Any] | None = None
    """Further variables of the template. They beat the special tokens of the same names."""
    add_generation_prompt: bool | None = None
    """The prompt ends with the beginning of the model's answer. None: unless it goes on with the
    last message."""
    continue_final_message: bool = False
    """The prompt ends inside the last message, which is the assistant's."""

    def __post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            allowed = "must be false with add_generation_prompt"
            raise InvalidRequestError("continue_final_message", True, allowed)
        if self.tools is not None:
            _check_tools(self.tools)
        if self.kwargs is not None:
            _check_kwargs(self.kwargs)

    @property
    def begins_answer(self) -> bool:
        """The value of ``add_generation_prompt`` for the template."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


DEFAULT_CHAT = ChatOptions()


def _check_tools(tools: object) -> None:
    if not isinstance(tools, list | tuple):
        raise InvalidRequestError("tools", type(tools).__name__, "must be a list of objects")
    if len(tools) > MAX_TOOLS:  # before any of them is looked at
        raise InvalidRequestError("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise InvalidRequestError(f"tools[{index}]", type(tool).__name__, "must be an object")
    _check_size("tools", tools, MAX_TOOLS_CHARS)


def _check_kwargs(kwargs: object) -> None:
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise InvalidRequestError(_KWARGS, type(kwargs).__name__, "must be an object")
    for key in _TAKEN:
        if key in kwargs:
            allowed = "no variable of this name may be given; not allowed are " + ", ".join(_TAKEN)
            raise InvalidRequestError(_KWARGS, key, allowed)
    _check_size(_KWARGS, kwargs, MAX_KWARGS_CHARS)


def _check_size(field: str, value: object, most: int) -> None:
    try:
        size = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(field, type(value).__name__, "must be valid JSON") from None
    if size > most:
        allowed = f"at most {most} characters of JSON"
        raise InvalidRequestError(field, f"{size} characters", allowed)
