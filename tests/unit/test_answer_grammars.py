"""Grammars of answers with enforced calls, by the engine's own compiler, and the readers of what
these grammars let a model write."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from answer_parts import read_in_pieces
from fastserve_backend.grammars.compiler import Compiler, accept
from fastserve_chat.answer_format import AnswerFormat
from fastserve_chat.reasoning_formats import REASONING_FORMATS
from fastserve_chat.tool import Tool
from fastserve_chat.tool_formats import TOOL_FORMATS, ToolFormat

EOS = 2
# The end of an answer, all bytes, and what random bytes would hardly spell.
TOKENS = [b""] * 4 + [bytes([value]) for value in range(256)]
TOKENS += [one.close.encode() for one in REASONING_FORMATS.values()]
TOKENS += [one.frame.mark.encode() for one in TOOL_FORMATS.values()]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", '}]"\\']}, "days": {"enum": [1, 2, 30]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("get_weather", SCHEMA, strict=True), Tool("get-time", NOTHING, strict=True))
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
MOST_TOKENS = 400
formats = pytest.mark.parametrize("tool_format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(TOKENS, (EOS,))


def is_allowed(compiler: Compiler, form: AnswerFormat, text: str) -> bool:
    grammar = form.grammar()
    assert grammar is not None
    ids = [4 + byte for byte in text.encode()]
    return compiler.compile("grammar", grammar).validate_tokens([*ids, EOS]) > len(ids)


def random_answer(compiler: Compiler, form: AnswerFormat, seed: int) -> str | None:
    """What a model with random weights writes; None: it does not come to an end."""
    grammar, rng, text = form.grammar(), random.Random(seed), b""
    assert grammar is not None
    matcher = compiler.compile("grammar", grammar)
    for _ in range(MOST_TOKENS):
        bits = np.frombuffer(compiler.next_mask(matcher), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        longer = [one for one in allowed if len(TOKENS[one]) > 1]
        token = int(rng.choice(longer if longer and rng.random() < 0.2 else list(allowed)))
        if token == EOS:
            return text.decode("utf-8", "replace")
        text += TOKENS[token]
        accept(matcher, token)
    return None


def calls_of(form: AnswerFormat, text: str) -> list[tuple[str, str]]:
    return read_in_pieces(form.reader, text).calls


def written(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls in the frame of the format."""
    frame = form.frame
    between = frame.after_arguments + frame.between + frame.before_name
    texts = [name + frame.after_name + json.dumps(arguments) for name, arguments in calls]
    return frame.opening + between.join(texts) + frame.after_arguments + frame.end


@pytest.mark.slow
@formats
@pytest.mark.parametrize("reasoning", [None, "think"])
def test_forced_calls_follow_their_schemas(
    compiler: Compiler, tool_format: ToolFormat, reasoning: str | None
) -> None:
    marks = REASONING_FORMATS[reasoning] if reasoning else None
    if tool_format.syntax is None and marks:
        marks = REASONING_FORMATS["harmony"]
    form = AnswerFormat(
        tool_format=tool_format,
        tools=TOOLS,
        needs_call=True,
        reasoning=marks,
        is_opened=marks is not None and not marks.is_channel,
    )
    answers = [one for seed in range(12) if (one := random_answer(compiler, form, seed))]
    assert answers
    for text in answers:
        found = read_in_pieces(form.reader, text)
        assert found.content == ""
        assert found.calls
        for name, arguments in found.calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@formats
def test_one_call_or_several(compiler: Compiler, tool_format: ToolFormat) -> None:
    several = AnswerFormat(tool_format=tool_format, tools=TOOLS, needs_call=True)
    single = AnswerFormat(
        tool_format=tool_format, tools=TOOLS, needs_call=True, allows_several=False
    )
    one = written(tool_format, ("get_weather", {"city": "Paris"}))
    two = written(tool_format, ("get_weather", {"city": "Paris"}), ("get-time", {}))
    assert [is_allowed(compiler, several, text) for text in (one, two, "Hi")] == [1, 1, 0]
    assert [is_allowed(compiler, single, text) for text in (one, two, "Hi")] == [1, 0, 0]
    assert [name for name, _ in calls_of(several, two)] == ["get_weather", "get-time"]


@formats
def test_beside_free_text_strict_calls_follow_their_schemas(
    compiler: Compiler, tool_format: ToolFormat
) -> None:
    free = Tool("free", {"properties": {"a": {"type": "integer"}}})
    form = AnswerFormat(tool_format=tool_format, tools=(TOOLS[0], free))
    right = written(tool_format, ("get_weather", {"city": "Paris"}), ("free", {"a": "b"}))
    wrong = written(tool_format, ("get_weather", {"city": "Rome"}))
    assert is_allowed(compiler, form, right)
    assert not is_allowed(compiler, form, wrong)
    for text in ("Hi <b>", "", "a\nb"):
        assert is_allowed(compiler, form, text)
        assert calls_of(form, text) == []
    if tool_format.frame.mark and tool_format.syntax:
        assert is_allowed(compiler, form, f"So:\n{right}")
        assert not is_allowed(compiler, form, f"So:\n{wrong}")
        found = read_in_pieces(form.reader, f"So:\n{right}")
        assert found.pieces[0] == ("content", "So:")
        assert [name for name, _ in found.calls] == ["get_weather", "free"]


def test_free_calls_need_no_grammar() -> None:
    form = AnswerFormat(tool_format=TOOL_FORMATS["hermes"], tools=(Tool("free", {}),))
    assert form.grammar() is None
    assert AnswerFormat(tool_format=TOOL_FORMATS["hermes"], schema=SCHEMA).grammar() is None


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_comes_before_what_a_schema_describes(compiler: Compiler, name: str) -> None:
    marks = REASONING_FORMATS[name]
    tool_format = TOOL_FORMATS["harmony" if marks.is_channel else "hermes"]
    thought = f"Is it {{}}?\n <b>{marks.close}{marks.before_answer}"
    content = marks.before_content + '{"city": "Paris"}'
    call = written(tool_format, ("get_weather", {"city": "Paris"}))
    for is_opened in (False,) if marks.is_channel else (False, True):
        form = AnswerFormat(
            tool_format=tool_format,
            tools=TOOLS[:1],
            schema=SCHEMA,
            reasoning=marks,
            is_opened=is_opened,
        )
        before = thought if is_opened else marks.open + thought
        assert is_allowed(compiler, form, before + content)
        assert is_allowed(compiler, form, before + call)
        assert not is_allowed(compiler, form, f"{before}Hi")
        assert is_allowed(compiler, form, content) != is_opened
        if marks.not_inside:
            assert not is_allowed(compiler, form, f"{marks.open}<|channel|>{thought}{content}")
        found = read_in_pieces(form.reader, before + content)
        assert (found.reasoning, found.content) == ("Is it {}?\n <b>", '{"city": "Paris"}')
        assert calls_of(form, before + call) == [("get_weather", '{"city": "Paris"}')]


def test_an_enforced_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    form = AnswerFormat(tool_format=TOOL_FORMATS["hermes"], tools=TOOLS, needs_call=True)
    text = written(TOOL_FORMATS["hermes"], ("get_weather", {"city": "Paris"}))
    begin = text.index("{", text.index("arguments"))
    for end in range(begin + 1, len(text)):
        found = read_in_pieces(form.reader, text[:end])
        assert found.content == ""
        [(name, arguments)] = found.calls
        assert name == "get_weather"
        assert '{"city": "Paris"}'.startswith(arguments)
