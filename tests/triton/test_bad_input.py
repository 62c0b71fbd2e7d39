"""Bad requests are refused with INVALID_ARG and the field's name, and disturb nobody."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from fastserve_backend.serving.endpoints import Endpoints
from serving_client import (
    GENERATE,
    GENERATE_STREAM,
    STATUS_HEADER,
    GrpcStream,
    generate,
    metric,
    post,
    settle,
    wait_until_idle,
)
from waiting import wait_for

GOOD_PROMPT = "Once upon a time"
# Of a stream beside the bad requests. It takes about as long as they do.
NUM_TOKENS = 1000


@dataclass(frozen=True)
class Bad:
    """A request that must be refused, and the field that begins the message."""

    label: str
    field: str
    inputs: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] | None = None
    prompt: bool = True

    def request(self) -> dict[str, Any]:
        prompt = {"text_input": GOOD_PROMPT} if self.prompt else {}
        return {**prompt, **self.inputs, "parameters": self.parameters}


def tensor(name: str, value: Any, label: str = "") -> Bad:
    return Bad(f"{name}={label or value!r}", name, {name: value})


def in_object(name: str, value: Any, label: str = "") -> Bad:
    inputs = {"sampling_parameters": json.dumps({name: value})}
    return Bad(f"object {name}={label or value!r}", name, inputs)


def form(kind: str, value: Any, label: str = "") -> Bad:
    inputs = {"sampling_parameters": json.dumps({"structured_output": {kind: value}})}
    return Bad(f"{kind}={label or value!r}", f"structured_output.{kind}", inputs)


def bias(value: Any) -> Bad:
    inputs = {"sampling_parameters": json.dumps({"logit_bias": {"5": value}})}
    return Bad(f"bias {value!r}", "logit_bias[5]", inputs)


def as_parameter(name: str, value: Any) -> Bad:
    return Bad(f"parameter {name}={value!r}", name, parameters={name: value})


def raw_object(text: Any, label: str) -> Bad:
    return Bad(f"object {label}", "sampling_parameters", {"sampling_parameters": text})


def prompt(label: str, field_name: str, **inputs: Any) -> Bad:
    return Bad(label, field_name, inputs, prompt=False)


CHAT = '[{"role": "user", "content": "Hello"}]'
NAN, INFINITY = float("nan"), float("inf")
FOR_EVER = [{"type": "integer", "multipleOf": n} for n in (9973, 9967, 9949, 9941)]
CHAIN = (
    "start: r0\n"
    + "\n".join(f'r{n}: r{n + 1} "a" | r{n + 1}' for n in range(2000))
    + ('\nr2000: "b"')
)

CASES = [
    # The prompt.
    prompt("no prompt", "text_input, input_ids, messages", max_tokens=4),
    prompt("two prompts", "text_input, input_ids", text_input="a", input_ids=[5]),
    prompt("empty prompt", "text_input", text_input=""),
    prompt("invalid UTF-8", "text_input", text_input=b"ok \xff\xfe"),
    prompt("cut UTF-8", "text_input", text_input="é".encode()[:1]),
    prompt("encoded surrogate", "text_input", text_input=b"\xed\xa0\x80"),
    prompt("too long text", "text_input", text_input="a" * 5000),
    prompt("hopelessly long text", "text_input", text_input="a" * 3_000_000),
    prompt("no ids", "input_ids", input_ids=[]),
    prompt("negative id", "input_ids", input_ids=[5, -1]),
    prompt("id beyond the vocabulary", "input_ids", input_ids=[5, 1024]),
    prompt("huge id", "input_ids", input_ids=[2**31 - 1]),
    prompt("room for no output", "max_tokens", input_ids=[5] * 3830),
    # A conversation.
    prompt("text and messages", "text_input, messages", text_input="a", messages=CHAT),
    prompt("no JSON", "messages", messages="[{"),
    prompt("deep JSON", "messages", messages="[" * 100_000),
    prompt("no list", "messages", messages='{"role": "user", "content": "a"}'),
    prompt("no messages", "messages", messages="[]"),
    prompt("no object", "messages[0]", messages='["a"]'),
    prompt("no content", "messages[0]", messages='[{"role": "user"}]'),
    prompt("unknown key", "messages[0]", messages='[{"role": "a", "content": "b", "x": "c"}]'),
    prompt(
        "content that is no text",
        "messages[0].content",
        messages='[{"role": "user", "content": ["a"]}]',
    ),
    prompt("null", "messages[0].content", messages='[{"role": "user", "content": null}]'),
    prompt(
        "an image",
        "messages[0].content",
        messages='[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]',
    ),
    prompt("no calls", "messages[0]", messages='[{"role": "assistant", "tool_calls": []}]'),
    prompt(
        "calls that are none",
        "messages[0].tool_calls",
        messages='[{"role": "assistant", "tool_calls": ["f"]}]',
    ),
    prompt("surrogate", "messages[0].content", messages='[{"role": "a", "content": "\\ud800"}]'),
    prompt(
        "prompt of a conversation",
        "exclude_input_in_output",
        messages=CHAT,
        exclude_input_in_output=False,
    ),
    prompt("model without a template", "messages", messages=CHAT),
    # Lengths.
    tensor("max_tokens", 0),
    tensor("max_tokens", -1),
    tensor("max_tokens", 4097),
    tensor("max_tokens", 3900, "more KV than the pool holds"),
    tensor("max_tokens", 2**31 - 1),
    tensor("min_tokens", -1),
    tensor("min_tokens", 17, "above max_tokens"),
    # Sampling.
    tensor("temperature", -0.1),
    tensor("temperature", NAN),
    tensor("temperature", INFINITY),
    tensor("temperature", 1e30),
    tensor("top_p", 0.0),
    tensor("top_p", 1.5),
    tensor("top_p", -1.0),
    tensor("top_p", NAN),
    tensor("top_k", -2),
    tensor("repetition_penalty", 0.0),
    tensor("repetition_penalty", -1.0),
    tensor("repetition_penalty", NAN),
    tensor("presence_penalty", 2.5),
    tensor("presence_penalty", -INFINITY),
    tensor("frequency_penalty", -2.5),
    tensor("frequency_penalty", NAN),
    tensor("stop_words", [""], "an empty word"),
    tensor("stop_words", ["ok", b"\xff"], "invalid UTF-8"),
    tensor("stop_words", ["x" * 257], "a long word"),
    tensor("stop_words", ["x"] * 17, "too many"),
    # The service level.
    tensor("priority", -101),
    tensor("priority", 101),
    tensor("priority", -(2**31)),
    tensor("ttft_slo_ms", 0.0),
    tensor("ttft_slo_ms", NAN),
    tensor("ttft_slo_ms", 2e9),
    tensor("tpot_slo_ms", -0.5),
    tensor("tpot_slo_ms", INFINITY),
    tensor("tenant", "a\nb", "a line break"),
    tensor("tenant", b"\xff", "invalid UTF-8"),
    tensor("tenant", "x" * 129, "too long"),
    tensor("session_id", "x" * 129, "too long"),
    tensor("cache_salt", "x" * 257, "too long"),
    in_object("priority", 2**40),
    in_object("priority", 0.5),
    in_object("priority", "high"),
    in_object("ttft_slo_ms", "soon"),
    in_object("ttft_slo_ms", -1),
    in_object("tpot_slo_ms", "1e10"),
    in_object("tpot_slo_ms", True),
    in_object("tenant", 5),
    in_object("tenant", "\ud800", "a lone surrogate"),
    as_parameter("ttft_slo_ms", "nan"),
    as_parameter("tpot_slo_ms", 0),
    as_parameter("tenant", "\x7f"),
    as_parameter("session_id", "\x7f"),
    # sampling_parameters.
    raw_object("{", "not JSON"),
    raw_object("[1]", "a list"),
    raw_object("null", "null"),
    raw_object("", "empty"),
    raw_object(b"\xff", "invalid UTF-8"),
    raw_object("[" * 100_000, "deep nesting"),
    raw_object('{"top_k": ' + "9" * 5000 + "}", "an endless number"),
    raw_object(" " * (1 << 20) + "{}", "too large"),
    in_object("max_tokens", 1.5),
    in_object("max_tokens", "many"),
    in_object("max_tokens", True),
    in_object("max_tokens", [4]),
    in_object("max_tokens", 10**30),
    in_object("max_tokens", "1" * 30),
    in_object("temperature", "hot"),
    in_object("temperature", {"a": 1}),
    in_object("temperature", NAN),
    in_object("temperature", "inf"),
    in_object("top_p", 10**400, "a huge integer"),
    in_object("seed", -1),
    in_object("seed", 2**64),
    in_object("seed", "abc"),
    in_object("stop", 5),
    in_object("stop", ["ok", 5]),
    in_object("stop", ["\ud800"], "a lone surrogate"),
    Bad("an empty stop", "stop_words", in_object("stop", "").inputs),
    in_object("stop_token_ids", [1024], "no such token"),
    in_object("stop_token_ids", [-1]),
    in_object("stop_token_ids", ["a"]),
    in_object("stop_token_ids", [[5]]),
    in_object("stop_token_ids", "a"),
    in_object("stop_token_ids", {"5": 1}),
    in_object("stop_token_ids", True),
    in_object("stop_token_ids", list(range(129)), "too many"),
    in_object("min_p", 1.5),
    in_object("min_p", "nan"),
    in_object("allowed_token_ids", []),
    in_object("allowed_token_ids", [1024], "no such token"),
    in_object("allowed_token_ids", list(range(16385)), "too many"),
    in_object("bad_words", ["ok", ""]),
    in_object("bad_words", ["a"] * 65, "too many"),
    in_object("truncate_prompt_tokens", 0),
    in_object("truncate_prompt_tokens", -2),
    in_object("truncate_prompt_tokens", 1.5),
    in_object("skip_special_tokens", "maybe"),
    in_object("ignore_eos", 1),
    in_object("ignore_eos", "maybe"),
    in_object("stream", "perhaps"),
    in_object("logprobs", -1),
    in_object("logprobs", 21),
    in_object("prompt_logprobs", -1),
    in_object("prompt_logprobs", "many"),
    in_object("best_of", 2),
    in_object("logit_bias", [5]),
    in_object("logit_bias", {"a": 1}),
    in_object("logit_bias", {"1024": 1.0}, "no such token"),
    in_object("logit_bias", {"5": 1, "05": 1}, "a token twice"),
    in_object("logit_bias", {str(n): 0 for n in range(301)}, "too many"),
    bias(101),
    bias(NAN),
    bias("much"),
    in_object("structured_output", "json"),
    in_object("structured_output", {}),
    in_object("structured_output", {"regex": "a", "choice": ["b"]}),
    in_object("structured_output", {"json": {}}),
    form("json_schema", {"type": "strin"}),
    form("json_schema", {"type": "object", "contains": {}}),
    form("json_schema", {"allOf": FOR_EVER}, "that takes too long to compile"),
    form("json_schema", {"not": {"a": "x" * 70_000}}, "too large"),
    form("json_object", False),
    form("regex", "(a"),
    form("regex", "(" * 20_000, "deep"),
    form("regex", r"[^\s\S]"),
    form("choice", []),
    form("choice", ["\ud800"], "a lone surrogate"),
    form("grammar", "start: other"),
    form("grammar", CHAIN, "that takes too much stack"),
    Bad("form and ignore_eos", "ignore_eos", form("regex", "a").inputs | {"ignore_eos": True}),
    Bad("form and min_tokens", "min_tokens", form("regex", "a").inputs | {"min_tokens": 1}),
    in_object("text_input", "no"),
    Bad("object, a surrogate as a name", r"'\ud800'", {"sampling_parameters": r'{"\ud800": 1}'}),
    Bad("object, a long name", "x" * 80 + "…", {"sampling_parameters": f'{{"{"x" * 9999}": 1}}'}),
    in_object("id", "of a request parameter"),
    Bad(
        "stop twice",
        "stop",
        {"stop_words": ["a"], "sampling_parameters": json.dumps({"stop": ["b"]})},
    ),
    # Request parameters.
    as_parameter("no_such_key", 1),
    as_parameter("input_ids", 1),
    as_parameter("id", 7),
    as_parameter("max_tokens", 0),
    as_parameter("max_tokens", "many"),
    as_parameter("temperature", "nan"),
    as_parameter("return_logprobs", "perhaps"),
    as_parameter("return_prompt_logprobs", "perhaps"),
    as_parameter("structured_output", "{"),
    as_parameter("stop_token_ids", "[5, 1024]"),
    as_parameter("stop_token_ids", -1),
    # Combinations.
    Bad(
        "prompt in a stream",
        "exclude_input_in_output",
        {"stream": True, "exclude_input_in_output": False},
    ),
]


@pytest.fixture(scope="module")
def refused(endpoints: Endpoints) -> Iterator[list[Bad]]:
    """The tests add the bad requests. Meanwhile a good one streams undisturbed. In the end each bad
    one was counted."""
    rejected = "fastserve_requests_rejected_total"
    settle(endpoints)
    before = metric(endpoints.metrics_url, rejected)
    stream = GrpcStream(
        endpoints.grpc_url,
        text_input=GOOD_PROMPT,
        stream=True,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        seed=5,
    )
    stream.first_token()
    found: list[Bad] = []
    yield found
    answer = stream.finish()
    assert answer.error is None
    assert len(answer.token_ids) == NUM_TOKENS
    wait_for(lambda: metric(endpoints.metrics_url, rejected) >= before + len(found))


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.label)
def test_refused_by_name(bad: Bad, endpoints: Endpoints, refused: list[Bad]) -> None:
    answer = generate(endpoints.grpc_url, **bad.request())
    refused.append(bad)
    assert answer.error is not None
    message = answer.error.message()
    assert message.startswith(f"{bad.field}: got ")
    assert len(message) < 1000
    assert answer.num_finals == 1
    assert answer.num_responses == 0


@pytest.mark.parametrize(
    ("parameter", "status"), [(b'"id": "\xff"', 200), (b'"\xff": 1', 400), (b'"stop": "\xff"', 200)]
)
def test_request_parameters_may_be_any_bytes(
    parameter: bytes, status: int, endpoints: Endpoints
) -> None:
    body = b'{"text_input": "a", "max_tokens": 2, %b}' % parameter
    response = post(endpoints.http_url, GENERATE, body)
    assert response.status_code == status, response.text


@pytest.mark.parametrize("request_", [{"max_tokens": 0}, form("regex", "(a").inputs])
def test_the_code_of_a_call_that_asks_for_it(
    request_: dict[str, Any], endpoints: Endpoints
) -> None:
    sent_s = time.monotonic()
    stream = GrpcStream(endpoints.grpc_url, headers=STATUS_HEADER, text_input="a", **request_)
    assert stream.until_error().status() == "StatusCode.INVALID_ARGUMENT"
    # tritonserver 24.10 still reads from the call: ending it sooner crashes the server once in
    # thousands.
    assert time.monotonic() - sent_s >= 0.1
    stream.cancel()


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"text_input": GOOD_PROMPT, "max_tokens": 0}, "max_tokens"),
        ({"text_input": GOOD_PROMPT, "temprature": 1}, "temprature"),
        ({"text_input": GOOD_PROMPT, "priority": -101}, "priority"),
        ({"text_input": GOOD_PROMPT, "tpot_slo_ms": -1}, "tpot_slo_ms"),
        ({"text_input": GOOD_PROMPT, "tenant": "\x00"}, "tenant"),
        ({"text_input": ""}, "text_input"),
        ({"text_input": GOOD_PROMPT, "parameters": {"top_p": 2}}, "top_p"),
    ],
)
def test_http_says_400_and_why(body: dict[str, Any], named: str, endpoints: Endpoints) -> None:
    for path in (GENERATE, GENERATE_STREAM):
        response = post(endpoints.http_url, path, body)
        assert response.status_code == 400
        assert f"{named}: got " in response.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"text_input": "a\\ud800"}',
        b'{"text_input": null}',
        b'{"text_input": ["a", "b"]}',
        b'{"text_input": {"a": 1}}',
        b'{"text_input": "a", "max_tokens": "four"}',
        b'{"text_input": "a", "input_ids": [1, 2]}',
    ],
)
def test_what_the_server_itself_refuses_is_an_error_too(body: bytes, endpoints: Endpoints) -> None:
    response = post(endpoints.http_url, GENERATE, body)
    assert response.status_code >= 400
    assert "error" in response.json()


@pytest.mark.parametrize(
    ("name", "array", "datatype"),
    [
        ("max_tokens", np.array([4], np.int64), "INT64"),
        ("max_tokens", np.array([4, 5], np.int32), "INT32"),
        ("no_such_input", np.array([4], np.int32), "INT32"),
    ],
)
def test_wrong_tensors_get_an_error_on_the_stream(
    name: str, array: Any, datatype: str, endpoints: Endpoints
) -> None:
    # Triton refuses these requests before the model sees them.
    wrong = grpcclient.InferInput(name, list(array.shape), datatype)
    wrong.set_data_from_numpy(array)
    stream = GrpcStream(endpoints.grpc_url, raw_inputs=[wrong], text_input=GOOD_PROMPT)
    assert name in stream.until_error().message()
    stream.cancel()


def test_afterwards_nothing_is_held(endpoints: Endpoints) -> None:
    wait_until_idle(endpoints)
    assert generate(endpoints.grpc_url, text_input=GOOD_PROMPT, max_tokens=2).error is None
