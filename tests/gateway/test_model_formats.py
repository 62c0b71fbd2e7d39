"""What chat requests become by the formats of a model, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastserve_client.errors import InvalidRequest
from fastserve_gateway.errors import ApiError
from fastserve_gateway.model_formats import FormatNames, ModelFormats
from fastserve_gateway.schemas import ChatRequest

NO_TOOLS = "{% for message in messages %}{{ message.role + message.content }}{% endfor %}"
HERMES = "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call></tool_call>"
LLAMA = HERMES.replace("<tool_call></tool_call>", "<|python_tag|> single tool-calls")
MISTRAL = "{{ tools }}[TOOL_CALLS][ARGS]"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "description": "{braces}"}},
]
CALL = {"id": "call_123456789012", "type": "function",
        "function": {"name": "f", "arguments": '{"a": 1}'}}  # fmt: skip
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "I ask.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "5", "tool_call_id": CALL["id"]},
    {"role": "tool", "content": "6", "tool_call_id": CALL["id"]},
]


def formats(template: str, **names: str) -> ModelFormats:
    return ModelFormats.of(template, FormatNames(**names))


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": HISTORY, **fields})


def test_a_template_with_tools_gets_them_and_the_history_as_they_are() -> None:
    asked = request(tools=TOOLS)
    assert formats(HERMES).prompts(asked) == [HISTORY]
    options = formats(HERMES).options(asked)
    assert options["tools"] == TOOLS
    assert options["structured_output"] is None
    assert formats(HERMES).options(request(tools=TOOLS, tool_choice="none")).get("tools") is None


def test_a_template_without_tools_gets_them_as_text() -> None:
    [[system, user, assistant, results]] = formats(NO_TOOLS).prompts(request(tools=TOOLS))
    assert system["role"] == "system"
    assert system["content"].startswith("Be brief.\n\n")
    for tool in TOOLS:
        assert json.dumps(tool) in system["content"]
    assert user == HISTORY[1]
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert assistant == {"role": "assistant", "content": f"I ask.\n{call}\n{call}"}
    assert results["role"] == "user"
    assert results["content"].count("<tool_response>") == 2
    assert formats(NO_TOOLS).options(request(tools=TOOLS)).get("tools") is None
    [without] = formats(NO_TOOLS).prompts(request())
    assert without == [HISTORY[0], user, assistant, results]
    [[told, _]] = formats(NO_TOOLS).prompts(request(tools=TOOLS, messages=[HISTORY[1]]))
    assert told["role"] == "system"


def test_ids_of_other_models_are_shortened_where_the_template_wants_it() -> None:
    [[*_, assistant, result, _]] = formats(MISTRAL).prompts(request())
    assert [call["id"] for call in assistant["tool_calls"]] == ["456789012"] * 2
    assert result["tool_call_id"] == "456789012"
    assert formats(MISTRAL).options(request(tools=TOOLS))["skip_special_tokens"] is False
    assert formats(MISTRAL).options(request())["skip_special_tokens"] is None


def test_forced_calls_have_a_grammar() -> None:
    for fields in (
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "json_object"}},
    ):
        wanted = formats(HERMES).options(request(tools=TOOLS, **fields))["structured_output"]
        assert wanted is not None
        assert list(wanted) == ["grammar"]
    several = formats(HERMES).options(request(tools=TOOLS, tool_choice="required"))
    single = formats(LLAMA).options(request(tools=TOOLS, tool_choice="required"))
    assert "next_call" in str(several["structured_output"])
    assert "next_call" not in str(single["structured_output"])


def test_variables_of_the_template() -> None:
    asked = request(reasoning_effort="low", chat_template_kwargs={"thinking": True})
    variables = {"reasoning_effort": "low", "thinking": True}
    assert formats(HERMES).options(asked)["chat_template_kwargs"] == variables


def test_what_an_operator_chooses_counts() -> None:
    assert (
        formats(HERMES, tools="mistral").options(request(tools=TOOLS))["skip_special_tokens"]
        is False
    )
    with pytest.raises(ApiError, match="tools: must be left out"):
        formats(HERMES, tools="none").options(request(tools=TOOLS))
    assert formats(HERMES, reasoning="think").splits_reasoning(request())
    assert not formats("<think>", reasoning="none").splits_reasoning(request())


@pytest.mark.parametrize(
    ("template", "splits"), [("<think>{{ enable_thinking }}", False), ("<think>", True)]
)
def test_reasoning_that_the_template_can_switch_off(template: str, splits: bool) -> None:
    quiet = request(chat_template_kwargs={"enable_thinking": False})
    assert formats(template).splits_reasoning(quiet) == splits
    assert formats(template).splits_reasoning(request())
    told = formats(template + "{{ '/no_think' in message.content }}")
    for texts, is_split in ((["/no_think"], False), (["/no_think Hi", "Hi /think"], True)):
        messages = [{"role": "user", "content": text} for text in texts]
        assert told.splits_reasoning(request(messages=messages)) == is_split


def test_a_model_that_is_told_how_to_call_is_read_so() -> None:
    template = NO_TOOLS + "<｜tool▁call▁begin｜>"
    asked = request(tools=TOOLS, tool_choice="required")
    assert "<tool_call>" in str(formats(template).options(asked)["structured_output"])


def test_an_unknown_name_of_a_format_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tool_format: got 'x'; must be one of auto, none, "):
        FormatNames(tools="x")
