"""A model's chat template: turns messages into a prompt's text, as `transformers` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from fastserve_backend.checkpoints.chat_options import DEFAULT_CHAT, ChatOptions
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.errors import FastServeError

Message = Mapping[str, Any]
"""``role`` (such as system, user, assistant, tool) and ``content``, both text, and other keys that
a template may know, such as ``tool_calls``."""

_FILE = "chat_template.jinja"
_NAME = "default"
_TOOL_NAME = "tool_use"
_TOOL_FILE = f"additional_chat_templates/{_TOOL_NAME}.jinja"
_KEY = "chat_template"
# Repositories of models that also see images have it, for the program that prepares those.
_PROCESSORS_FILE = "chat_template.json"

# Transformers' names of the reasoning before an answer. Of the others it fills the first two, which
# templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Shows where the text to continue ends. By its last space one sees whether the template trims.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

# Words that occur in no template.
_QUESTION, _ANSWER = "wolpertinger", "jackalope"


class ChatTemplateError(FastServeError):
    """The template refuses the messages, for example two of the user's in a row."""


class ChatTemplate:
    """A Jinja template from a checkpoint. It runs in a sandbox and can access nothing outside.

    Args:
        source: of the template.
        special_tokens: the tokens that the template knows by name, such as ``bos_token``.
        tool_source: of a template that takes its place if there are tools.

    Raises:
        ModelError: a source is not valid Jinja.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_source: str | None = None
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
            self._tool_template = environment.from_string(tool_source or source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}") from error
        self.source = source
        self.tool_source = tool_source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(
        cls, directory: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The template of a checkpoint, or None if it has none.

        The first of these that exists: the file chat_template.jinja; ``chat_template`` in
        `settings`, the content of tokenizer_config.json; the same in the file chat_template.json.
        Of several named templates it is the one named "default", and with tools "tool_use". The
        latter may also be a file beside chat_template.jinja.
        """
        if (directory / _FILE).is_file():
            files = {_NAME: directory / _FILE, _TOOL_NAME: directory / _TOOL_FILE}
            named = {
                name: path.read_text(encoding="utf-8")
                for name, path in files.items()
                if path.is_file()
            }
        else:
            named = _named_templates(settings.get(_KEY))
            if _NAME not in named and (directory / _PROCESSORS_FILE).is_file():
                fields = json.loads((directory / _PROCESSORS_FILE).read_text(encoding="utf-8"))
                named = _named_templates(fields.get(_KEY))
        if _NAME not in named:
            return None
        return cls(named[_NAME], special_tokens, named.get(_TOOL_NAME))

    def render(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> str:
        """The prompt after which the model answers.

        Raises:
            ChatTemplateError: the template refuses the messages, or does not write the text of the
                last one as it is, which is to be continued.
        """
        messages = [_as_templates_read(message) for message in messages]
        if not options.continue_final_message:
            return self._render(messages, options)
        last = messages[-1]
        final = last["content"]
        text = self._render([*messages[:-1], {**last, "content": final + _END_MARK}], options)
        before, mark, behind = text.rpartition(_END_MARK.strip())
        if not mark or final.strip() not in text:
            raise ChatTemplateError(
                "it does not write the last message as it is, so that message cannot be continued"
            )
        return before if behind.startswith(" ") else before.rstrip()

    def text_after_answer(self, *, is_last: bool) -> str:
        """The text that the template writes after an answer; empty if it refuses a plain
        conversation.

        Args:
            is_last: whether the answer ends the conversation.
        """
        asked = {"role": "user", "content": _QUESTION}
        answered = [asked, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self._render(
                answered if is_last else [*answered, asked],
                ChatOptions(add_generation_prompt=False),
            )
        except ChatTemplateError:
            return ""
        _, answer, behind = text.rpartition(_ANSWER)
        return behind if answer else ""

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        template = self._tool_template if options.tools else self._template
        variables = {
            "documents": None,
            **self._special_tokens,
            **(options.kwargs or {}),
            "messages": messages,
            "tools": options.tools or None,
            "add_generation_prompt": options.begins_answer,
        }
        try:
            return template.render(variables)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program and can raise anything
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


def _named_templates(value: Any) -> dict[str, str]:
    """The templates in a ``chat_template`` field, which is a text, or several texts by name."""
    if isinstance(value, list):
        value = {one["name"]: one["template"] for one in value}
    named = value if isinstance(value, dict) else {_NAME: value}
    return {name: text for name, text in named.items() if isinstance(text, str)}


def _as_templates_read(message: Message) -> dict[str, Any]:
    """A copy of the message, without empty keys: templates test whether a key exists."""
    copy = {key: value for key, value in message.items() if value is not None}
    reasoning = next((copy[key] for key in _REASONING if key in copy), None)
    if reasoning is not None:
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    return copy


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the model's own words for training. Its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, but a prompt is not HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
