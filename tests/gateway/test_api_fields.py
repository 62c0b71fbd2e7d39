"""Fields of the Responses API and of Anthropic's API, as chat completions get them."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from fastserve_gateway.body import parse_body
from fastserve_gateway.errors import ApiError
from fastserve_gateway.messages_schema import MessagesRequest
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest
from pydantic_core import to_json

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "Sun or rain.", "parameters": PARAMETERS}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def text(kind: str, *texts: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": one} for one in texts]


def responses(**fields: Any) -> ResponsesRequest:
    return parse_body(to_json({"model": "m", "input": "Hi", **fields}), ResponsesRequest)


def anthropic(**fields: Any) -> MessagesRequest:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    return parse_body(to_json(body), MessagesRequest)


def messages(*given: dict[str, Any], **fields: Any) -> list[Any]:
    return anthropic(messages=list(given), **fields).chat.messages


def refusal(schema: Any, **fields: Any) -> str:
    with pytest.raises(ApiError) as refused:
        schema(**fields)
    assert refused.value.status == 400
    return str(refused.value)


# --- the Responses API ----------------------------------------------------------------------------


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": text("input_text", "Rain ", "in Paris?")},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": text("reasoning_text", "Hm")},
        {"type": "message", "role": "assistant", "content": text("output_text", "Let me look.")},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "function_call_output", "call_id": "c1", "output": text("input_text", "sunny")},
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "None at all."},
    ]
    assert responses(input=items, instructions="Use tools.").chat(()).messages == [
        {"role": "system", "content": "Use tools.\n\nBe brief."},
        {"role": "user", "content": "Rain in Paris?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm",
            "tool_calls": [CALL, CALL],
        },
        RESULT,
        RESULT,
        {"role": "assistant", "content": "No."},
        {"role": "assistant", "content": "None at all."},
    ]


def test_a_tool_choice_that_asks_for_nothing_needs_no_tools() -> None:
    """Codex compacts a conversation so."""
    for more in ({}, {"tools": []}):
        assert responses(tool_choice="auto", **more).chat(()).tool_choice == "auto"
        assert anthropic(tool_choice={"type": "none"}, **more).chat.tool_choice == "none"


def test_tools_that_others_run_are_left_out_and_named() -> None:
    function = {"type": "function", "name": "f", "strength": 1}
    request = responses(
        tools=[{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}, function]
    )
    assert [one.function.name for one in request.chat(()).tools or ()] == ["f"]
    assert request.unknown_fields() == ["tools.0", "tools.2.strength"]

    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"name": "f", "input_schema": {}},
    ]
    other = anthropic(tools=tools)
    assert [one.function.name for one in other.chat.tools or ()] == ["f"]
    assert other.unknown_fields() == ["tools.0"]


def test_tools_have_the_names_that_agents_give_them() -> None:
    """An MCP server's name comes before its tool's."""
    schema: dict[str, Any] = {"type": "object", "required": None}
    name = "mcp__plugin_" + "a" * 116
    tool = {"type": "function", "name": name, "parameters": schema}
    chat = responses(tools=[tool]).chat(())
    assert [one.function.name for one in chat.tools or ()] == [name]
    with pytest.raises(ApiError, match=r"tools\.0\.name"):
        responses(tools=[{**tool, "name": f"{name}a"}])


def test_earlier_messages_come_between_instructions_and_input() -> None:
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    request = responses(input="Bye", instructions="Be brief.", previous_response_id="resp_1")
    roles = [one["role"] for one in request.chat(history).messages]
    assert roles == ["system", "user", "assistant", "user"]


def test_fields_of_responses() -> None:
    schema = {"type": "json_schema", "name": "city", "schema": PARAMETERS, "strict": True}
    chat = responses(
        tools=[{"type": "function", "strict": True, **FUNCTION}],
        tool_choice={"type": "function", "name": "weather"},
        parallel_tool_calls=False,
        text={"format": schema},
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=2,
        stream=True,
        seed=3,
        top_k=4,
    ).chat(())
    expected = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "parallel_tool_calls": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "city", "schema": PARAMETERS, "strict": True},
            },
            "max_completion_tokens": 5,
            "temperature": 0.5,
            "top_p": 0.9,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "seed": 3,
            "top_k": 4,
        }
    )
    assert chat == expected
    assert responses(text={"format": {"type": "text"}}).chat(()).options() == (
        responses().chat(()).options()
    )


def test_reasoning_is_a_matter_of_the_template() -> None:
    thinks, not_so = ({"enable_thinking": one, "thinking": one} for one in (True, False))
    low = {**thinks, "reasoning_effort": "low"}
    assert responses(reasoning={"effort": "low"}).chat(()).template_variables == low
    none = {**not_so, "reasoning_effort": "none"}
    assert responses(reasoning={"effort": "none"}).chat(()).template_variables == none
    budget = {"type": "enabled", "budget_tokens": 1024}
    found = anthropic(thinking=budget, output_config={"effort": "low"}).chat.template_variables
    assert found == {**low, "thinking_budget": 1024}
    kwargs = {"enable_thinking": True, "date": "today"}
    found = anthropic(thinking={"type": "disabled"}, chat_template_kwargs=kwargs)
    assert found.chat.template_variables == {**not_so, **kwargs}
    assert responses().chat(()).template_variables == anthropic().chat.template_variables == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": 5}, "input: must be text or a list of items"),
        ({"input": []}, "input: "),
        ({"input": [{"type": "item_reference"}]}, "input.0.id: must be text"),
        ({"input": [{"type": 5}]}, "input.0: got no type; must have a type or a role"),
        ({"input": [{"role": "critic", "content": "x"}]}, "input.0.role: must be one of user"),
        ({"input": [{"role": "user"}]}, "input.0.content: must be text or a list of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0: got type 'input_image'; this model reads only text",
        ),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input.0.call_id: must be text"),
        ({"tools": [{"name": "f"}]}, "tools.0.type: must be text"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.name: must be text"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools: must be a list"),
        (
            {"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]},
            "tools.1.name: ",
        ),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice: only allowed with"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name: "),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools.0.parameters: "),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice: got type 'mcp'"),
        ({"tool_choice": "required"}, "tool_choice: only allowed with tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name: must be text"),
        # What comes back in the response must be JSON.
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"default": inf}}]},
            "tools: all numbers must be finite",
        ),
        ({"tool_choice": {"type": "function", "name": "f", "x": nan}}, "tool_choice: all numbers"),
        ({"text": {"format": {"type": "text", "x": nan}}}, "text: all numbers"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type: "),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: "),
        ({"max_output_tokens": "5"}, "max_output_tokens: "),
        ({"background": True}, "background: not supported"),
        ({"conversation": "conv_1"}, "conversation: not supported"),
        ({"metadata": {"a": 1}}, "metadata.a: "),
        ({"metadata": {str(one): "" for one in range(17)}}, "metadata: "),
        ({"service_tier": "flex", "priority": 3}, "service_tier: got 'flex'"),
        ({"top_k": "4"}, "top_k: "),
        ({"chat_template_kwargs": 5, "reasoning": {"effort": "low"}}, "chat_template_kwargs: "),
    ],
)
def test_mistakes_in_responses(fields: dict[str, Any], message: str) -> None:
    assert refusal(responses, **fields).startswith(message)


def test_unknown_fields_of_responses() -> None:
    request = responses(
        tools=[{"type": "function", "defer_loading": True, **FUNCTION}],
        text={"verbosity": "low"},
        reasoning={"summary": "auto"},
        truncation="auto",
        safety_identifier="x",
        include=["reasoning.encrypted_content"],
        user="me",
        prompt=None,
    )
    assert set(request.unknown_fields()) == {
        "tools.0.defer_loading",
        "text.verbosity",
        "reasoning.summary",
        "truncation",
        "safety_identifier",
    }


# --- Anthropic's messages -------------------------------------------------------------------------


def test_blocks_become_messages() -> None:
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1"}
    hint = {"cache_control": {"type": "ephemeral"}}
    found = messages(
        {"role": "user", "content": text("text", "Rain?", "In Paris.")},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                *text("text", "Let me look."),
                {**use, **hint},
                use,
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "content": "sunny"},
                {**result, "content": text("text", "sunny"), **hint},
                {**result, "is_error": True},
                *text("text", "And", "now?"),
            ],
        },
        system=[{**text("text", "Be brief.")[0], **hint}, *text("text", "Use tools.")],
    )
    assert found == [
        {"role": "system", "content": "Be brief.\n\nUse tools."},
        {"role": "user", "content": "Rain?\n\nIn Paris."},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "Hm",
            "tool_calls": [CALL, CALL],
        },
        RESULT,
        RESULT,
        {**RESULT, "content": ""},
        {"role": "user", "content": "And\n\nnow?"},
    ]


def test_fields_of_messages() -> None:
    tool = {"name": "weather", "description": "Sun or rain.", "input_schema": PARAMETERS}
    chat = anthropic(
        tools=[{"type": "custom", "cache_control": {"type": "ephemeral"}, **tool}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": PARAMETERS}},
        stop_sequences=["END"],
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        stream=True,
    ).chat
    expected = ChatRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": PARAMETERS},
            },
            "max_tokens": 9,
            "stop": ["END"],
            "logprobs": True,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 4,
            "stream": True,
        }
    )
    assert chat == expected
    choice = {"type": "tool", "name": "weather"}
    named = {"type": "function", "function": {"name": "weather"}}
    assert anthropic(tools=[tool], tool_choice=choice).chat.tool_choice == named
    assert anthropic(tools=[tool], tool_choice={"type": "none"}).chat.tool_choice == "none"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"messages": []}, "messages: "),
        ({"messages": ["Hi"]}, "messages.0.role: must be one of user, assistant"),
        ({"messages": [{"role": "tool"}]}, "messages.0.role: must be one of user, assistant"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: must be text or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0: got type 'image'; this model reads only text",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 5}]}]},
            "messages.0.content.0.input: must be an object",
        ),
        ({"system": 0}, "system: must be text or a list of blocks"),
        ({"system": [{}]}, "system.0: got no type; must be a block with a type"),
        ({"tools": [{"type": "bash_20250124"}, {"name": "f"}]}, "tools.1.input_schema: "),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: "),
        ({"tools": [{"name": "f", "input_schema": {"type": "list"}}]}, "tools.0.input_schema: "),
        ({"tool_choice": {"type": "all"}}, "tool_choice: got type 'all'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: only allowed with tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: must be text"),
        (
            {"tool_choice": {"type": "any", "disable_parallel_tool_use": "yes"}},
            "tool_choice.disable_parallel_tool_use: must be true or false",
        ),
        ({"thinking": {"type": 1}}, "thinking.type: "),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: "),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: "),
    ],
)
def test_mistakes_in_messages(fields: dict[str, Any], message: str) -> None:
    assert refusal(anthropic, **fields).startswith(message)


def test_unknown_fields_of_messages() -> None:
    tool = {"name": "weather", "input_schema": PARAMETERS, "input_examples": []}
    request = anthropic(
        tools=[tool],
        metadata={"user_id": "me"},
        cache_control={"type": "ephemeral"},
        container="x",
        speed=None,
    )
    assert set(request.unknown_fields()) == {"tools.0.input_examples", "container"}
