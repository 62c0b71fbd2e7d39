"""What a request wants of an answer: its grammar, and the reader of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastserve_client.options import RequestOptions

from fastserve_chat.call_reader import CallNumbers, enforced_calls, free_calls
from fastserve_chat.grammar import (
    GrammarRules,
    add_calls,
    add_calls_or_text,
    add_reasoning,
    literal,
)
from fastserve_chat.harmony import HarmonyReader
from fastserve_chat.parts import PartReader
from fastserve_chat.plain import PlainReader
from fastserve_chat.reasoning_formats import ReasoningFormat, ReasoningReader
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """The form of the answers to one request, for a model that writes calls in ``tool_format``."""

    tool_format: ToolFormat
    tools: tuple[Tool, ...] = ()
    """Those that the answer may call."""
    needs_call: bool = False
    """Whether the answer must be calls."""
    allows_several: bool = True
    """Whether it may be more than one call."""
    schema: Mapping[str, Any] | None = None
    """The schema of the content, if that must be JSON."""
    reasoning: ReasoningFormat | None = None
    """None: the answer has no reasoning."""
    is_opened: bool = False
    """Whether the prompt has the opening mark of the reasoning."""

    @property
    def enforces_calls(self) -> bool:
        """Whether calls follow a grammar. Free calls would not pass that of a schema."""
        return bool(self.tools) and (
            self.needs_call
            or not self.allows_several
            or self.schema is not None
            or any(tool.strict for tool in self.tools)
        )

    @property
    def shows_special_tokens(self) -> bool:
        """Whether the reader needs the text of special tokens."""
        reasons = self.reasoning is not None and self.reasoning.has_special_marks
        return reasons or (bool(self.tools) and self.tool_format.has_special_marks)

    def reader(self) -> PartReader:
        """A reader for one answer."""
        numbers = CallNumbers(self.tool_format.id_length)
        frame, syntax = self.tool_format.frame, self.tool_format.syntax
        if (self.tools and syntax is None) or (self.reasoning and self.reasoning.is_channel):
            return HarmonyReader(self.tools, numbers, is_enforced=self.enforces_calls)
        reader: PartReader = PlainReader()
        call_marks: tuple[str, ...] = ()
        if self.enforces_calls:
            reader = enforced_calls(frame, numbers)
        elif self.tools and syntax is not None:
            reader, call_marks = free_calls(syntax, self.tools, numbers), syntax.marks
        if self.reasoning is None:
            return reader
        return ReasoningReader(self.reasoning, self.is_opened, reader, call_marks)

    def server_options(self) -> RequestOptions:
        """The options of the server that this form needs."""
        options = RequestOptions()
        if (grammar := self.grammar()) is not None:
            options["structured_output"] = {"grammar": grammar}
        if self.shows_special_tokens:
            options["skip_special_tokens"] = False
        return options

    def grammar(self) -> str | None:
        """llguidance's Lark; None: no calls are enforced, and nothing comes before JSON."""
        if not self.enforces_calls and (self.schema is None or self.reasoning is None):
            return None
        rules = GrammarRules()
        answers = []
        if self.schema is not None and not self.needs_call:
            before = literal(self.reasoning.before_content) if self.reasoning else ""
            content = rules.add_json("content", self.schema)
            answers.append(f"{before} {content}")
        if self.enforces_calls:
            answers.append(self._add_calls(rules))
        rules.add("answers", " | ".join(answers))
        before = add_reasoning(rules, self.reasoning, self.is_opened) if self.reasoning else ""
        rules.add("start", f"{before} answers")
        return rules.text()

    def _add_calls(self, rules: GrammarRules) -> str:
        tools = [self._enforced(tool) for tool in self.tools]
        frame, allows_several = self.tool_format.frame, self.allows_several
        if self.needs_call or self.schema is not None:
            return add_calls(rules, frame, tools, allows_several=allows_several)
        not_first = self.reasoning.open if self.reasoning and not self.is_opened else None
        return add_calls_or_text(
            rules, frame, tools, allows_several=allows_several, not_first=not_first
        )

    def _enforced(self, tool: Tool) -> Tool:
        is_free = not tool.strict and not self.needs_call
        return replace(tool, parameters={}) if is_free else tool
