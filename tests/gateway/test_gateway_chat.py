"""``/v1/chat/completions`` with the official client, on the embedded model."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from openai import OpenAI
from pydantic import BaseModel
from running_gateway import (
    COMMAND,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    RunningGateway,
    running_gateway,
)
from running_server import running_server
from waiting import wait_for

CAPITAL = "What is the capital of France? Answer in one word."
MAX_MODEL_LEN = 128  # short, so that an answer soon fills it
DOCS = Path(__file__).parents[2] / "docs"
PARIS = "The capital of France is Paris."
PARIS_TOKENS = 8  # with the end token
DOT = 30  # the token of "."
GREEDY: dict[str, Any] = {"model": "fastserve", "temperature": 0}


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with a model that can talk."""
    config = EngineConfig().with_keys(
        model=EMBEDDED_MODEL, dtype="float32", max_model_len=MAX_MODEL_LEN, swap_space_gib=0.1
    )
    with running_server(config, tmp_path_factory.mktemp("chat") / "server.log") as triton:
        yield triton


@pytest.fixture(scope="module")
def gateway(
    talking: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("chat-gateway") / "gateway.log"
    with running_gateway(talking.endpoints.grpc_url, log_path) as running:
        yield running


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def ask(client: OpenAI, *messages: dict[str, Any], **fields: Any) -> Any:
    return client.chat.completions.create(messages=list(messages), **{**GREEDY, **fields})


def tokens(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_the_model_answers(client: OpenAI) -> None:
    answer = ask(client, user(CAPITAL))
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", PARIS)
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens == PARIS_TOKENS
    parts = [{"type": "text", "text": CAPITAL[:10]}, {"type": "text", "text": CAPITAL[10:]}]
    assert ask(client, user(parts)).choices == answer.choices


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"enable_thinking": False}, "add_special_tokens": True},
        {"tools": [{"type": "function", "function": {"name": "now", "parameters": None}}]},
    ],
)
def test_the_tokens_of_a_conversation_are_those_of_its_prompt(
    client: OpenAI, gateway: RunningGateway, fields: dict[str, Any]
) -> None:
    body = {"messages": [user("Hi")], "return_token_strs": True, **fields}
    url = f"{gateway.api_url.removesuffix('/v1')}/tokenize"
    found = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S).json()
    assert found["max_model_len"] == MAX_MODEL_LEN
    assert "Hi" in "".join(found["token_strs"])
    answer = ask(client, user("Hi"), max_tokens=1, extra_body=fields)
    assert answer.usage.prompt_tokens == found["count"] == len(found["tokens"])


def test_an_answer_goes_on_with_the_last_message(client: OpenAI) -> None:
    begun = {"role": "assistant", "content": "The capital of"}
    answer = ask(client, user(CAPITAL), begun, extra_body={"continue_final_message": True})
    assert begun["content"] + answer.choices[0].message.content == PARIS


def test_a_stream(client: OpenAI) -> None:
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    events = list(ask(client, user(CAPITAL), **fields))
    assert {event.object for event in events} == {"chat.completion.chunk"}
    deltas = [event.choices[0].delta for event in events[:-1]]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.content or "" for delta in deltas) == PARIS
    assert events[-2].choices[0].finish_reason == "stop"
    assert tokens(events[-1].usage) == tokens(ask(client, user(CAPITAL)).usage)


def test_a_service_tier_is_answered(client: OpenAI) -> None:
    assert ask(client, user(CAPITAL)).service_tier is None
    assert ask(client, user(CAPITAL), service_tier="auto").service_tier == "default"
    events = ask(client, user(CAPITAL), service_tier="flex", stream=True)
    assert {event.service_tier for event in events} == {"flex"}


def test_earlier_turns_count(client: OpenAI) -> None:
    turns = [user(CAPITAL), {"role": "assistant", "content": PARIS}, user("And of Italy?")]
    assert "Rome" in ask(client, *turns, max_tokens=24).choices[0].message.content


def test_without_max_tokens_an_answer_takes_what_fits(client: OpenAI) -> None:
    endless = {"extra_body": {"ignore_eos": True}}
    question = user("Tell a long story.")
    answer = ask(client, question, **endless)
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    assert answer.usage.completion_tokens > 16
    assert answer.choices[0].finish_reason == "length"
    for name in ("max_tokens", "max_completion_tokens"):
        assert ask(client, question, **endless, **{name: 5}).usage.completion_tokens == 5


def test_n_answers(client: OpenAI) -> None:
    answer = ask(client, user("Say a word."), n=2, seed=3, temperature=1.5, max_tokens=12)
    first, second = (choice.message.content for choice in answer.choices)
    assert first != second

    def is_kept() -> bool:
        again = ask(client, user("Say a word."), n=2, seed=3, temperature=1.5, max_tokens=12)
        assert again.choices == answer.choices
        assert tokens(again.usage) == tokens(answer.usage)
        return bool(again.usage.prompt_tokens_details.cached_tokens)

    # A request that comes at once may find that the jobs before it still have their blocks.
    wait_for(is_kept)


