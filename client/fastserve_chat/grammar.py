"""Grammars that an answer with enforced calls follows, in llguidance's variant of Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastserve_client.schema_formats import without_unknown

from fastserve_chat.call_syntax import CallFrame
from fastserve_chat.reasoning_formats import ReasoningFormat
from fastserve_chat.tool import Tool

# As between the parts of other JSON: see the server's compiler of grammars.
_OPTIONS = {"whitespace_pattern": r"[ \n\t]{0,24}"}
_SPACE = r"/[ \n]{1,8}/"
_ANYTHING = r"/(.|\n)*/"


class GrammarRules:
    """The rules of one grammar. Some of them are always there."""

    def __init__(self) -> None:
        self._rules = [f"SPACE: {_SPACE}"]

    def add(self, name: str, body: str) -> str:
        """Returns the name."""
        self._rules.append(f"{name}: {body}")
        return name

    def add_json(self, name: str, schema: Mapping[str, Any]) -> str:
        options = {"x-guidance": _OPTIONS}
        return self.add(name, "%json " + json.dumps({**without_unknown(schema), **options}))

    def text(self) -> str:
        return "\n".join(self._rules)


def literal(text: str) -> str:
    """A text, and nothing if it is empty."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def add_reasoning(rules: GrammarRules, marks: ReasoningFormat, is_opened: bool) -> str:
    """The reasoning before an answer, with the white space behind it."""
    without = f" & ~/(.|\\n)*{marks.not_inside}(.|\\n)*/" if marks.not_inside else ""
    rules.add("THOUGHT", f"{_ANYTHING}{without}")
    rules.add(f"thought[suffix={literal(marks.close)}]", "THOUGHT")
    behind = f"{literal(marks.before_answer)} SPACE?"
    if is_opened:
        return rules.add("reasoning", f"thought {behind}")
    return rules.add("reasoning", f"({literal(marks.open)} thought {behind})?")


def add_calls(
    rules: GrammarRules,
    frame: CallFrame,
    tools: Sequence[Tool],
    *,
    allows_several: bool,
    skips: str = "",
) -> str:
    """One call or more.

    Args:
        skips: the beginning of the first call's text, if that is there already.
    """
    for index, tool in enumerate(tools):
        rules.add_json(f"arguments_{index}", {**tool.parameters, "type": "object"})

    def call(before_name: str) -> str:
        return " | ".join(
            f"{literal(before_name + tool.name + frame.after_name)} arguments_{index}"
            for index, tool in enumerate(tools)
        )

    rules.add("first_call", call(frame.opening.removeprefix(skips)))
    body = "first_call"
    if allows_several:
        rules.add("next_call", call(frame.after_arguments + frame.between + frame.before_name))
        body += " next_call*"
    return rules.add("calls", f"{body} {literal(frame.after_arguments + frame.end)}")


def add_calls_or_text(
    rules: GrammarRules,
    frame: CallFrame,
    tools: Sequence[Tool],
    *,
    allows_several: bool,
    not_first: str | None = None,
) -> str:
    """Free text in which calls are as the tools' schemas say.

    Args:
        not_first: what the text cannot begin with, because it begins the reasoning.
    """
    if not frame.mark:
        calls = add_calls(rules, frame, tools, allows_several=allows_several)
        text = rf"/([ \n\t]*[^ \n\t\{frame.opening[0]}](.|\n)*)?/"
        if not_first:
            text += rf" & ~/[ \n\t]*{re.escape(not_first)}(.|\n)*/"
        rules.add("TEXT", text)
        return rules.add("answer", f"{calls} | TEXT")
    rules.add(f"text_and_mark[suffix={literal(frame.mark)}]", _ANYTHING)
    calls = add_calls(rules, frame, tools, allows_several=allows_several, skips=frame.mark)
    rules.add("text", _ANYTHING)  # the rule with the mark has precedence
    if allows_several:
        return rules.add("answer", f"(text_and_mark {calls})* text")
    return rules.add("answer", f"text_and_mark {calls} | text")
