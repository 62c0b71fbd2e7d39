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

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.errors import FastServeError

Message = Mapping[str, Any]
"""``role`` (such as system, user, assistant) and ``content``, both text, and other keys that a
template may know, such as ``tool_calls``."""

_FILE = "chat_template.jinja"
_NAME = "default"
_KEY = "chat_template"
# Repositories of models that also see images have it, for the program that prepares those.
_PROCESSORS_FILE = "chat_template.json"

# Words that occur in no template.
_QUESTION, _ANSWER = "wolpertinger", "jackalope"


class ChatTemplateError(FastServeError):
    """The template refuses the messages, for example two of the user's in a row."""


class ChatTemplate:
    """A Jinja template from a checkpoint. It runs in a sandbox and can access nothing outside.

    Args:
        special_tokens: the tokens that the template knows by name, such as ``bos_token``.

    Raises:
        ModelError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(
        cls, directory: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """The template of a checkpoint, or None if it has none.

        The first of these that exists: the file chat_template.jinja; ``chat_template`` in
        `settings`, the content of tokenizer_config.json; the same in the file chat_template.json.
        Of several named templates it is the one named "default".
        """
        if (directory / _FILE).is_file():
            return cls((directory / _FILE).read_text(encoding="utf-8"), special_tokens)
        source = _default_template(settings.get(_KEY))
        if source is None and (directory / _PROCESSORS_FILE).is_file():
            fields = json.loads((directory / _PROCESSORS_FILE).read_text(encoding="utf-8"))
            source = _default_template(fields.get(_KEY))
        return None if source is None else cls(source, special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt after which the model answers. Raises ChatTemplateError."""
        return self._render(messages, add_generation_prompt=True)

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
                answered if is_last else [*answered, asked], add_generation_prompt=False
            )
        except ChatTemplateError:
            return ""
        _, answer, behind = text.rpartition(_ANSWER)
        return behind if answer else ""

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # a template is a program and can raise anything
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


def _default_template(value: Any) -> str | None:
    """The template in a ``chat_template`` field: a text, or several texts by name."""
    if isinstance(value, list):
        value = {one["name"]: one["template"] for one in value}
    if isinstance(value, dict):
        value = value.get(_NAME)
    return value if isinstance(value, str) else None


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