def test_logprobs(client: OpenAI) -> None:
    answer = ask(client, user(CAPITAL), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for one in content for byte in one.bytes).startswith(PARIS.encode())
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert content[0].top_logprobs[0].token == content[0].token  # greedy
    assert 0 < math.exp(content[0].logprob) <= 1
    events = ask(client, user(CAPITAL), logprobs=True, stream=True)
    streamed = [one for event in events for one in event.choices[0].logprobs.content]
    assert [one.token for one in streamed] == [one.token for one in content]
    assert streamed[0].top_logprobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [user(None)]}, "messages.0.content"),
        ({"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}])]},
         "messages.0.content.0"),
        ({"messages": [user("word " * 1000)]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 500}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [user("Hello")], **GREEDY, **fields}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**body)
    assert raised.value.param == param
    assert "word word" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [user("word " * MAX_MODEL_LEN)]}, "messages"),
        ({"messages": [user("word " * 1000)]}, "messages"),
        ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
        ({"max_completion_tokens": MAX_MODEL_LEN}, "max_completion_tokens"),
    ],
)
def test_what_is_too_long_has_the_code_of_openai(
    client: OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"messages": [user("Hello")], **GREEDY, **fields})
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == param
    words = f"This model's maximum context length is {MAX_MODEL_LEN} tokens"
    assert words in refused.value.message


