"""Calls of tools and reasoning in ``/v1/chat/completions``, with the official client.

Whatever a model with random weights writes, a grammar makes it calls.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from running_gateway import COMMAND, START_TIMEOUT_S, RunningGateway
from tool_model import END_OF_THOUGHT, TOOL_CALLS

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "parameters": SCHEMA}
TIME = {"name": "get_time"}
ASKED = [{"role": "user", "content": "How is the weather in Rome?"}]
# Without reasoning, and with calls as soon as the grammar allows them.
CALLS: dict[str, Any] = {
    "logit_bias": {str(TOOL_CALLS): 50.0},
    "extra_body": {"chat_template_kwargs": {"thinking": False}},
}
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def gateway(tool_gateway: RunningGateway) -> RunningGateway:
    return tool_gateway


def tool(function: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**function, **more}}


def ask(client: OpenAI, **fields: Any) -> Any:
    body: dict[str, Any] = {"model": "fastserve", "messages": ASKED, "max_tokens": 300, "seed": 3}
    return client.chat.completions.create(**{**body, **fields})


def forced(client: OpenAI, **fields: Any) -> Any:
    """A request for a call that comes after some reasoning."""
    ending = {str(END_OF_THOUGHT): 3.0}
    body = {"tools": [tool(WEATHER)], "tool_choice": "required", "logit_bias": ending}
    return ask(client, **{**body, **fields})


def check_call(call: Any) -> None:
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_forced_call_comes_after_the_reasoning(client: OpenAI) -> None:
    answer = forced(client, parallel_tool_calls=False)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    check_call(call)
    assert re.fullmatch("[a-zA-Z0-9]{9}", call.id)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.reasoning_content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    history = [*ASKED, choice.message.to_dict(),
               {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]  # fmt: skip
    assert forced(client, messages=history).usage.prompt_tokens > answer.usage.prompt_tokens


def test_a_stream_has_the_same_parts(client: OpenAI) -> None:
    whole = forced(client, n=2)
    events = list(forced(client, n=2, stream=True, stream_options={"include_usage": True}))
    usage = events[-1].usage
    assert usage.completion_tokens == whole.usage.completion_tokens
    # An estimate: how the answer is cut into chunks depends on the machine's load.
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    for choice in whole.choices:
        mine = [one.choices[0] for one in events[:-1] if one.choices[0].index == choice.index]
        assert [one.delta.role for one in mine] == ["assistant", *[None] * (len(mine) - 1)]
        assert mine[-1].finish_reason == choice.finish_reason == "tool_calls"
        reasoning = "".join(getattr(one.delta, "reasoning_content", None) or "" for one in mine)
        assert reasoning == choice.message.reasoning_content
        assert not any(one.delta.content for one in mine)
        deltas = [call for one in mine for call in one.delta.tool_calls or ()]
        for index, call in enumerate(choice.message.tool_calls):
            first, *others = (one for one in deltas if one.index == index)
            assert (first.function.name, first.type) == ("get_weather", "function")
            assert first.id
            assert {(one.id, one.function.name) for one in others} <= {(None, None)}
            arguments = "".join(one.function.arguments for one in (first, *others))
            assert arguments == call.function.arguments
            check_call(call)


def test_helpers_of_the_client(client: OpenAI) -> None:
    class Arguments(BaseModel):
        city: str
        days: int

    weather = openai.pydantic_function_tool(Arguments, name="get_weather")
    weather["function"]["parameters"] = SCHEMA
    fields: dict[str, Any] = {
        "model": "fastserve", "messages": ASKED, "max_tokens": 300, "tools": [weather],
        "tool_choice": "required", "parallel_tool_calls": False, **CALLS,
    }  # fmt: skip
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    for answer in (streamed, client.chat.completions.parse(**fields)):
        (call,) = answer.choices[0].message.tool_calls or ()
        assert call.function.parsed_arguments.city in ("Paris", "Rome")


def test_a_named_tool_is_called_once(client: OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_time"}}
    tools = [tool(WEATHER), tool(TIME)]
    message = ask(client, tools=tools, tool_choice=choice, **CALLS).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_time", {})


def test_strict_calls_follow_their_schema_where_the_model_may_call(client: OpenAI) -> None:
    message = ask(client, tools=[tool(WEATHER, strict=True)], **CALLS).choices[0].message
    check_call(message.tool_calls[0])
    free = ask(client, tools=[tool(WEATHER)], max_tokens=9, **CALLS).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content == "[TOOL_CALLS]" * 9
    assert free.finish_reason == "length"


def test_without_a_choice_of_tools_they_are_not_in_the_prompt(client: OpenAI) -> None:
    fields: dict[str, Any] = {"max_tokens": 4, **CALLS}
    plain = ask(client, **fields)
    none = ask(client, tools=[tool(WEATHER)], tool_choice="none", **fields)
    auto = ask(client, tools=[tool(WEATHER)], **fields)
    assert plain.usage.prompt_tokens == none.usage.prompt_tokens < auto.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content


def test_what_is_cut_off(client: OpenAI) -> None:
    (choice,) = forced(client, max_tokens=16, **CALLS).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert call.function.arguments.startswith("{")
    stopped = forced(client, stop=["city"], **CALLS).choices[0]
    assert (stopped.finish_reason, len(stopped.message.tool_calls)) == ("stop", 1)
    last = list(forced(client, stop=["city"], stream=True, **CALLS))[-1].choices[0]
    assert last.finish_reason == "stop"
    thoughts = ask(client, max_tokens=8, logit_bias={str(END_OF_THOUGHT): -100}).choices[0]
    assert thoughts.message.content == ""
    assert thoughts.message.reasoning_content


def test_json_comes_after_the_reasoning(client: OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    message = forced(client, tools=[], tool_choice=None, response_format=form).choices[0].message
    jsonschema.validate(json.loads(message.content), SCHEMA)
    assert message.reasoning_content
    either = (
        forced(client, tools=[tool(WEATHER, strict=True)], tool_choice="auto", response_format=form)
        .choices[0]
        .message
    )
    for text in (either.content, *(call.function.arguments for call in either.tool_calls or ())):
        if text:
            jsonschema.validate(json.loads(text), SCHEMA)


def test_logprobs_are_those_of_all_tokens(client: OpenAI) -> None:
    answer = forced(client, logprobs=True)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    assert "[TOOL_CALLS]" in [one.token for one in tokens]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": 7}]}, "tools.0.type"),
        ({"tools": [tool({"name": "no spaces"})]}, "tools.0.function.name"),
        ({"tools": [tool(TIME), tool(TIME)]}, "tools.1.function.name"),
        ({"tools": [tool(TIME, parameters={"type": "strin"})]}, "tools.0.function.parameters"),
        ({"tools": [tool(TIME, parameters={"properties": {"a": {"type": "x"}}})]},
         "tools.0.function.parameters"),
        ({"tools": [tool(TIME, parameters=[])]}, "tools.0.function.parameters"),
        ({"tools": [tool({"name": f"f{n}"}) for n in range(1025)]}, "tools"),
        ({"tools": [tool(TIME, description="a" * 300_000)]}, "tools"),
        ({"tools": [tool(TIME, parameters={"properties": {"a": {"pattern": "("}}}, strict=True)]},
         "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool(TIME)], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [tool(TIME)], "tool_choice": tool({"name": "other"})},
         "tool_choice.function.name"),
        ({"tools": [tool(TIME)], "extra_body": {"structured_output": {"regex": "a"}}},
         "structured_output"),
        ({"function_call": {"name": "get_time"}}, "function_call"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **fields)
    assert refused.value.param == param


def test_a_schema_that_no_grammar_has_is_refused_with_the_reason_alone(client: OpenAI) -> None:
    """The grammar around it is the gateway's own."""
    one_of = {"properties": {"a": {"oneOf": [{"type": "string"}, {"minLength": 1}]}}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, tools=[tool(WEATHER), tool(TIME, parameters=one_of)], tool_choice="required")
    assert refused.value.body["message"].startswith("tools: oneOf constraints are not supported.")
    assert "|" not in refused.value.body["message"]


