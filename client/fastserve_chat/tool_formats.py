"""The formats in which models write calls of tools. Each is an entry of ``TOOL_FORMATS``."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_chat.call_syntax import NAME, SPACE, VALUE, WORD, CallFrame, CallSyntax


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    template_marks: tuple[str, ...]
    """A chat template that has one of them is of this format."""
    frame: CallFrame
    """How calls are written that a grammar enforces."""
    syntax: CallSyntax | None
    """How models write calls by themselves; None: ``HarmonyReader`` reads them."""
    has_special_marks: bool = False
    """Whether the marks are special tokens, which have no text unless the request wants it."""
    id_length: int | None = None
    """Letters and digits of a call's id; None: OpenAI's form of ids."""


# The order counts: a template is of the first format that fits it.
TOOL_FORMATS = {
    "harmony": ToolFormat(
        template_marks=("<|channel|>commentary", "to=functions."),
        syntax=None,
        # The token behind the arguments ends the answer.
        frame=CallFrame(
            mark="<|channel|>commentary to=functions.",
            before_name="<|channel|>commentary to=functions.",
            after_name=" <|constrain|>json<|message|>",
        ),
        has_special_marks=True,
    ),
    # Templates of newer models have [ARGS], those of older ones a list.
    "mistral": ToolFormat(
        template_marks=("[ARGS]",),
        syntax=CallSyntax(
            (
                ("[TOOL_CALLS]", SPACE, NAME, "[ARGS]", SPACE, VALUE, "{"),
                ("[TOOL_CALLS]", SPACE, NAME, "[CALL_ID]", WORD, "[ARGS]", SPACE, VALUE, "{"),
                ("[TOOL_CALLS]", SPACE, NAME, VALUE, "{"),
                ("[TOOL_CALLS]", SPACE, VALUE, "["),
            )
        ),
        frame=CallFrame(mark="[TOOL_CALLS]", before_name="[TOOL_CALLS]", after_name="[ARGS]"),
        has_special_marks=True,
        id_length=9,
    ),
    "mistral_list": ToolFormat(
        template_marks=("[TOOL_CALLS]",),
        syntax=CallSyntax((("[TOOL_CALLS]", SPACE, VALUE, "["),)),
        frame=CallFrame(
            mark="[TOOL_CALLS]",
            begin="[TOOL_CALLS] [",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            between=", ",
            end="]",
        ),
        has_special_marks=True,
        id_length=9,
    ),
    "deepseek": ToolFormat(
        template_marks=("<｜tool▁call▁begin｜>",),
        syntax=CallSyntax(
            tuple(
                (*begin, "<｜tool▁call▁begin｜>", *name, SPACE, VALUE, "{")
                for begin in ((), ("<｜tool▁calls▁begin｜>", SPACE))
                for name in (
                    ("function<｜tool▁sep｜>", NAME, SPACE, "```json"),
                    (NAME, "<｜tool▁sep｜>"),
                )
            ),
            closers=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
        frame=CallFrame(
            mark="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜>",
            before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            after_name="\n```json\n",
            after_arguments="\n```<｜tool▁call▁end｜>",
            between="\n",
            end="<｜tool▁calls▁end｜>",
        ),
        has_special_marks=True,
    ),
    "qwen3_coder": ToolFormat(
        template_marks=("<function=",),
        syntax=CallSyntax(
            (
                ("<tool_call>", SPACE, "<function=", NAME, ">", VALUE),
                ("<function=", NAME, ">", VALUE),
            ),
            value="xml",
            terminator="</function>",
            closers=("</tool_call>",),
        ),
        frame=CallFrame(
            mark="<tool_call>",
            before_name='<tool_call>\n{"name": "',
            after_name='", "arguments": ',
            after_arguments="}\n</tool_call>",
            between="\n",
        ),
    ),
    "granite": ToolFormat(
        template_marks=("<|tool_call|>",),
        syntax=CallSyntax(
            tuple(
                (mark, SPACE, VALUE, bracket)
                for mark in ("<|tool_call|>", "<tool_call>")
                for bracket in "[{"
            ),
            closers=("<|/tool_call|>", "</tool_call>"),
        ),
        frame=CallFrame(
            mark="<|tool_call|>",
            begin="<|tool_call|>[",
            before_name='{"name": "',
            after_name='", "arguments": ',
            after_arguments="}",
            between=", ",
            end="]",
        ),
        has_special_marks=True,
    ),
    "hermes": ToolFormat(
        template_marks=("<tool_call>",),
        syntax=CallSyntax(
            (("<tool_call>", SPACE, VALUE, "{"), ("<tool_call>", SPACE, VALUE, "[")),
            closers=("</tool_call>",),
        ),
        frame=CallFrame(
            mark="<tool_call>",
            before_name='<tool_call>\n{"name": "',
            after_name='", "arguments": ',
            after_arguments="}\n</tool_call>",
            between="\n",
        ),
    ),
    "olmo3": ToolFormat(
        template_marks=("<function_calls>",),
        syntax=CallSyntax(
            (("<function_calls>", SPACE, VALUE),), value="python", terminator="</function_calls>"
        ),
        frame=CallFrame(
            mark="<function_calls>",
            begin="<function_calls>",
            before_name="",
            after_name="(**",
            after_arguments=")",
            between="\n",
            end="</function_calls>",
        ),
        has_special_marks=True,
    ),
    "pythonic": ToolFormat(
        template_marks=("[func_name1(",),
        syntax=CallSyntax(
            (
                (SPACE, VALUE, "[", SPACE, NAME, SPACE, "("),
                ("<|python_start|>", SPACE, VALUE, "[", SPACE, NAME, SPACE, "("),
            ),
            value="python",
            closers=("<|python_end|>",),
        ),
        # Python too: f(**{"a": 1}) is f(a=1).
        frame=CallFrame(
            mark="",
            begin="[",
            before_name="",
            after_name="(**",
            after_arguments=")",
            between=", ",
            end="]",
        ),
    ),
    "llama3_json": ToolFormat(
        template_marks=("<|python_tag|>", 'function name, "parameters":', '", "parameters": '),
        syntax=CallSyntax(
            (
                (SPACE, VALUE, "{"),
                ("<|python_tag|>", SPACE, VALUE, "{"),
                ("<|python_start|>", SPACE, VALUE, "{"),
            ),
            closers=(";", "<|python_end|>"),
        ),
        frame=CallFrame(
            mark="",
            before_name='{"name": "',
            after_name='", "parameters": ',
            after_arguments="}",
            between="; ",
        ),
    ),
}
DEFAULT_TOOL_FORMAT = "hermes"
"""For templates that fit none: most models without a format of their own have seen it."""


def tool_format_of(template: str) -> ToolFormat:
    """The format of a model with this chat template."""
    for known in TOOL_FORMATS.values():
        if any(mark in template for mark in known.template_marks):
            return known
    return TOOL_FORMATS[DEFAULT_TOOL_FORMAT]
