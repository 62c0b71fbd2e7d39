"""Calls that readers must not lose: text like markup in values, no arguments, an open thought."""

from __future__ import annotations

import json

import pytest
from answer_parts import Joined, read_in_pieces
from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.reasoning_formats import REASONING_FORMATS
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import TOOL_FORMATS

SCHEMA = {
    "type": "object",
    "$defs": {"Id": {"type": "string"}, "Mode": {"enum": ["1", "2"]}},
    "properties": {
        "text": {"type": "string"},
        "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "listed": {"type": ["string", "null"]},
        "reference": {"$ref": "#/$defs/Id"},
        "wrapped": {"allOf": [{"$ref": "#/$defs/Id"}]},
        "optional_reference": {"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]},
        "enum": {"$ref": "#/$defs/Mode"},
        "const": {"const": "5"},
        "n": {"type": "integer"},
        "optional_n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
    },
}
TOOLS = (Tool("f", SCHEMA), Tool("now", {"type": "object", "properties": {}}))


def read(name: str, text: str, reasoning: str | None = None, *, is_opened: bool = False) -> Joined:
    """The parts of a text, which are the same however it is cut."""
    form = AnswerFormat(
        tool_format=TOOL_FORMATS[name],
        tools=TOOLS,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        is_opened=is_opened,
    )
    whole = read_in_pieces(form.reader, [text])
    assert read_in_pieces(form.reader, list(text)).pieces == whole.pieces  # not ids
    return whole


def in_xml(**values: str) -> str:
    parameters = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items()
    )
    return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "value",
    [
        *("</parameter>", "a </parameter> b", "<parameter=x>y</parameter>", "<parameter=text>"),
        *("</function>", "</tool_call>", "<tool_call>\n<function=f>\n</function></tool_call>"),
        *("<think>x</think>", "if a < b && c > d:", "  a\n    b", "<html>\n</html>", "a\n\n"),
    ],
)
def test_text_like_markup_in_parameters(value: str) -> None:
    found = read("qwen3_coder", in_xml(text=value, n="5") + in_xml(n="6"))
    expected = [{"text": value, "n": 5}, {"n": 6}]
    assert [json.loads(arguments) for _, arguments in found.calls] == expected
    assert found.content == ""


@pytest.mark.parametrize("name", ["hermes", "granite", "mistral", "llama3_json", "pythonic"])
@pytest.mark.parametrize("value", ["</tool_call>", "[TOOL_CALLS]", "<tool_call>", "]}", '"}}'])
def test_marks_in_texts_of_json(name: str, value: str) -> None:
    arguments = json.dumps({"text": value})
    text = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>',
        "granite": f'<|tool_call|>[{{"name": "f", "arguments": {arguments}}}]',
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "llama3_json": f'{{"name": "f", "parameters": {arguments}}}',
        "pythonic": f"[f(**{arguments})]",
    }[name]
    found = read(name, text)
    assert [json.loads(one) for _, one in found.calls] == [{"text": value}]
    assert found.content == ""


@pytest.mark.parametrize("value", ["5", "true", "null", '{"a": 1}', "[1]", "2026-01-01", "007"])
def test_strings_stay_strings(value: str) -> None:
    names = ("text", "optional", "listed", "reference", "wrapped", "optional_reference", "enum")
    found = read("qwen3_coder", in_xml(**dict.fromkeys((*names, "const"), value)))
    [(_, arguments)] = found.calls
    assert json.loads(arguments) == dict.fromkeys((*names, "const"), value)


def test_other_types_are_json() -> None:
    found = read("qwen3_coder", in_xml(n="5", optional_n="null", either="true"))
    [(_, arguments)] = found.calls
    assert json.loads(arguments) == {"n": 5, "optional_n": None, "either": True}


DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEPSEEK_END = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("name", "text", "number"),
    [
        ("mistral", "[TOOL_CALLS]now", 1),
        ("mistral", "[TOOL_CALLS]now[ARGS]", 1),
        ("mistral", "[TOOL_CALLS]now[TOOL_CALLS]now[ARGS]{}", 2),
        ("mistral_list", '[TOOL_CALLS] [{"name": "now"}]', 1),
        ("deepseek", f"{DEEPSEEK_BEGIN}now<｜tool▁sep｜>{DEEPSEEK_END}", 1),
        ("deepseek", f"{DEEPSEEK_BEGIN}function<｜tool▁sep｜>now\n```json\n```{DEEPSEEK_END}", 1),
        ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", 1),
        ("harmony", "<|channel|>commentary to=functions.now<|message|>", 1),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", 1),
        ("hermes", '<tool_call>\n{"name": "now"}\n</tool_call>', 1),
        ("granite", '<|tool_call|>[{"name": "now", "arguments": null}]', 1),
        ("olmo3", "<function_calls>now()</function_calls>", 1),
        ("pythonic", "[now()]", 1),
        ("llama3_json", '{"name": "now", "parameters": ""}', 1),
    ],
)
def test_calls_without_arguments(name: str, text: str, number: int) -> None:
    found = read(name, text)
    assert found.calls == [("now", "{}")] * number
    assert found.content == ""


@pytest.mark.parametrize("text", ["[TOOL_CALLS]nowhere", "[TOOL_CALLS]now is the time", "[ARGS]"])
def test_a_name_that_is_no_tool_is_content(text: str) -> None:
    found = read("mistral", text)
    assert (found.calls, found.content) == ([], text)


CALLS = {
    "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "now"}]',
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
}


@pytest.mark.parametrize("is_opened", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_an_unclosed_thought(name: str, is_opened: bool) -> None:
    kind = "mistral" if name == "mistral" else "think"
    begin = "" if is_opened else REASONING_FORMATS[kind].open
    found = read(name, f"{begin}I look.\n{CALLS[name]}", kind, is_opened=is_opened)
    assert (found.reasoning, found.content) == ("I look.", "")
    assert found.calls == [("now", "{}")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"<think>a {CALLS['hermes']} b</think>c", f"a {CALLS['hermes']} b", "c"),
        ("<think>maybe <tool_call> will do</think>c", "maybe <tool_call> will do", "c"),
        ("<think>maybe <tool_call> will do", "maybe <tool_call> will do", ""),
        ("<think>maybe <tool_", "maybe <tool_", ""),
    ],
)
def test_a_thought_about_a_call_is_none(text: str, reasoning: str, content: str) -> None:
    found = read("hermes", text, "think")
    assert (found.reasoning, found.content, found.calls) == (reasoning, content, [])
