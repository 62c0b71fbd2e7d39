"""The contents of every request, and values that the wire cannot carry."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from fastserve_client import AsyncFastServeClient, FastServeClient, InvalidRequest, protocol
from fastserve_client.options import OPTION_NAMES
from fastserve_client.request import (
    EncodedMessages,
    InferRequest,
    build_request,
    build_watch_request,
)


def _parameters(request: InferRequest) -> dict[str, Any]:
    text = request.inputs["sampling_parameters"]
    assert isinstance(text, str)
    values: dict[str, Any] = json.loads(text)
    return values


def test_a_request_carries_prompt_options_and_what_to_return() -> None:
    request = build_request(
        "fastserve", "Žluťoučký kůň", {"max_tokens": 8, "top_p": None}, stream=True, request_id="a1"
    )
    assert (request.model, request.request_id) == ("fastserve", "a1")
    assert request.inputs.keys() == {"text_input", "sampling_parameters"}
    assert request.inputs["text_input"] == "Žluťoučký kůň"
    assert _parameters(request) == {
        "max_tokens": 8,
        "stream": True,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_cached_tokens": True,
    }


@pytest.mark.parametrize("ids", [[5, 0, 2**31 - 1], np.array([5, 0, 2**31 - 1])])
def test_token_ids_replace_the_text(ids: Any) -> None:
    request = build_request("fastserve", ids, {}, stream=False)
    assert request.inputs["input_ids"] == (5, 0, 2**31 - 1)
    assert "text_input" not in request.inputs
    assert _parameters(request)["stream"] is False


def test_the_output_so_far_is_a_tensor_beside_the_prompt() -> None:
    request = build_request("fastserve", "x", {}, stream=True, output_ids_so_far=[7, 8])
    assert request.inputs.keys() == {"text_input", "sampling_parameters", "output_ids_so_far"}
    assert request.inputs["output_ids_so_far"] == (7, 8)
    with pytest.raises(InvalidRequest, match=r"^output_ids_so_far: got 4294967296, which is no"):
        build_request("fastserve", "x", {}, stream=True, output_ids_so_far=[1 << 32])


def test_messages_replace_the_text() -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    request = build_request("fastserve", messages, {}, stream=False)
    assert json.loads(str(request.inputs["messages"])) == messages
    assert "text_input" not in request.inputs
    encoded = EncodedMessages(messages)
    again = build_request("fastserve", encoded, {}, stream=False)
    assert again == request
    assert again.inputs["messages"] is encoded.text
    with pytest.raises(InvalidRequest, match="messages: got text that is not Unicode"):
        EncodedMessages([{"role": "user", "content": "\ud800"}])


def test_asking_for_logprobs_asks_for_their_outputs() -> None:
    parameters = _parameters(build_request("fastserve", "x", {"logprobs": 0}, stream=True))
    assert parameters["return_logprobs"] is True
    assert parameters["return_cumulative_logprob"] is True


def test_perf_metrics_are_asked_for_by_a_flag() -> None:
    request = build_request("fastserve", "x", {}, stream=True, perf_metrics=True)
    assert _parameters(request)["return_perf_metrics"] is True


def test_options_and_flags_are_those_of_the_protocol() -> None:
    assert set(protocol.PARAMETER_KEYS) >= OPTION_NAMES
    options = {"logprobs": 1, "prompt_logprobs": 0}
    request = build_request("fastserve", "x", options, stream=True, perf_metrics=True)
    assert _parameters(request).keys() <= set(protocol.PARAMETER_KEYS)
    assert _parameters(request)["return_prompt_logprobs"] is True


def test_an_integer_keeps_all_its_digits() -> None:
    request = build_request("fastserve", "x", {"seed": 2**64 - 1}, stream=True)
    assert _parameters(request)["seed"] == 2**64 - 1


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("lone surrogate \ud800", {}, "text_input"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages"),
        ([{"role": "user", "content": b"bytes"}], {}, "messages"),
        ([1, 2**31], {}, "input_ids"),
        ([2**32 + 5], {}, "input_ids"),
        ([5 - 2**32], {}, "input_ids"),
        (np.array([5, 2**32 + 5]), {}, "input_ids"),
        (np.array([2**64 - 1], np.uint64), {}, "input_ids"),
        ([1, "2"], {}, "input_ids"),
        ([1.5], {}, "input_ids"),
        ([1, True], {}, "input_ids"),
        (np.array([True, False]), {}, "input_ids"),
        (b"The sky is", {}, "text_input"),
        (bytearray(b"The sky is"), {}, "text_input"),
        ({"role": "user", "content": "a"}, {}, "messages"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"temperature": float("inf")}, "temperature"),
        ("x", {"stop": [b"bytes"]}, "stop"),
        pytest.param("x", {"max_tokens": 10**5000}, "max_tokens", id="digits-option"),
        pytest.param([1, 10**5000], {}, "input_ids", id="digits-id"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(
    prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: got "):
        build_request("fastserve", prompt, options, stream=True)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"temperature": float("inf")}, "a finite number"),
        ({"top_p": b"1"}, "a finite number"),
        ({"max_tokens": float("nan")}, "an integer that fits 64 bits"),
        ({"ignore_eos": float("nan")}, "a bool"),
        ({"stop": b"bytes"}, "text or a list of texts"),
        ({"tenant": b"bytes"}, "text"),
        ({"ttft_slo_ms": float("nan")}, "a finite number"),
        ({"stop_token_ids": {5}}, "a list of token ids"),
    ],
    ids=str,
)
def test_a_refusal_says_what_that_option_may_be(options: dict[str, Any], allowed: str) -> None:
    with pytest.raises(InvalidRequest, match=f"; must be {allowed}$"):
        build_request("fastserve", "x", options, stream=True)


def test_an_unknown_option_is_a_programming_error_that_lists_the_options() -> None:
    with pytest.raises(TypeError, match=r"'max_token'; there are: .*max_tokens"):
        build_request("fastserve", "x", {"max_token": 3}, stream=True)


def test_an_interval_of_too_many_digits() -> None:
    with pytest.raises(InvalidRequest, match=r"^interval_s: got a number of too many digits"):
        build_watch_request("fastserve", 10**5000)


@pytest.mark.parametrize("timeout_s", [float("nan"), 0.0, -1.0])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_a_timeout_is_above_0(scheme: str, timeout_s: float) -> None:
    url, message = f"{scheme}://127.0.0.1:1", r"^timeout_s: got .*; must be a number of seconds"
    with FastServeClient(url) as client, pytest.raises(InvalidRequest, match=message):
        client.stream("Hello", timeout_s=timeout_s)
    async with AsyncFastServeClient(url) as client:
        with pytest.raises(InvalidRequest, match=message):
            client.stream("Hello", timeout_s=timeout_s)


def test_forms_and_biases_travel_as_json() -> None:
    options: dict[str, Any] = {
        "logit_bias": {7: -100, 9: 0.5},
        "structured_output": {"json_schema": {"type": "object"}},
    }
    parameters = _parameters(build_request("fastserve", "x", options, stream=False))
    assert parameters["logit_bias"] == {"7": -100, "9": 0.5}
    assert parameters["structured_output"] == options["structured_output"]
    for name, value in [("logit_bias", {7: float("nan")}), ("structured_output", {"regex": b"a"})]:
        with pytest.raises(InvalidRequest, match=f"{name}: got .*; must be a mapping that JSON"):
            build_request("fastserve", "x", {name: value}, stream=False)