def test_unknown_fields_of_tools_are_named(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="fastserve",
        messages=ASKED,  # type: ignore[arg-type]
        tools=[{**tool(TIME, returns="text"), "cache": True}],  # type: ignore[list-item]
        max_tokens=1,
    )
    ignored = "tools.0.cache, tools.0.function.returns"
    assert raw.headers["FastServe-Ignored-Fields"] == ignored


def test_an_unknown_format_keeps_the_gateway_from_starting() -> None:
    command = [*COMMAND, "--port", "0", "--tool-format", "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 1
    assert "tool_format: got 'other'; must be one of auto, none, harmony" in done.stderr


def test_the_example_of_the_documentation(gateway: RunningGateway) -> None:
    text = (DOCS / "tools.md").read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        here = code.replace("http://127.0.0.1:9000", gateway.url)
        done = subprocess.run(
            [sys.executable, "-c", here], capture_output=True, text=True, timeout=START_TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        assert "get_weather" in done.stdout


def test_the_other_apis_have_the_same_parts(client: OpenAI, gateway: RunningGateway) -> None:
    ending = {"logit_bias": {str(END_OF_THOUGHT): 3.0}, "seed": 3}
    response = client.responses.create(
        model="fastserve",
        input=ASKED[0]["content"],
        tools=[{"type": "function", **WEATHER}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=300,
        extra_body=ending,
    )
    reasoning, call = response.output
    assert (reasoning.type, call.type) == ("reasoning", "function_call")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    num_thought = response.usage.output_tokens_details.reasoning_tokens
    assert 0 < num_thought < response.usage.output_tokens
    with (
        Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as other,
        other.messages.stream(
            model="fastserve",
            messages=ASKED,
            tools=[{"name": WEATHER["name"], "input_schema": SCHEMA}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_tokens=300,
            extra_body=ending,
        ) as stream,
    ):
        message = stream.get_final_message()
    thinking, use = message.content
    assert thinking.thinking == reasoning.content[0].text
    assert use.input == json.loads(call.arguments)
    assert message.stop_reason == "tool_use"
    assert message.usage.output_tokens == response.usage.output_tokens
    # An estimate: how the answer is cut into chunks depends on the machine's load.
    thought = message.usage.output_tokens_details.thinking_tokens
    assert 0 < thought < message.usage.output_tokens


def test_a_stop_word_counts_in_the_content_alone(client: OpenAI) -> None:
    fields: dict[str, Any] = {"logit_bias": {str(END_OF_THOUGHT): 3.0}, "max_tokens": 100}
    whole = ask(client, **fields).choices[0].message
    thought, word = whole.reasoning_content, whole.reasoning_content[:2]
    assert len(word) == 2
    stopped = ask(client, stop=[word], **fields).choices[0].message
    assert stopped.reasoning_content == thought
    assert stopped.content == whole.content.partition(word)[0].rstrip()
