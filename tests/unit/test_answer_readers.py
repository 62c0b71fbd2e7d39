"""Readers of answers: reasoning, calls and content, in every format, however a text is cut."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from answer_parts import Joined, read_in_pieces
from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.reasoning_formats import REASONING_FORMATS, reasoning_format_of
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import TOOL_FORMATS, tool_format_of
from hypothesis import example, given
from hypothesis import strategies as st

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = (Tool("f", SCHEMA), Tool("get-weather", {}))
HARD = {"text": 'a "}]) \\ </tool_call> \n ä😀', "n": 1, "deep": [{"x": [None, True, -1.5]}]}


def free(name: str, **fields: object) -> AnswerFormat:
    return AnswerFormat(tool_format=TOOL_FORMATS[name], tools=TOOLS, **fields)  # type: ignore[arg-type]


def read(form: AnswerFormat, *pieces: str) -> Joined:
    return read_in_pieces(form.reader, pieces)


def as_json(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


WRITTEN = {
    "hermes": [f"<tool_call>\n{as_json('f', HARD)}\n</tool_call>\n"
               f"<tool_call>{as_json('get-weather', {})}</tool_call>",
               f"<tool_call>[{as_json('f', HARD)},{as_json('get-weather', {})}]</tool_call>"],
    "granite": [f"<|tool_call|>[{as_json('f', HARD)}, {as_json('get-weather', {})}]",
                f"<tool_call>[{as_json('f', HARD)}, {as_json('get-weather', {})}]</tool_call>"],
    "mistral": [f"[TOOL_CALLS]f[ARGS]{json.dumps(HARD)}[TOOL_CALLS]get-weather{{}}",
                f"[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{json.dumps(HARD)}"
                "[TOOL_CALLS]get-weather[ARGS]{}",
                f"[TOOL_CALLS] [{as_json('f', HARD)}, {as_json('get-weather', {})}]"],
    "mistral_list": [f"[TOOL_CALLS] [{as_json('f', HARD)}, {as_json('get-weather', {})}]"],
    "llama3_json": [f"{as_json('f', HARD, 'parameters')}; {as_json('get-weather', {})}",
                    f"<|python_tag|>{as_json('f', HARD)};\n{as_json('get-weather', {})}"],
    "deepseek": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
                 f"{json.dumps(HARD)}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function"
                 "<｜tool▁sep｜>get-weather\n```json\n{}\n```<｜tool▁call▁end｜>"
                 "<｜tool▁calls▁end｜>",
                 f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{json.dumps(HARD)}"
                 "<｜tool▁call▁end｜><｜tool▁call▁begin｜>get-weather<｜tool▁sep｜>{}"
                 "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"],
    "harmony": ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
                f"{json.dumps(HARD)}<|call|><|start|>assistant to=functions.get-weather"
                "<|channel|>commentary json<|message|>{}<|call|>"],
}  # fmt: skip
"""A call of f with ``HARD`` and one of get-weather without arguments, as models write them."""


@pytest.mark.parametrize("name", WRITTEN)
def test_what_models_write(name: str) -> None:
    for text in WRITTEN[name]:
        found = read(free(name), text)
        assert [one for one, _ in found.calls] == ["f", "get-weather"], text
        assert [json.loads(one) for _, one in found.calls] == [HARD, {}], text
        assert found.content == "", text


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(text='a', n=-1), f(**{'n': 2}, text=None)]", [{"text": "a", "n": -1},
                                                             {"n": 2, "text": None}]),
        ('[f(text="it\'s ]) a", deep=[{"x": (True, false)}])]',
         [{"text": "it's ]) a", "deep": [{"x": [True, False]}]}]),
        ("<|python_start|>[f()]<|python_end|>", [{}]),
        ("[f(n=2**9)]", None),
        ("f(n=1)", None),
        ("[f(1)]", None),
        ("[f(n=g())]", None),
        ("[1, 2]", None),
        ("[f(n=1), g()]", None),
    ],
)  # fmt: skip
def test_calls_in_python(text: str, calls: list[object] | None) -> None:
    found = read(free("pythonic"), text)
    if calls is None:
        assert found.pieces == [("content", text)]
    else:
        assert [(one, json.loads(arguments)) for one, arguments in found.calls] == [
            ("f", one) for one in calls
        ]


def test_calls_on_lines() -> None:
    text = 'So:\n<function_calls>f(text="a\\n)", n=1)\nf()\n</function_calls>'
    found = read(free("olmo3"), text)
    assert found.pieces[0] == ("content", "So:")
    assert [json.loads(one) for _, one in found.calls] == [{"text": "a\n)", "n": 1}, {}]
    for wrong in ("x = 1", "f() or f()", "import os", "f(", ""):
        text = f"<function_calls>{wrong}</function_calls>"
        assert read(free("olmo3"), text).pieces == [("content", text)]


def test_calls_in_xml() -> None:
    text = (
        "Let me see.\n<tool_call>\n<function=f>\n<parameter=text>\n 1\n2 \n</parameter>\n"
        "<parameter=n>\n7\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n"
        "<parameter=other>\nwords\n</parameter>\n</function>\n</tool_call>"
    )
    found = read(free("qwen3_coder"), text)
    assert found.pieces[0] == ("content", "Let me see.")
    arguments = json.loads(found.calls[0][1])
    assert arguments == {"text": " 1\n2 ", "n": 7, "flag": True, "other": "words"}
    without_mark = "<function=get-weather>\n</function>"
    assert read(free("qwen3_coder"), without_mark).calls == [("get-weather", "{}")]


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nno call\n</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}',
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"a": 1e999}}\n</tool_call>',
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> and more',
        '<tool_call>\n{"name": "f", "colour": "red"}\n</tool_call>',
        "<tool_call>" + "[" * 5000 + "]" * 5000,
        "a <tool_ca",
        "<tool_call>" + " " * 1000,
        " \n ",
    ],
)
def test_what_is_no_call_is_content_as_it_is(text: str) -> None:
    assert read(free("hermes"), text).pieces == [("content", text)]


@pytest.mark.parametrize("more", ["", ', "arguments": null', ', "parameters": ""', ', "id": "1"'])
@pytest.mark.parametrize(
    ("name", "begin"), [("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]")]
)
def test_a_call_needs_no_arguments(name: str, begin: str, more: str) -> None:
    written = f'{{"name": "f"{more}}}'
    text = f"{begin}{written}</tool_call>" if name == "hermes" else f"{begin}[{written}]"
    assert read(free(name), text).pieces == [("f", "{}")]


def test_a_call_behind_what_is_none() -> None:
    call = f"<tool_call>{as_json('f', {})}</tool_call>"
    found = read(free("hermes"), f"Use <tool_call> so: {call} Done. {call}\n")
    assert found.pieces == [
        ("content", "Use <tool_call> so:"), ("f", "{}"), ("content", " Done."), ("f", "{}"),
    ]  # fmt: skip


def test_arguments_are_valid_json_whatever_the_model_wrote() -> None:
    written = '<tool_call>{"name": "f", "arguments": "{\\"text\\": \\"a\\"}"}</tool_call>'
    assert read(free("hermes"), written).calls == [("f", '{"text": "a"}')]
    line_break = '<tool_call>{"name": "f", "arguments": {"text": "a\nb"}}</tool_call>'
    assert read(free("hermes"), line_break).calls == [("f", '{"text": "a\\nb"}')]
    half_pair = '<tool_call>{"name": "f", "arguments": {"text": "\\ud800"}}</tool_call>'
    assert read(free("hermes"), half_pair).calls == [("f", '{"text": "\\ud800"}')]


def test_ids() -> None:
    openai, again = (read(free("hermes"), WRITTEN["hermes"][0]).ids for _ in range(2))
    assert all(re.fullmatch(r"call_[a-zA-Z0-9]{24}", one) for one in openai)
    assert len({*openai, *again}) == 4
    mistral = read(free("mistral"), WRITTEN["mistral"][0]).ids
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", one) for one in mistral)


@pytest.mark.parametrize(
    ("is_opened", "text", "pieces"),
    [
        (False, "<think>\na\n\nb\n</think>\n\nY\n", [("reasoning", "a\n\nb"), ("content", "Y\n")]),
        (True, "a</think>Hi", [("reasoning", "a"), ("content", "Hi")]),
        (True, "\n<think>a</think>Hi", [("reasoning", "a"), ("content", "Hi")]),
        (True, "a</thin", [("reasoning", "a</thin")]),
        (False, "\n<think>\n\n</think>\n\nHi", [("content", "Hi")]),
        (False, "Hi <think>a</think>", [("content", "Hi <think>a</think>")]),
        (False, "\n <thi", [("content", "\n <thi")]),
        (True, "", []),
    ],
)  # fmt: skip
def test_reasoning(is_opened: bool, text: str, pieces: list[tuple[str, str]]) -> None:
    form = free("hermes", reasoning=REASONING_FORMATS["think"], is_opened=is_opened)
    assert read(form, text).pieces == pieces
    assert read(form, *text).pieces == pieces


def test_channels() -> None:
    form = free("harmony", reasoning=REASONING_FORMATS["harmony"])
    text = (
        "<|channel|>analysis<|message|>Need it.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I look it up.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"n": 1}'
    )
    assert read(form, text).pieces == [
        ("reasoning", "Need it."), ("content", "I look it up."), ("f", '{"n": 1}'),
    ]  # fmt: skip
    assert read(form, "<|channel|>final<|message|>Hi").pieces == [("content", "Hi")]
    text = text.replace("1}", '"<|end|>{"} ')
    for enforced in (False, True):
        form = free("harmony", reasoning=REASONING_FORMATS["harmony"], needs_call=enforced)
        assert read(form, *text).calls == [("f", '{"n": "<|end|>{"}')]
    other = "<|channel|>commentary to=functions.other<|message|>{}"
    assert read(form, other).pieces == [("content", other)]


PIECES = [
    *(mark for one in TOOL_FORMATS.values() if one.syntax for mark in one.syntax.marks),
    *(closer for one in TOOL_FORMATS.values() if one.syntax for closer in one.syntax.closers),
    *(mark for one in REASONING_FORMATS.values() for mark in (one.open, one.close)),
    *(one.frame.opening for one in TOOL_FORMATS.values()),
    *(one.frame.after_name for one in TOOL_FORMATS.values()),
    *(text for texts in WRITTEN.values() for text in texts),
    "[f(n=1)]", "<function=f>", "<parameter=text>", "</parameter>", "</function>", "f", "ä😀",
    " ", "\n", '"', "\\", "{", "}", "[", "]", "{}", "<|start|>", "<|message|>", "to=functions.f",
]  # fmt: skip
FORMS = st.builds(
    AnswerFormat,
    tool_format=st.sampled_from(list(TOOL_FORMATS.values())),
    tools=st.sampled_from([(), TOOLS]),
    needs_call=st.booleans(),
    reasoning=st.sampled_from([None, *REASONING_FORMATS.values()]),
    is_opened=st.booleans(),
)


@given(
    FORMS,
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
)
@example(free("hermes"), '<tool_call>{"name": "f", "arguments": {"text": "\\"}"}}', [40])
def test_how_a_text_is_cut_does_not_matter(
    form: AnswerFormat, text: str, places: list[int]
) -> None:
    whole = read(form, text)
    cuts = sorted({0, len(text), *(place for place in places if place < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(cuts)]
    assert read(form, *pieces).pieces == whole.pieces
    assert read(form, *text).pieces == whole.pieces
    if form.enforces_calls:
        return
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
    if form.reasoning is None and form.tool_format.syntax and not whole.calls:
        assert whole.content == text


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("hermes", "{{ '<tool_call>' }} \"parameters\": "),
        ("qwen3_coder", "<tool_call>\n<function=x>"),
        ("mistral", "'[TOOL_CALLS]' + name + '[ARGS]'"),
        ("mistral_list", '"[TOOL_CALLS] ["'),
        ("llama3_json", '\'{"name": "\' + name + \'", "parameters": \''),
        ("harmony", '"<|channel|>commentary json<|message|>"'),
        ("hermes", "{% if tools %}{{ tools }}{% endif %}"),
        ("olmo3", "'<function_calls>' + name + '('"),
    ],
)
def test_a_template_tells_the_format_of_calls(name: str, source: str) -> None:
    assert tool_format_of(source) is TOOL_FORMATS[name]


_QWEN_3 = """{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>' }}"""
_OPENED = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
_SWITCHED = """{% if add_generation_prompt %}{% if enable_thinking is false %}
{{ '<think>\\n\\n</think>' }}{% else %}{{ '<think>\\n' }}{% endif %}{% endif %}"""
_ONLY_ASKED = """{% if add_generation_prompt %}{% if enable_thinking is true %}{{ '<think>' }}
{%- endif %}{% endif %}"""
_DEEPSEEK = """{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{% if add_generation_prompt %}{% if thinking %}{{'<think>'}}{% else %}{{'</think>'}}{% endif %}"""


@pytest.mark.parametrize(
    ("source", "variables", "is_opened"),
    [
        (_QWEN_3, {}, False),
        (_QWEN_3, {"enable_thinking": False}, False),
        (_OPENED, {}, True),
        ("{% if add_generation_prompt %}\n<|assistant|><think>\n{% endif %}", {}, True),
        (_SWITCHED, {}, True),
        (_SWITCHED, {"enable_thinking": False}, False),
        (_DEEPSEEK, {}, False),
        (_DEEPSEEK, {"thinking": True}, True),
        (_DEEPSEEK + "{{ enable_thinking }}", {"enable_thinking": True}, True),
        ("{{ '<think>' }}", {}, False),
        (_ONLY_ASKED, {}, False),
        (_ONLY_ASKED, {"enable_thinking": True}, True),
    ],
)
def test_a_template_tells_whether_it_opens_the_reasoning(
    source: str, variables: dict[str, bool], is_opened: bool
) -> None:
    marks = reasoning_format_of(source)
    assert marks is REASONING_FORMATS["think"]
    assert marks.is_opened(source, variables) == is_opened
