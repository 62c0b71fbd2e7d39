"""How models mark their reasoning. Each way is an entry of ``REASONING_FORMATS``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastserve_chat.call_syntax import partial_suffix
from fastserve_chat.parts import AnswerPart, CallStart, PartReader, Reasoning

_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates switch reasoning on and off."""
_ON, _OFF = "/think", "/no_think"
"""Words for it in messages, which some templates look for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    open: str
    close: str
    template_mark: str
    """A chat template that has it is of this format."""
    before_answer: str = ""
    """Between the reasoning and the calls or the content, which a grammar has to allow."""
    before_content: str = ""
    """What a grammar has to put before content."""
    not_inside: str = ""
    """A regular expression of what a grammar keeps out of the reasoning: other marks."""
    has_special_marks: bool = False
    """Whether the marks are special tokens, which have no text unless the request wants it."""
    is_channel: bool = False
    """Whether ``HarmonyReader`` reads it."""

    def is_opened(self, template: str, variables: Mapping[str, Any]) -> bool:
        """Whether the prompt itself has the opening mark at its end.

        Args:
            template: the source of the chat template.
            variables: what the request gives it.
        """
        _, found, ending = template.rpartition("add_generation_prompt")
        texts = re.findall(r"'[^']*'|\"[^\"]*\"", ending)
        texts.append(re.sub(r"\{[{%#].*?[}%#]\}", "", ending, flags=re.DOTALL))
        if not found or not any(self.open in text.split(self.close)[-1] for text in texts):
            return False
        for switch in _SWITCHES:
            if switch in variables and _mentions(template, switch):
                return bool(variables[switch])
        return not any(
            f"{switch} is true" in ending
            or (_mentions(ending, switch) and f"set {switch} = false" in template)
            for switch in _SWITCHES
        )


def is_switched_off(
    template: str, variables: Mapping[str, Any], texts: Callable[[], Sequence[str]]
) -> bool:
    """Whether a request switches reasoning off, in a way that the chat template knows.

    Args:
        texts: returns what system and user say; the last of them that has a word for it counts.
    """
    if _OFF in template:
        for text in reversed(texts()):
            if _OFF in text or _ON in text:
                return _OFF in text
    return any(
        variables.get(switch) is False and _mentions(template, switch) for switch in _SWITCHES
    )


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


# The order counts: a template is of the first format that fits it.
REASONING_FORMATS = {
    "harmony": ReasoningFormat(
        open="<|channel|>analysis<|message|>",
        close="<|end|>",
        template_mark="<|channel|>",
        before_answer="<|start|>assistant",
        before_content="<|channel|>final<|message|>",
        not_inside=r"<\|(start|channel|call|return)\|>",
        has_special_marks=True,
        is_channel=True,
    ),
    "mistral": ReasoningFormat(
        open="[THINK]", close="[/THINK]", template_mark="[THINK]", has_special_marks=True
    ),
    "think": ReasoningFormat(open="<think>", close="</think>", template_mark="<think>"),
    "granite": ReasoningFormat(
        open="Here is my thought process:",
        close="Here is my response:",
        template_mark="Here is my thought process:",
    ),
}


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """The format of a model with this chat template; None: it does not reason."""
    for known in REASONING_FORMATS.values():
        if known.template_mark in template:
            return known
    return None


class ReasoningReader:
    """A ``PartReader`` that reads reasoning at the answer's begin, and leaves the rest to another.

    White space around the reasoning is left out. Without a closing mark, all is reasoning, but
    for calls: some models forget the mark, and their calls are meant.

    Args:
        is_opened: the prompt has the opening mark already.
        rest: reads what comes behind the reasoning.
        call_marks: texts at which calls may begin. What follows one is withheld until the reasoning
            ends, or the answer does.
    """

    def __init__(
        self,
        marks: ReasoningFormat,
        is_opened: bool,
        rest: PartReader,
        call_marks: tuple[str, ...] = (),
    ) -> None:
        self._open, self._close = marks.open, marks.close
        self._call_marks = call_marks
        self._num_withheld = 0
        """Characters of the text that begin with a mark of calls, and have no closing mark."""
        self._is_opened = is_opened
        self._rest = rest
        self._text = ""
        self._space = ""
        """White space behind the reasoning, before the text."""
        self._has_text = False
        self._step: Callable[[], list[AnswerPart]] = self._begin

    def read(self, text: str) -> list[AnswerPart]:
        self._text += text
        return self._step()

    def end(self) -> list[AnswerPart]:
        text, self._text = self._text, ""
        if self._step == self._reason and self._num_withheld:
            parts = [*self._rest.read(text), *self._rest.end()]
            has_calls = any(isinstance(part, CallStart) for part in parts)
            return parts if has_calls else [Reasoning(self._space + text)]
        if self._step == self._reason:
            return [Reasoning(self._space + text)] if text else []
        if self._step == self._begin and self._is_opened:
            return [Reasoning(text)] if text.strip() else []
        return [*self._rest.read(text), *self._rest.end()]

    def _begin(self) -> list[AnswerPart]:
        text = self._text.lstrip()
        if text.startswith(self._open):
            self._text = text.removeprefix(self._open)
        elif self._open.startswith(text):
            return []
        elif not self._is_opened:
            return self._pass_on()
        self._step = self._reason
        return self._reason()

    def _reason(self) -> list[AnswerPart]:
        # What is withheld is not searched again for each token.
        place = self._text.find(self._close, max(0, self._num_withheld - len(self._close)))
        found = place >= 0
        if found:
            before, behind = self._text[:place], self._text[place + len(self._close) :]
        elif self._num_withheld:
            self._num_withheld = len(self._text)
            return []
        else:
            length = self._reasoning_length()
            before, behind = self._text[:length], self._text[length:]
        self._text = behind
        text = self._space + before
        if not self._has_text:
            text = text.lstrip()
        reasoning = text.rstrip()
        self._has_text |= bool(reasoning)
        self._space = text[len(reasoning) :]
        parts: list[AnswerPart] = [Reasoning(reasoning)] if reasoning else []
        if found:
            self._step = self._skip_space
            parts += self._skip_space()
        return parts

    def _reasoning_length(self) -> int:
        """Characters that are reasoning, whatever follows them."""
        found = [place for mark in self._call_marks if (place := self._text.find(mark)) >= 0]
        if found:
            self._num_withheld = len(self._text) - min(found)
            return min(found)
        return len(self._text) - partial_suffix(self._text, (self._close, *self._call_marks))

    def _skip_space(self) -> list[AnswerPart]:
        self._text = self._text.lstrip()
        return self._pass_on() if self._text else []

    def _pass_on(self) -> list[AnswerPart]:
        self._step = self._pass_on
        text, self._text = self._text, ""
        return self._rest.read(text)
