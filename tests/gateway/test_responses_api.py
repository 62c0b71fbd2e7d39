"""``/v1/responses`` with the official client, on the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from fastserve_backend.serving.launch import TritonServer
from openai import OpenAI
from pydantic import BaseModel
from running_gateway import RunningGateway
from running_server import job_held
from serving_client import ended_jobs, wait_until_idle
from waiting import wait_for

CAPITAL = "What is the capital of France? Answer in one word."
PARIS = "The capital of France is Paris."
PARIS_TOKENS = 8  # with the end token
GREEDY: dict[str, Any] = {"model": "fastserve", "temperature": 0}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
FORCED: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


@pytest.fixture
def client(chat_gateway: RunningGateway) -> Iterator[OpenAI]:
    with chat_gateway.client() as client:
        yield client


def test_the_model_answers(client: OpenAI) -> None:
    response = client.responses.create(input=CAPITAL, **GREEDY)
    assert response.output_text == PARIS
    assert (response.object, response.status) == ("response", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == PARIS_TOKENS
    chat = client.chat.completions.create(messages=[{"role": "user", "content": CAPITAL}], **GREEDY)
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens


def test_a_stream(client: OpenAI) -> None:
    with client.responses.stream(input=CAPITAL, **GREEDY) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == PARIS
    assert final.usage is not None
    assert final.usage.output_tokens == PARIS_TOKENS


def test_a_stored_conversation_goes_on(client: OpenAI) -> None:
    first = client.responses.create(input=CAPITAL, metadata={"a": "b"}, **GREEDY)
    assert first.store is True
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(
        input="And of Italy?", previous_response_id=first.id, max_output_tokens=24, **GREEDY
    )
    assert "Rome" in second.output_text
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    third = client.responses.create(input="Thanks!", previous_response_id=second.id, **GREEDY)
    assert third.usage is not None
    assert second.usage is not None
    assert third.usage.input_tokens > second.usage.input_tokens  # the first is in the second


def test_a_response_that_is_not_stored(client: OpenAI) -> None:
    with client.responses.stream(input=CAPITAL, store=False, **GREEDY) as stream:
        response = stream.get_final_response()
    assert response.store is False
    with pytest.raises(openai.NotFoundError) as raised:
        client.responses.create(input="More", previous_response_id=response.id, **GREEDY)
    assert raised.value.code == "previous_response_not_found"


def test_a_call_and_its_output(client: OpenAI) -> None:
    question = "What is the weather in Paris?"
    with client.responses.stream(input=question, **FORCED, **GREEDY) as stream:
        deltas = [one for one in stream if one.type == "response.function_call_arguments.delta"]
        first = stream.get_final_response()
    (call,) = first.output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Paris"}
    assert "".join(one.delta for one in deltas) == deltas[-1].snapshot == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}
    more: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 16, **GREEDY}
    chained = client.responses.create(input=[output], previous_response_id=first.id, **more)
    asked = {"role": "user", "content": question}
    whole = client.responses.create(input=[asked, call.to_dict(), output], **more)
    assert chained.output_text == whole.output_text != ""


def test_a_typed_answer(client: OpenAI) -> None:
    class City(BaseModel):
        city: str
        country: str

    question = "Which city is the capital of France? Use JSON."
    limits = {"max_output_tokens": 64, **GREEDY}
    parsed = client.responses.parse(input=question, text_format=City, **limits).output_parsed
    assert parsed is not None
    assert parsed.city == "Paris"
    with client.responses.stream(input=question, text_format=City, **limits) as stream:
        assert stream.get_final_response().output_parsed == parsed


def test_a_response_that_is_cut_off(client: OpenAI) -> None:
    with client.responses.stream(input=CAPITAL, max_output_tokens=3, **GREEDY) as stream:
        events = list(stream)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.status == "incomplete"
    assert events[-1].response.output_text == PARIS[: len("The capital of")]


def test_log_probabilities(client: OpenAI) -> None:
    response = client.responses.create(input=CAPITAL, top_logprobs=2, **GREEDY)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(one.token for one in part.logprobs).startswith(PARIS)
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 40}, "top_logprobs"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}},
            "text.format.schema",
        ),
        ({"input": "many words " * 2000}, "input"),
    ],
)
def test_what_the_server_refuses_is_named(
    fields: dict[str, Any], param: str, stream: bool, client: OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(**{"input": CAPITAL, "stream": stream, **GREEDY, **fields})
    assert raised.value.param == param


def test_ignored_fields_are_named(chat_gateway: RunningGateway) -> None:
    body = {"input": CAPITAL, "reasoning": {"effort": "low"}, "color": 1, **GREEDY}
    answer = httpx2.post(f"{chat_gateway.api_url}/responses", json=body, timeout=60)
    assert answer.headers["FastServe-Ignored-Fields"] == "color, reasoning.effort"


def test_a_client_that_goes_away_ends_its_job(
    client: OpenAI, chat_gateway: RunningGateway, chat_server: TritonServer
) -> None:
    url = chat_server.endpoints.metrics_url
    wait_until_idle(chat_server.endpoints)
    cancelled = ended_jobs(url, "cancelled")
    closed = chat_gateway.num_requests("/v1/responses", 499)

    def start() -> Any:
        events = client.responses.create(
            input="Tell a long story.", stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        assert next(iter(events)).type == "response.created"
        assert any(event.type == "response.output_text.delta" for event in events)  # it streams
        return events

    with job_held(chat_server, start) as events:
        events.close()
        wait_for(lambda: chat_gateway.num_requests("/v1/responses", 499) > closed)
    wait_for(lambda: ended_jobs(url, "cancelled") == cancelled + 1)


def test_the_ai_sdks_second_turn(client: OpenAI) -> None:
    """It refers to what was answered before, with a gateway's default settings."""
    user = {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    body: dict[str, Any] = {"model": "fastserve", "max_output_tokens": 2}
    first = client.responses.create(input=[user], **body)
    assert first.store is True
    items = [user, {"type": "item_reference", "id": first.output[0].id}, user]
    second = client.responses.create(input=items, **body)
    assert second.usage.input_tokens > first.usage.input_tokens
    third = client.responses.create(input=[user], previous_response_id=second.id, **body)
    assert third.usage.input_tokens > second.usage.input_tokens
