"""``/v1/completions`` with the official client, on the tiny model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from fastserve_client import FastServeClient
from fastserve_client.results import Chunk, TokenLogprob
from fastserve_gateway.completions import CompletionAnswer
from fastserve_gateway.schemas import CompletionRequest
from openai import OpenAI
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway
from serving_client import server_sent_events
from waiting import wait_for

GREEDY: dict[str, Any] = {"model": "fastserve", "temperature": 0}
FORCED: dict[str, Any] = {"ignore_eos": True}
"""Fields that the official client sends as ``extra_body``."""


def test_text(client: OpenAI, endpoints: Any) -> None:
    answer = client.completions.create(prompt="Hello", extra_body=FORCED, **GREEDY)
    with FastServeClient(endpoints.grpc_url) as direct:
        expected = direct.generate("Hello", temperature=0, ignore_eos=True)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "fastserve"
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.num_input_tokens
    assert answer.usage.completion_tokens == 16  # OpenAI's default
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


def test_usage_says_how_much_of_the_prompts_was_kept(client: OpenAI) -> None:
    ids = [range(100, 140), range(60, 93)]

    def cached_tokens() -> int | None:
        answer = client.completions.create(
            prompt=[list(prompt) for prompt in ids], n=2, max_tokens=2, extra_body=FORCED, **GREEDY
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 73
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached_tokens() == 0
    # A request that comes at once may find that the jobs before it still have their blocks.
    wait_for(lambda: cached_tokens() == 64)


@pytest.mark.parametrize(
    ("prompt", "prompt_tokens"),
    [([5, 6, 7], 3), (["Hello", "Hello"], None), ([[5, 6], [7, 8, 9]], 5), ("Hello", None)],
)
def test_each_form_of_prompt(client: OpenAI, prompt: Any, prompt_tokens: int | None) -> None:
    answer = client.completions.create(prompt=prompt, max_tokens=4, extra_body=FORCED, **GREEDY)
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice.index for choice in answer.choices] == list(range(2 if is_list else 1))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * len(answer.choices)
    if prompt_tokens is not None:
        assert answer.usage.prompt_tokens == prompt_tokens
    if is_list and prompt[0] == prompt[1]:
        assert answer.choices[0].text == answer.choices[1].text


def test_n_answers_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def ask(n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model="fastserve", prompt=[[5, 6], [7]], n=n, seed=seed, max_tokens=6, extra_body=FORCED
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3  # once for each prompt
        assert answer.usage.completion_tokens == 2 * n * 6
        assert [choice.index for choice in answer.choices] == list(range(2 * n))
        return [choice.text for choice in answer.choices]

    texts = ask(3, seed=-7)
    assert len(set(texts[:3])) == 3
    assert ask(3, seed=-7) == texts
    assert ask(1, seed=-6) == [texts[1], texts[4]]  # the seeds are -7, -6, -5


def test_a_stream_is_the_same_text_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "Hello", "max_tokens": 12, "extra_body": FORCED, **GREEDY}
    whole = client.completions.create(**asked)
    events = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(event.choices[0].text for event in events[:-1]) == whole.choices[0].text
    # A busy gateway sends tokens together, so there may be one piece.
    reasons = [event.choices[0].finish_reason for event in events[:-1]]
    assert reasons == [*[None] * (len(reasons) - 1), "length"]
    assert all(event.usage is None for event in events[:-1])
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage
    assert len({event.id for event in events}) == 1


def test_a_stream_of_several_answers(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "prompt": "Hello",
        "n": 2,
        "seed": 1,
        "max_tokens": 8,
        "extra_body": FORCED,
        "model": "fastserve",
    }
    whole = client.completions.create(**asked)
    texts = {0: "", 1: ""}
    reasons = []
    for event in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons.append(choice.finish_reason)
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert reasons.count("length") == 2
    assert event.usage == whole.usage


def test_events_on_the_wire(gateway: RunningGateway) -> None:
    body = {"model": "fastserve", "prompt": "Hello", "max_tokens": 3, "stream": True, **FORCED}
    with httpx2.stream(
        "POST", f"{gateway.api_url}/completions", json=body, timeout=REQUEST_TIMEOUT_S
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "access-control-allow-origin" not in response.headers
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    events = list(server_sent_events(iter(lines[:-1])))
    assert all("usage" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_asynchronous_client(gateway: RunningGateway) -> None:
    async with gateway.async_client() as client:
        whole = await client.completions.create(
            prompt="Hello", max_tokens=5, extra_body=FORCED, **GREEDY
        )
        stream = await client.completions.create(
            prompt="Hello", max_tokens=5, extra_body=FORCED, stream=True, **GREEDY
        )
        text = "".join([event.choices[0].text async for event in stream])
    assert text == whole.choices[0].text


def test_stop(client: OpenAI) -> None:
    asked: dict[str, Any] = {"prompt": "Hello", "max_tokens": 24, "extra_body": FORCED, **GREEDY}
    full = client.completions.create(**asked).choices[0].text
    word = full[6:8]
    for stop in (word, [word, "never said"]):
        (choice,) = client.completions.create(**asked, stop=stop).choices
        assert choice.text == full[: full.index(word)]
        assert choice.finish_reason == "stop"
        events = client.completions.create(**asked, stop=stop, stream=True)
        assert "".join(event.choices[0].text for event in events) == choice.text


def test_logprobs(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "prompt": "Hello", "max_tokens": 5, "logprobs": 2, "extra_body": FORCED, **GREEDY,
    }  # fmt: skip
    logprobs = client.completions.create(**asked).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert logprob < 0
        assert logprob == max(top.values())  # greedy
        assert top.get(token) == logprob
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    streamed = [
        event.choices[0].logprobs for event in client.completions.create(**asked, stream=True)
    ]
    assert [token for one in streamed if one for token in one.tokens or ()] == logprobs.tokens
    offsets = [offset for one in streamed if one for offset in one.text_offset or ()]
    assert offsets == logprobs.text_offset
    only_own = client.completions.create(**{**asked, "logprobs": 0}).choices[0].logprobs
    assert only_own is not None
    assert only_own.token_logprobs == logprobs.token_logprobs
    assert only_own.tokens is not None
    assert only_own.token_logprobs is not None
    own = zip(only_own.tokens, only_own.token_logprobs, strict=True)
    assert only_own.top_logprobs == [{token: logprob} for token, logprob in own]


def test_sampling_fields_reach_the_server(client: OpenAI) -> None:
    answer = client.completions.create(
        model="fastserve",
        prompt="Hello",
        max_tokens=8,
        temperature=0.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        extra_body={"top_k": 1, "min_tokens": 8, "repetition_penalty": 1.1},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"prompt": [5] * 5000}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        # Over HTTP Triton would take their low 32 bits, which are valid tokens.
        ({"prompt": [2**32 + 5]}, "prompt"),
        ({"prompt": [[5], [5 - 2**32]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"top_p": 0}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"suffix": "the end"}, "suffix"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"best_of": 2}, "best_of"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(
    gateway: RunningGateway, fields: dict[str, Any], param: str, stream: bool
) -> None:
    body = {"model": "fastserve", "prompt": "Hello", "stream": stream} | fields
    response = httpx2.post(f"{gateway.api_url}/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [5] * 4090}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"prompt": [5] * 100, "max_tokens": 4000}, "max_tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_too_long_has_the_code_of_openai(
    client: OpenAI, fields: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fastserve", stream=stream, **fields)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.type == "invalid_request_error"
    assert refused.value.param == param
    assert "This model's maximum context length is 3840 tokens" in refused.value.message


def test_pairs_of_fields(client: OpenAI) -> None:
    client.completions.create(model="fastserve", prompt="Hello", echo=False, max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="stream_options: only allowed with stream"):
        client.completions.create(
            model="fastserve", prompt="Hello", stream_options={"include_usage": True}
        )


PART, B, OTHER_PART, C = (
    TokenLogprob(7, "\ufffd", -0.5, part=b"\xc3"),
    TokenLogprob(8, "b", -1.0),
    TokenLogprob(9, "\ufffd", -3.0, part=b"\xe4\xb8"),
    TokenLogprob(10, "c", -4.0),
)


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [
        (PART, {"\ufffd": -0.5, "b": -1.0, r"bytes:\xe4\xb8": -3.0}),
        (B, {"\ufffd": -0.5, "b": -1.0, r"bytes:\xe4\xb8": -3.0}),
        (OTHER_PART, {"\ufffd": -3.0, "b": -1.0, r"bytes:\xc3": -0.5}),
        (C, {"\ufffd": -0.5, "b": -1.0, r"bytes:\xe4\xb8": -3.0, "c": -4.0}),
    ],
)
def test_the_sampled_token_is_among_the_likeliest(
    sampled: TokenLogprob, expected: dict[str, float]
) -> None:
    """Of tokens with equal text all but one are spelled by their bytes."""
    request = CompletionRequest(model="fastserve", prompt="a", logprobs=3)
    entry = replace(sampled, top=(PART, B, OTHER_PART))
    chunk = Chunk(sampled.token, (sampled.token_id,), logprobs=(entry,))
    choice = CompletionAnswer(request).delta(0, chunk)
    assert choice is not None
    assert choice["logprobs"]["top_logprobs"] == [expected]


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"Hi", b" \xf0\x9f", b"\x98", b"\x80", b"!"], [0, 2, 3, 3, 4]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80", b"ab", b"c"], [0, 0, 0, 0, 1, 3]),
        ([b"\xf0\x9f\x98", b"\x80 \xe4\xb8", b"\x80", b"a"], [0, 0, 2, 3]),
        ([b"a", b"\xff", b"b", b"\xf0\x9f"], [0, 1, 2, 3]),  # broken in the text as well
        ([b"\xf0\x9f\x98", b"", b"\x80", b"a"], [0, 0, 0, 1]),  # with a special token
    ],
)
def test_tokens_that_are_parts_of_characters(pieces: list[bytes], offsets: list[int]) -> None:
    request = CompletionRequest(model="fastserve", prompt="a", logprobs=0, stream=True)
    answer = CompletionAnswer(request)
    found = []
    for piece in pieces:
        entry = TokenLogprob(5, piece.decode(errors="replace"), -1.0, part=piece)
        choice = answer.delta(0, Chunk("", (5,), logprobs=(entry,)))
        assert choice is not None
        found += choice["logprobs"]["text_offset"]
    assert found == offsets
