"""A model's chat template: turns messages into a prompt's text, as `transformers` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastserve_backend.checkpoints.chat_options import DEFAULT_CHAT, ChatOptions
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.limits import TEMPLATE_BYTES, check
from fastserve_backend.checkpoints.system_messages import later_system_texts, placements
from fastserve_backend.checkpoints.template_process import (
    RefusedByTemplate,
    TemplateLimitError,
    template_processes,
)
from fastserve_backend.errors import FastServeError

Message = Mapping[str, Any]
"""``role`` (such as system, user, assistant, tool) and ``content``, both text, and other keys that
a template may know, such as ``tool_calls``."""

TEMPLATE_FILE = "chat_template.jinja"
_NAME = "default"
TOOL_TEMPLATE = "tool_use"
TOOL_TEMPLATE_FILE = f"additional_chat_templates/{TOOL_TEMPLATE}.jinja"
_KEY = "chat_template"
# Repositories of models that also see images have it, for the program that prepares those.
_PROCESSORS_FILE = "chat_template.json"
_SETTINGS_FILE = "tokenizer_config.json"

# Transformers' names of the reasoning before an answer. Of the others it fills the first two, which
# templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Shows where the text to continue ends. By its last space one sees whether the template trims.
_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

# Words that occur in no template.
_QUESTION, _ANSWER = "wolpertinger", "jackalope"


class ChatTemplateError(FastServeError):
    """The template does not give a prompt: it refuses the messages, for example two of the user's
    in a row, or it exceeds a limit. The message says which."""


class RefusedChatError(ChatTemplateError):
    """The template itself refuses the messages."""


class ChatTemplate:
    """A Jinja template from a checkpoint, which runs in a process of its own.

    Args:
        source: of the template.
        special_tokens: the tokens that the template knows by name, such as ``bos_token``.
        tool_source: of a template that takes its place if there are tools.
        name: that of its file, for messages.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        name: str = TEMPLATE_FILE,
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self._name = name
        self._special_tokens = dict(special_tokens)
        self._processes = template_processes()

    def check(self) -> None:
        """Compile the template. The first caller waits until its process has started.

        Raises:
            ModelError: a source is not valid Jinja, or exceeds a limit.
        """
        try:
            for source in {self.source, self.tool_source or self.source}:
                check(f"the size of the chat template {self._name}", len(source), TEMPLATE_BYTES)
                self._processes.render(self._name, source, None)
        except RefusedByTemplate as error:
            raise ModelError(f"the chat template {self._name} cannot be read: {error}") from error
        except TemplateLimitError as error:
            raise ModelError(str(error)) from error

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
        name = TEMPLATE_FILE
        if (directory / TEMPLATE_FILE).is_file():
            files = {
                _NAME: directory / TEMPLATE_FILE,
                TOOL_TEMPLATE: directory / TOOL_TEMPLATE_FILE,
            }
            named = {
                name: path.read_text(encoding="utf-8")
                for name, path in files.items()
                if path.is_file()
            }
        else:
            name = f"of {_SETTINGS_FILE}"
            named = _named_templates(settings.get(_KEY))
            if _NAME not in named and (directory / _PROCESSORS_FILE).is_file():
                fields = json.loads((directory / _PROCESSORS_FILE).read_text(encoding="utf-8"))
                named = _named_templates(fields.get(_KEY))
                name = _PROCESSORS_FILE
        if _NAME not in named:
            return None
        return cls(named[_NAME], special_tokens, named.get(TOOL_TEMPLATE), name)

    def render(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> str:
        """The prompt after which the model answers.

        System messages behind the first message that the template does not write are placed where
        it takes them: see `system_messages`.

        Raises:
            ChatTemplateError: the template refuses the messages, or does not write the text of the
                last one as it is, which is to be continued.
        """
        messages = [_as_templates_read(message) for message in messages]
        if not options.continue_final_message:
            return self._render_system(messages, options)
        last = messages[-1]
        final = last["content"]
        marked = {**last, "content": final + _END_MARK}
        text = self._render_system([*messages[:-1], marked], options)
        before, mark, behind = text.rpartition(_END_MARK.strip())
        if not mark or final.strip() not in text:
            raise ChatTemplateError(
                "the model's chat template does not write the last message as it is, so that "
                "message cannot be continued"
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

    def _render_system(self, messages: Sequence[Message], options: ChatOptions) -> str:
        """The first form of the conversation that the template writes with all system messages.

        Raises ChatTemplateError: it exceeds a limit, or refuses all forms, with its words about the
        given one.
        """
        texts = later_system_texts(messages)
        if not texts:
            return self._render(messages, options)
        written, errors = [], []
        for placed in placements(messages):
            try:
                text = self._render(placed, options)
            except RefusedChatError as error:
                errors.append(error)
                continue
            if all(one in text for one in texts):
                return text
            written.append(text)
        if not written:
            raise errors[0]
        return written[0]  # it has the texts in another form, such as JSON

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> str:
        source = self.tool_source if options.tools and self.tool_source else self.source
        variables = {
            "documents": None,
            **self._special_tokens,
            **(options.kwargs or {}),
            "messages": messages,
            "tools": options.tools or None,
            "add_generation_prompt": options.begins_answer,
        }
        try:
            return self._processes.render(self._name, source, json.dumps(variables))
        except RefusedByTemplate as error:
            raise RefusedChatError(f"the model's chat template refuses: {error}") from None
        except TemplateLimitError as error:
            raise ChatTemplateError(str(error)) from None
        except (
            TypeError,
            ValueError,
            RecursionError,
        ) as error:  # of what a program gave, no client
            raise ChatTemplateError(f"the messages must be valid JSON: {error}") from None


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
