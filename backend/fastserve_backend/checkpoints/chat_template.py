"""A model's chat template: messages to the text of a prompt, as `transformers` renders it."""

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
"""``role`` (such as system, user, assistant) and ``content``, both text; also what else a template
knows, such as ``tool_calls``."""

_FILE = "chat_template.jinja"

# Words that no template writes by itself.
_QUESTION, _ANSWER = "wolpertinger", "jackalope"


class ChatTemplateError(FastServeError):
    """The template refuses these messages, such as two of the user's in a row."""


class ChatTemplate:
    """A Jinja template from a checkpoint, run in a sandbox without access to anything.

    Args:
        special_tokens: what the template knows by name, such as ``bos_token``.

    Raises ModelError for a template that is no Jinja.
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
        self._special_tokens = dict(special_tokens)

    @classmethod
    def load(
        cls, directory: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """That of a checkpoint: chat_template.jinja, or ``chat_template`` in `settings`, which is
        tokenizer_config.json. None where there is none."""
        if (directory / _FILE).is_file():
            return cls((directory / _FILE).read_text(encoding="utf-8"), special_tokens)
        source = settings.get("chat_template")
        if isinstance(source, list):  # several by name, of which other programs choose
            source = next((one["template"] for one in source if one["name"] == "default"), None)
        return cls(source, special_tokens) if isinstance(source, str) else None

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt after which the model answers. Raises ChatTemplateError."""
        return self._render(messages, add_generation_prompt=True)

    def behind_answer(self, *, is_last: bool) -> str:
        """What it writes behind an answer, which is the conversation's last or not; nothing where
        it takes no plain conversation."""
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
        except Exception as error:  # a template can fail in as many ways as a program
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


class _GenerationBlock(Extension):
    """``{% generation %}`` marks the model's own words for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

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
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
