"""The answers of the Responses API and of Anthropic's, as their clients' own types read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import anthropic.types
import openai.types.responses
import pytest
from fastserve_chat.parts import AnswerPart, CallArguments, CallStart, Content, Reasoning
from fastserve_client.errors import ServerOverloaded
from fastserve_client.options import ServiceOptions
from fastserve_client.results import Chunk, Completion, TokenLogprob
from fastserve_gateway.answer import Answer
from fastserve_gateway.block_answer import BlockAnswer
from fastserve_gateway.errors import from_client_error
from fastserve_gateway.messages_answer import MessagesAnswer
from fastserve_gateway.messages_schema import MessagesRequest
from fastserve_gateway.model_formats import ModelFormats
from fastserve_gateway.responses_answer import ResponsesAnswer
from fastserve_gateway.responses_schema import ResponsesRequest
from fastserve_gateway.schemas import ChatRequest
from fastserve_gateway.whole_response import WholeResponse
from pydantic import TypeAdapter

# What the pieces of a text mean to `ScriptedReader`.
PARTS: dict[str, list[AnswerPart]] = {
    "think": [Reasoning("It is ")],
    "more": [Reasoning("sunny?")],
    "text": [Content("Let me ")],
    "look": [Content("look.")],
    "call": [CallStart(0, "call_1", "weather"), CallArguments(0, '{"city": ')],
    "rest": [CallArguments(0, '"Paris"}')],
    "again": [CallStart(1, "call_2", "clock"), CallArguments(1, "{}")],
    "mark": [],
}
WHOLE = ["think", "more", "text", "look", "call", "rest", "again", "mark"]
ARGUMENTS = {"city": "Paris"}


class ScriptedReader:
    def read(self, text: str) -> list[AnswerPart]:
        return [part for word in text.split() for part in PARTS[word]]

    def end(self) -> list[AnswerPart]:
        return []


class ScriptedFormats(ModelFormats):
    def reader(self, request: ChatRequest) -> ScriptedReader:
        return ScriptedReader()


FORMATS = ScriptedFormats("{% if enable_thinking %}", None, None)


def keeper() -> tuple[list[tuple[Any, ...]], Callable[..., bool]]:
    """What is stored, and what stores it."""
    stored: list[tuple[Any, ...]] = []

    def keep(*values: Any) -> bool:
        stored.append(values)
        return True

    return stored, keep


def responses_answer(keep: Any = None, **fields: Any) -> ResponsesAnswer:
    body = ResponsesRequest.model_validate({"model": "m", "input": "Hi", **fields})
    return ResponsesAnswer(body, body.chat(()), FORMATS, None, keep)


def messages_answer(**fields: Any) -> MessagesAnswer:
    messages = [{"role": "user", "content": "Hi"}]
    body = MessagesRequest.model_validate(
        {"model": "m", "max_tokens": 9, "messages": messages, **fields}
    )
    return MessagesAnswer(body, FORMATS)


def chunks(words: Sequence[str], reason: str = "stop") -> list[Chunk]:
    made = [Chunk(word, (index,)) for index, word in enumerate(words)]
    last = Chunk("", (99,), reason, num_input_tokens=7, num_cached_tokens=4)
    return [*made, last]


def whole(answer: BlockAnswer, words: Sequence[str], reason: str = "stop") -> dict[str, Any]:
    completion = Completion.from_chunks(chunks([f"{word} " for word in words], reason))
    return answer.whole([completion])


def stream(answer: Answer, words: Sequence[str], reason: str = "stop") -> list[dict[str, Any]]:
    """The data of the events, each of which must have its type as its name."""

    return read_events(answer, chunks(words, reason))


def read_events(answer: Answer, given: Sequence[Chunk]) -> list[dict[str, Any]]:
    async def indexed() -> AsyncGenerator[tuple[int, Chunk], None]:
        for chunk in given:
            yield 0, chunk

    async def read() -> bytes:
        return b"".join([one async for one in answer.events(indexed())])

    return [parse_event(one) for one in asyncio.run(read()).split(b"\n\n")[:-1]]


def parse_event(text: bytes) -> dict[str, Any]:
    name, data = text.decode().splitlines()
    parsed: dict[str, Any] = json.loads(data.removeprefix("data: "))
    assert name == f"event: {parsed['type']}"
    return parsed


def without_changes(response: dict[str, Any]) -> Any:
    """Without ids and times, which differ from answer to answer."""
    text = json.dumps(response)
    for item in response["output"]:
        text = text.replace(item["id"], "")
    return {**json.loads(text), "id": "", "created_at": 0, "completed_at": 0}


# --- the Responses API ----------------------------------------------------------------------------


def test_a_whole_response() -> None:
    answer = whole(responses_answer(), WHOLE)
    response = openai.types.responses.Response.model_validate(answer)
    reasoning, message, weather, clock = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "It is sunny?"
    assert message.type == "message"
    assert response.output_text == "Let me look."
    assert weather.type == clock.type == "function_call"
    assert (weather.call_id, weather.name) == ("call_1", "weather")
    assert json.loads(weather.arguments) == ARGUMENTS
    assert (clock.call_id, clock.arguments) == ("call_2", "{}")
    assert response.status == "completed"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, len(WHOLE) + 1)
    assert response.usage.input_tokens_details.cached_tokens == 4


def test_a_stream_of_a_response() -> None:
    answer = responses_answer(stream=True)
    events = stream(answer, WHOLE)
    known = TypeAdapter[Any](openai.types.responses.ResponseStreamEvent)
    for event in events:
        known.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    block = "content_part.added {0}.delta {0}.delta {0}.done content_part.done"
    call = "function_call_arguments"
    assert kinds == [
        *["created", "in_progress"],
        *f"output_item.added {block.format('reasoning_text')} output_item.done".split(),
        *f"output_item.added {block.format('output_text')} output_item.done".split(),
        *f"output_item.added {call}.delta {call}.delta {call}.done output_item.done".split(),
        *f"output_item.added {call}.delta {call}.done output_item.done".split(),
        "completed",
    ]
    last = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == done
    assert without_changes(last) == without_changes(whole(responses_answer(), WHOLE))


def test_a_response_that_is_cut_off() -> None:
    stored, keep = keeper()
    answer = responses_answer(keep, stream=True)
    last = stream(answer, ["text", "call"], "length")[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    message, call = last["response"]["output"]
    assert (message["status"], call["status"]) == ("completed", "incomplete")
    # Templates cannot show half a call.
    assert stored == [(last["response"], {"role": "assistant", "content": "Let me "}, None)]


def test_a_stop_word_cuts_off_a_call_of_a_response() -> None:
    last = stream(responses_answer(stream=True), ["again", "call"])[-1]["response"]
    assert last["status"] == "completed"
    assert [item["status"] for item in last["output"]] == ["completed", "incomplete"]


def test_only_the_last_item_is_cut_off() -> None:
    """Even if the items before it end with the same chunk."""
    given = [Chunk("think", (1,)), Chunk("text", (2,), "length", 7, num_cached_tokens=0)]
    events = read_events(responses_answer(stream=True), given)
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == ["completed", "incomplete"]
    assert events[-1]["response"]["output"] == done


def test_an_empty_response_has_an_empty_message() -> None:
    """Clients take the text of the first item."""
    last = stream(responses_answer(stream=True), [])[-1]
    assert last["response"]["output"][0]["content"][0]["text"] == ""
    assert without_changes(last["response"]) == without_changes(whole(responses_answer(), []))


def test_a_stored_response_as_a_message() -> None:
    stored, keep = keeper()
    response = whole(responses_answer(keep), WHOLE)
    ((kept, message, _),) = stored
    assert kept == response
    assert response["store"] is True
    calls = message.pop("tool_calls")
    assert [call["function"]["name"] for call in calls] == ["weather", "clock"]
    assert message == {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "It is sunny?",
    }


def test_a_response_that_the_store_has_no_room_for() -> None:
    assert whole(responses_answer(lambda *_: False), WHOLE)["store"] is False


def session(service: ServiceOptions, began: str | None, keep: Any) -> Any:
    body = ResponsesRequest.model_validate({"model": "m", "input": "Hi"})
    answer = ResponsesAnswer(body, body.chat(()), FORMATS, began, keep)
    (job,) = answer.jobs(service)
    return job.options.get("session_id")


def test_a_stored_conversation_is_a_session() -> None:
    stored, keep = keeper()
    assert session({}, None, None) is None
    assert session({}, "resp_1", None) == session({}, "resp_1", keep) == "resp_1"
    assert session({"session_id": "mine"}, "resp_1", keep) == "mine"
    answer = responses_answer(keep)
    (job,) = answer.jobs({})
    response = whole(answer, ["text"])
    assert job.options.get("session_id") == response["id"] == stored[0][2]


def test_a_response_whose_job_fails() -> None:
    answer = responses_answer(stream=True)
    num_events = len(stream(answer, ["text"]))
    error = from_client_error(ServerOverloaded("a limit; try again in 2.5 s"), {})
    event = parse_event(answer.failure(error).removesuffix(b"\n\n"))
    openai.types.responses.ResponseFailedEvent.model_validate(event)
    assert event["sequence_number"] == num_events
    assert event["response"]["status"] == "failed"
    assert event["response"]["error"]["code"] == "rate_limit_exceeded"


def test_log_probabilities_of_a_response() -> None:
    entries = [TokenLogprob(one, f"t{one}", -0.5, (TokenLogprob(1, "a", -0.1),)) for one in (1, 2)]
    given = [
        Chunk("text", (1,), logprobs=(entries[0],)),
        Chunk("", (2,), "stop", 7, logprobs=(entries[1],), num_cached_tokens=0),
    ]
    answer = responses_answer(stream=True, include=["message.output_text.logprobs"])
    events = read_events(answer, given)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["t1", "t2"]
    deltas = [one for one in events if one["type"].endswith("text.delta")]
    assert [one["token"] for delta in deltas for one in delta["logprobs"]] == ["t1"]


def test_fields_that_the_template_cannot_use() -> None:
    assert responses_answer(reasoning={"effort": "low"}).unused_fields() == []
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = messages_answer(thinking=thinking, output_config={"effort": "low"})
    assert answer.unused_fields() == ["thinking.budget_tokens", "output_config.effort"]


# --- Anthropic's messages -------------------------------------------------------------------------


def test_a_whole_message() -> None:
    message = anthropic.types.Message.model_validate(whole(messages_answer(), WHOLE))
    thinking, text, weather, clock = message.content
    assert thinking.type == "thinking"
    assert thinking.thinking == "It is sunny?"
    assert text.type == "text"
    assert text.text == "Let me look."
    assert weather.type == clock.type == "tool_use"
    assert (weather.id, weather.name, weather.input) == ("call_1", "weather", ARGUMENTS)
    assert clock.input == {}
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (3, 4)
    assert usage.output_tokens == len(WHOLE) + 1


def test_a_stream_of_a_message() -> None:
    events = stream(messages_answer(stream=True), WHOLE)
    known = TypeAdapter[Any](anthropic.types.RawMessageStreamEvent)
    for event in events:
        known.validate_python(event)
    start, *middle, end, stop = events
    assert (start["type"], stop["type"]) == ("message_start", "message_stop")
    assert start["message"]["content"] == []
    kinds = [event["type"].removeprefix("content_block_") for event in middle]
    two, one = ["start", "delta", "delta", "stop"], ["start", "delta", "stop"]
    assert kinds == [*two, *two, *two, *one]
    assert [event["index"] for event in middle] == [*[0] * 4, *[1] * 4, *[2] * 4, *[3] * 3]
    deltas = [event["delta"] for event in middle if "delta" in event]
    assert "".join(one.get("thinking", "") for one in deltas) == "It is sunny?"
    assert "".join(one.get("text", "") for one in deltas) == "Let me look."
    assert "".join(one.get("partial_json", "") for one in deltas) == '{"city": "Paris"}{}'
    answer = whole(messages_answer(), WHOLE)
    assert end["usage"] == answer["usage"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_a_message_that_is_cut_off_in_a_call() -> None:
    answer = whole(messages_answer(max_tokens=3), ["text", "call"], "length")
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert answer["stop_reason"] == "max_tokens"


def test_a_stop_sequence_cuts_off_a_call_of_a_message() -> None:
    """A client would call the tool without arguments."""
    given = [
        Chunk("call", (1,), logprobs=(TokenLogprob(1, "city", -0.5, ()),)),
        Chunk("", (2,), "stop", 7, num_cached_tokens=0),
    ]
    events = read_events(messages_answer(stream=True, stop_sequences=["city"]), given)
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "city"}
    answer = messages_answer(stop_sequences=["city"]).whole([Completion.from_chunks(given)])
    assert (answer["content"], answer["stop_reason"]) == ([], "stop_sequence")


@pytest.mark.parametrize("value", ["1e999", "[" * 9999 + "]" * 9999])
def test_arguments_that_no_object_can_hold(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar allows them."""
    parts = [CallStart(0, "call_1", "weather"), CallArguments(0, f'{{"city": {value}}}')]
    monkeypatch.setitem(PARTS, "odd", parts)
    answer = whole(messages_answer(), ["text", "odd"], "length")
    assert [block["type"] for block in answer["content"]] == ["text"]


def test_half_a_character_in_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [CallStart(0, "call_1", "weather"), CallArguments(0, r'{"city": "\ud83d"}')]
    monkeypatch.setitem(PARTS, "odd", parts)
    answer = whole(messages_answer(), ["odd"])
    assert answer["stop_reason"] == "tool_use"
    assert json.loads(bytes(WholeResponse(answer).body)) == answer


def test_max_tokens_may_be_more_than_the_prompt_leaves() -> None:
    answer = messages_answer(max_tokens=4)
    (job,) = answer.jobs({})
    assert job.options.get("clip_max_tokens") is True
    assert whole(answer, ["text", "look"], "length")["stop_reason"] == (
        "model_context_window_exceeded"
    )


def test_an_empty_message() -> None:
    answer = whole(messages_answer(), [])
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")


def test_a_message_whose_job_fails() -> None:
    error = from_client_error(ServerOverloaded("the queue is full"), {})
    event = parse_event(messages_answer().failure(error).removesuffix(b"\n\n"))
    message = "the queue is full"
    assert event == {"type": "error", "error": {"type": "rate_limit_error", "message": message}}