def test_pairs_of_fields(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs: only allowed with logprobs"):
        ask(client, user("Hello"), top_logprobs=2)
    with pytest.raises(openai.BadRequestError, match="max_completion_tokens is given too"):
        ask(client, user("Hello"), max_tokens=2, max_completion_tokens=2)


def test_fields_of_messages_that_are_ignored_are_named(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        messages=[{"role": "user", "weight": 1, "content": CAPITAL}],
        user="u",
        tools=[],  # an empty list asks for nothing, nor do the next two fields
        response_format={"type": "text"},
        logit_bias={},
        **GREEDY,
    )
    assert raw.headers["FastServe-Ignored-Fields"] == "user, messages.weight"
    assert raw.parse().choices[0].message.content == PARIS


# --- the examples of the documentation ----------------------------------------------------------


def examples(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def printed_by(code: str) -> str:
    """What the example prints. It runs in this process, which has imported the clients."""
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


def output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_load_test_of_messages(
    talking: TritonServer, gateway: RunningGateway, tmp_path: Path
) -> None:
    dataset, output = tmp_path / "alpaca.json", tmp_path / "report.json"
    dataset.write_text(json.dumps([{"instruction": CAPITAL, "output": "Paris"}]), encoding="utf-8")
    done = subprocess.run(
        [
            *COMMAND[:-1], "bench", "--dataset", str(dataset), "--output", str(output),
            "--url", f"triton=grpc://{talking.endpoints.grpc_url}",
            "--url", f"gateway={gateway.api_url}", "--rates", "50", "--num-jobs", "2",
            "--warmup", "0", "--pause", "0", "--natural-lengths", "--max-output-tokens", "20",
            "--chat",
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    points = json.loads(output.read_text(encoding="utf-8"))["points"]
    answers = [[job["output_tokens"] for job in point["runs"][0]["records"]] for point in points]
    assert answers == [[PARIS_TOKENS] * 2] * 2


def test_the_gateways_examples(gateway: RunningGateway) -> None:
    def here(text: str) -> str:
        return text.replace("http://127.0.0.1:9000", gateway.url)

    python, form, service, responses, messages = examples("gateway.md", "python")
    assert printed_by(here(responses)).startswith("completed The capital of")
    assert "output_tokens=" in printed_by(here(messages))
    assert printed_by(here(service)).startswith("flex ")
    assert printed_by(here(form)).startswith("city='Paris'")
    printed = printed_by(here(python)).splitlines()
    assert printed[0] == "The capital of France is Paris."
    assert [line[0] for line in printed[1:3]] == ["0", "1"]
    assert "completion_tokens=16" in printed[3]
    (in_readme,) = (text for text in examples("../README.md", "python") if "openai" in text)
    assert printed_by(here(in_readme)).strip()
    curl, tokenize = (text for text in examples("gateway.md", "bash") if "curl" in text)
    printed = output("bash", "-c", here(curl)).splitlines()
    assert '"chat.completion"' in printed[0]
    assert "data: [DONE]" in printed
    assert "Hello" in json.loads(output("bash", "-c", here(tokenize)))["token_strs"]


def test_a_schema_beside_json_object_counts(client: OpenAI) -> None:
    schema = {
        "properties": {"zz": {"enum": [7]}},
        "required": ["zz"],
        "additionalProperties": False,
    }
    for kind in ("json_object", "json_schema"):
        form = {"type": kind, "schema": {"type": "object", **schema}}
        answer = ask(client, user("JSON about Paris."), response_format=form, max_tokens=40)
        assert json.loads(answer.choices[0].message.content) == {"zz": 7}
    form = {"type": "json_object", "schema": {"type": "strin"}}
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, user("JSON about Paris."), response_format=form)
    assert refused.value.param == "response_format.schema"


def test_formats_that_grammars_do_not_know_are_left_out_and_named(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"site": {"type": "string", "format": "iri"},
              "day": {"type": "string", "format": "date"}}, "required": ["day"],
              "additionalProperties": False}  # fmt: skip
    raw = client.chat.completions.with_raw_response.create(
        messages=[user("JSON about a site and a day.")],
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
        max_tokens=60,
        **GREEDY,
    )
    name = "response_format.json_schema.schema.properties.site.format"
    assert raw.headers["FastServe-Ignored-Fields"] == name
    answer = raw.parse().choices[0]
    assert answer.finish_reason == "stop"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", json.loads(answer.message.content)["day"])


def test_stop_words_and_tokens(client: OpenAI) -> None:
    for fields in ({"stop": ".<|im_end|>"}, {"stop": [".<|im_end|>", "never"]}):
        for ignore_eos in (False, True):
            extra = {"extra_body": {"ignore_eos": ignore_eos}}
            (choice,) = ask(client, user(CAPITAL), **fields, **extra).choices
            assert (choice.message.content, choice.finish_reason) == (PARIS[:-1], "stop")
    dot = {"extra_body": {"stop_token_ids": [DOT]}}
    answer = ask(client, user(CAPITAL), **dot)
    assert answer.choices[0].message.content == PARIS[:-1]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == PARIS_TOKENS - 1
    events = ask(client, user(CAPITAL), **dot, stream=True)
    assert "".join(event.choices[0].delta.content or "" for event in events) == PARIS[:-1]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, user(CAPITAL), extra_body={"stop_token_ids": [10**6]})
    assert refused.value.param == "stop_token_ids"


def test_fields_of_vllm(client: OpenAI) -> None:
    def answer(**extra: Any) -> Any:
        return ask(client, user(CAPITAL), max_tokens=12, extra_body=extra)

    spelled = answer(bad_words=["Paris"]).choices[0].message.content
    assert len(spelled) > 3
    assert "Paris" not in spelled
    content = answer(allowed_token_ids=[DOT]).choices[0].message.content
    assert set(content) == {"."}
    ends = answer(ignore_eos=True, skip_special_tokens=False).choices[0].message.content
    assert ends.startswith(f"{PARIS}<|im_end|>")
    assert answer(truncate_prompt_tokens=7).usage.prompt_tokens == 7
    for name, wrong in (("bad_words", ["a" * 257]), ("truncate_prompt_tokens", 0), ("min_p", 2)):
        with pytest.raises(openai.BadRequestError) as refused:
            answer(**{name: wrong})
        assert refused.value.param == name


def test_a_body_with_a_byte_order_mark(gateway: RunningGateway) -> None:
    body = json.dumps({"messages": [user(CAPITAL)], **GREEDY}).encode("utf-8-sig")
    headers = {"Content-Type": "application/json"}
    url = f"{gateway.api_url}/chat/completions"
    answer = httpx2.post(url, content=body, headers=headers, timeout=REQUEST_TIMEOUT_S)
    assert answer.json()["choices"][0]["message"]["content"] == PARIS


def test_assistants_that_only_called_tools(client: OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ask(client, *turns, user(CAPITAL), max_tokens=12).choices[0].message.content


class City(BaseModel):
    city: str
    country: str


QUESTION = "Which city is the capital of France? Answer in JSON."


def test_an_answer_becomes_a_pydantic_object(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        messages=[{"role": "user", "content": QUESTION}], response_format=City, **GREEDY
    )
    assert answer.choices[0].finish_reason == "stop"
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, City)
    assert parsed.city == "Paris"
    with client.chat.completions.stream(
        messages=[{"role": "user", "content": QUESTION}], response_format=City, **GREEDY
    ) as events:
        *_, last = events
        assert last.type == "content.done"
        assert last.parsed == parsed


def test_json_mode_and_forms_that_are_not_openais(client: OpenAI) -> None:
    answer = ask(client, user(QUESTION), response_format={"type": "json_object"}, max_tokens=60)
    assert isinstance(json.loads(answer.choices[0].message.content), dict)
    form = {"structured_output": {"choice": ["London", "Paris"]}}
    answer = ask(client, user(CAPITAL), n=2, extra_body=form)
    assert [choice.message.content for choice in answer.choices] == ["Paris"] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "strin"}},
                }
            },
            "response_format.json_schema.schema",
        ),
        ({"extra_body": {"structured_output": {"regex": "(a"}}}, "structured_output.regex"),
        ({"extra_body": {"structured_output": {}}}, "structured_output"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
        (
            {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
            "ignore_eos",
        ),
    ],
)
def test_what_cannot_be_is_named(
    fields: dict[str, Any], param: str, stream: bool, client: OpenAI
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, user(CAPITAL), stream=stream, **fields)
    assert raised.value.param == param
    assert raised.value.body["message"].startswith(f"{param}: got ")


def test_biased_tokens(client: OpenAI) -> None:
    # "The", with which the answer begins.
    answer = ask(client, user(CAPITAL), logit_bias={"504": -100})
    assert not answer.choices[0].message.content.startswith("The")
