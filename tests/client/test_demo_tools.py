"""The demo's tools, and the turns in which models call them."""

from __future__ import annotations

import json
from datetime import datetime

import pytest
from fastserve_chat.demo import Demo
from fastserve_chat.demo_tools import CALCULATOR, CLOCK, NO_TOOL, calculate, run_demo_tool
from fastserve_chat.demo_turn import DemoTurn
from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content
from hypothesis import given
from hypothesis import strategies as st

NUMBERS = st.integers(0, 10**6).map(str) | st.floats(0.001, 1e6).map("{:.3f}".format)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(
        "({0[0]} {0[1]} {0[2]})".format
    ),
    max_leaves=4,
)
KNOWS_TOOLS = "{% if tools %}<tool_call>{% endif %}"
KNOWS_NONE = "{{ messages }}"
QUESTION = {"role": "user", "content": "How much is 2 + 3?"}


@given(EXPRESSIONS)
def test_the_calculator_computes_what_python_does(expression: str) -> None:
    try:
        value = eval(expression)
    except ZeroDivisionError:
        assert calculate(expression) == "error: division by zero"
        return
    assert float(calculate(expression)) == pytest.approx(value, rel=1e-9, abs=1e-300)


@pytest.mark.parametrize(
    "expression",
    ["", "2 +", "x", "f(1)", "'a' * 3", "2 ** 9", "[1]", "True", "1e999", "9" * 90, "(" * 90],
)  # fmt: skip
def test_the_calculator_refuses_all_but_arithmetic(expression: str) -> None:
    assert calculate(expression).startswith("error: ")


def test_a_call_becomes_the_text_of_its_result() -> None:
    assert run_demo_tool(CALCULATOR, '{"expression": "12 * 34"}') == "12 * 34 = 408"
    days = [datetime.now().strftime("%A")]
    told = run_demo_tool(CLOCK, "{}")
    days.append(datetime.now().strftime("%A"))  # it may be midnight
    assert any(day in told for day in days)
    assert run_demo_tool(NO_TOOL, "{}") == ""
    for name, arguments in (
        (CALCULATOR, "{"),
        (CALCULATOR, "[]"),
        (CALCULATOR, "{}"),
        ("rm", "{}"),
    ):
        assert run_demo_tool(name, arguments).startswith("error: ")


def call(name: str, **arguments: str) -> list[AnswerPart]:
    return [CallStart(0, "call_1", name), CallArguments(0, json.dumps(arguments))]


def test_a_model_that_knows_tools_calls_them_as_it_likes() -> None:
    turn = DemoTurn(KNOWS_TOOLS, [QUESTION])
    for _ in range(4):
        request = turn.next_request()
        assert [tool["function"]["name"] for tool in request.options["tools"]] == [
            CALCULATOR,
            CLOCK,
        ]
        assert "structured_output" not in request.options
        assert [done.result for done in turn.on_answer(call(CALCULATOR, expression="2 + 3"))] == [
            "2 + 3 = 5"
        ]
    last = turn.next_request()
    assert last.messages == [QUESTION, *turn.messages]
    # It has called often enough: what looks like a call is text now.
    written = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    assert last.reader.read(written) + last.reader.end() == [Content(written)]
    assert turn.on_answer([Content("It is 5.")]) == []


def test_another_model_must_choose_a_tool_first() -> None:
    system = {"role": "system", "content": "Be brief."}
    turn = DemoTurn(KNOWS_NONE, [system, QUESTION])
    first = turn.next_request()
    assert "grammar" in first.options["structured_output"]
    assert first.messages[0]["role"] == "system"
    assert first.messages[0]["content"].startswith("Be brief.")
    num_examples = len(Demo.of_model(knows_tools=False).examples)
    assert len(first.messages) == 1 + num_examples + 1
    [done] = turn.on_answer(call(CALCULATOR, expression="2 + 3"))
    assert (done.name, done.result) == (CALCULATOR, "2 + 3 = 5")
    second = turn.next_request()
    assert "structured_output" not in second.options
    assert second.messages[: len(first.messages)] == first.messages
    assert "2 + 3 = 5" in second.messages[-1]["content"]


def test_without_a_tool_the_conversation_is_sent_alone() -> None:
    earlier = DemoTurn(KNOWS_NONE, [QUESTION])
    earlier.next_request()
    earlier.on_answer(call(CALCULATOR, expression="2 + 3"))
    answer = {"role": "assistant", "content": "5."}
    thanks = {"role": "user", "content": "Thanks!"}
    turn = DemoTurn(KNOWS_NONE, [QUESTION, *earlier.messages, answer, thanks])
    turn.next_request()
    assert [done.result for done in turn.on_answer(call(NO_TOOL))] == [""]
    request = turn.next_request()
    assert request.messages == [QUESTION, answer, thanks]
    assert request.options == {}


def test_a_call_that_was_cut_off_gets_an_error_as_its_result() -> None:
    turn = DemoTurn(KNOWS_NONE, [QUESTION])
    turn.next_request()
    [done] = turn.on_answer([CallStart(0, "call_1", CALCULATOR), CallArguments(0, '{"expr')])
    assert done.result.startswith("error: ")
