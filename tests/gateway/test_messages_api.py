"""``/v1/messages`` with Anthropic's official client, on the embedded model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from fastserve_backend.serving.launch import TritonServer
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway
from running_server import job_held
from serving_client import ended_jobs, wait_until_idle
from waiting import wait_for

CAPITAL = "What is the capital of France? Answer in one word."
PARIS = "The capital of France is Paris."
PARIS_TOKENS = 8  # with the end token
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}


@pytest.fixture
def client(chat_gateway: RunningGateway) -> Iterator[Anthropic]:
    with Anthropic(
        base_url=chat_gateway.url, api_key="none", max_retries=0, timeout=REQUEST_TIMEOUT_S
    ) as client:
        yield client


def body(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A greedy request; the client has no argument for the temperature any more."""
    return {
        "model": "fastserve",
        "max_tokens": 48,
        "messages": list(messages),
        "extra_body": {"temperature": 0},
        **fields,
    }


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_the_model_answers(client: Anthropic) -> None:
    message = client.messages.create(**body(user(CAPITAL)))
    (block,) = message.content
    assert block.type == "text"
    assert block.text == PARIS
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.output_tokens == PARIS_TOKENS


def test_a_stream(client: Anthropic) -> None:
    whole = client.messages.create(**body(user(CAPITAL)))
    with client.messages.stream(**body(user(CAPITAL))) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == PARIS
    assert message.content[0].type == "text"
    assert message.content[0].text == PARIS
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == PARIS_TOKENS
    for usage in (whole.usage, message.usage):
        assert usage.cache_read_input_tokens is not None
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == (
        message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    )


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_sequence_is_named(client: Anthropic, streams: bool) -> None:
    fields = body(user(CAPITAL), stop_sequences=["Rome", " France is"])
    if streams:
        with client.messages.stream(**fields) as stream:
            message = stream.get_final_message()
    else:
        message = client.messages.create(**fields)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " France is")
    assert message.content[0].type == "text"
    assert message.content[0].text == "The capital of"


def test_other_ends(client: Anthropic) -> None:
    natural = client.messages.create(**body(user(CAPITAL), stop_sequences=["Rome"]))
    assert (natural.stop_reason, natural.stop_sequence) == ("end_turn", None)
    short = client.messages.create(**body(user(CAPITAL), max_tokens=3))
    assert short.stop_reason == "max_tokens"


def test_system_and_earlier_turns_count(client: Anthropic) -> None:
    turns = [user(CAPITAL), {"role": "assistant", "content": PARIS}, user("And of Italy?")]
    message = client.messages.create(**body(*turns, system="Be brief."))
    assert message.content[0].type == "text"
    assert "Rome" in message.content[0].text


def test_an_answer_continues_the_assistants_last_message(client: Anthropic) -> None:
    beginning = {"role": "assistant", "content": "The capital of France"}
    message = client.messages.create(**body(user(CAPITAL), beginning))
    assert message.content[0].type == "text"
    assert message.content[0].text == " is Paris."


def test_a_tool_and_its_result(client: Anthropic) -> None:
    question = user("What is the weather in Paris?")
    first = client.messages.create(**body(question, **FORCED))
    (use,) = first.content
    assert use.type == "tool_use"
    assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
    assert first.stop_reason == "tool_use"
    with client.messages.stream(**body(question, **FORCED)) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].type == "tool_use"
    assert streamed.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is sunny."}
    turns = (question, first.to_param(), user([result]))
    second = client.messages.create(**body(*turns, tools=[WEATHER]))
    assert second.content[0].type == "text"
    assert second.content[0].text


def test_tokens_are_counted(client: Anthropic) -> None:
    for fields in (body(user(CAPITAL), system="Be brief."), body(user(CAPITAL), **FORCED)):
        counted = client.messages.count_tokens(
            **{name: fields[name] for name in fields.keys() - {"max_tokens", "extra_body"}}
        )
        usage = client.messages.create(**{**fields, "max_tokens": 1}).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.count_tokens(model="claude", messages=[user("Hi")])  # type: ignore[typeddict-item]


def test_a_schema(client: Anthropic) -> None:
    schema = {**WEATHER["input_schema"], "required": ["city"]}
    message = client.messages.create(
        **body(
            user("Which city is the capital of France? Use JSON."),
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    )
    assert message.content[0].type == "text"
    assert '"Paris"' in message.content[0].text


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "strin"}}}},
            "output_config.format.schema",
        ),
    ],
)
def test_what_the_server_refuses_is_named(
    client: Anthropic, fields: dict[str, Any], name: str, streams: bool
) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**body(user(CAPITAL), **fields), stream=streams)
    assert raised.value.type == "invalid_request_error"
    assert raised.value.body["error"]["message"].startswith(f"{name}: got ")


@pytest.mark.parametrize("num_words", [2000, 200_000])
def test_a_prompt_that_is_too_long_has_anthropics_words(client: Anthropic, num_words: int) -> None:
    """Claude Code compacts the conversation when it reads them."""
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**body(user("many words " * num_words)))
    assert raised.value.type == "invalid_request_error"
    words = re.match(
        r"prompt is too long: (\d+) tokens > (\d+) maximum", raised.value.body["error"]["message"]
    )
    assert words is not None
    assert int(words[1]) > int(words[2]) > 0


def test_a_client_that_goes_away_ends_its_job(
    client: Anthropic, chat_gateway: RunningGateway, chat_server: TritonServer
) -> None:
    url = chat_server.endpoints.metrics_url
    wait_until_idle(chat_server.endpoints)
    cancelled = ended_jobs(url, "cancelled")
    closed = chat_gateway.num_requests("/v1/messages", 499)
    endless = {"extra_body": {"temperature": 0, "ignore_eos": True}}
    with ExitStack() as stack:

        def start() -> None:
            fields = body(user("Tell a long story."), max_tokens=1500, **endless)
            stream = stack.enter_context(client.messages.stream(**fields))
            assert next(iter(stream)).type == "message_start"
            assert any(event.type == "text" for event in stream)  # it streams

        with job_held(chat_server, start):
            stack.close()
            wait_for(lambda: chat_gateway.num_requests("/v1/messages", 499) > closed)
    wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + 1)
