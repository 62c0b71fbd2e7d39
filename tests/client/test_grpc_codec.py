from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
from fastserve_client import Chunk, InvalidRequest, PerfMetrics, ServerError, TokenLogprob, protocol
from fastserve_client.grpc_codec import build_request, parse_response
from fastserve_client.options import OPTION_NAMES
from tritonclient.grpc import InferInput, InferResult, service_pb2

_SPECS = {spec.name: spec for spec in (*protocol.INPUTS, *protocol.OUTPUTS)}


def _tensors(request: Any) -> dict[str, bytes]:
    return {
        tensor.name: raw
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def _text(raw: bytes) -> str:
    (length,) = struct.unpack_from("<I", raw)
    assert len(raw) == 4 + length
    return raw[4:].decode()


def _parameters(request: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(_text(_tensors(request)["sampling_parameters"]))
    return values


def _response(**outputs: list[Any]) -> Any:
    """A response as the server sends it: tritonclient packs the tensors."""
    response = service_pb2.ModelInferResponse(model_name="fastserve")
    for name, values in outputs.items():
        datatype = _SPECS[name].datatype
        if datatype == "BYTES":
            array = np.array([value.encode() for value in values], dtype=np.object_)
        else:
            array = np.array(values, dtype=datatype.replace("FP", "float").lower())
        tensor = InferInput(name, [len(values)], datatype)
        tensor.set_data_from_numpy(array)
        response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
        response.raw_output_contents.append(tensor._get_content())
    return response


def test_a_request_carries_prompt_options_and_what_to_return() -> None:
    request = build_request(
        "fastserve", "Žluťoučký kůň", {"max_tokens": 8, "top_p": None}, stream=True, request_id="a1"
    )
    tensors = _tensors(request)
    assert (request.model_name, request.id) == ("fastserve", "a1")
    assert _text(tensors["text_input"]) == "Žluťoučký kůň"
    assert _parameters(request) == {
        "max_tokens": 8,
        "stream": True,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
    }
    assert "input_ids" not in tensors


def test_every_tensor_of_a_request_fits_the_protocol() -> None:
    options = {"logprobs": 2, "stop": ["a", "b"]}
    for prompt in ("text", [1, 2, 3]):
        request = build_request("fastserve", prompt, options, stream=False, perf_metrics=True)
        for tensor in request.inputs:
            spec = _SPECS[tensor.name]
            assert tensor.datatype == spec.datatype
            assert list(tensor.shape) == [3 if spec.variable_length else 1]


def test_token_ids_replace_the_text() -> None:
    request = build_request("fastserve", [5, 0, 2**31 - 1], {}, stream=False)
    tensors = _tensors(request)
    assert struct.unpack("<3i", tensors["input_ids"]) == (5, 0, 2**31 - 1)
    assert "text_input" not in tensors
    assert _parameters(request)["stream"] is False


def test_asking_for_logprobs_asks_for_their_outputs() -> None:
    parameters = _parameters(build_request("fastserve", "x", {"logprobs": 0}, stream=True))
    assert parameters["return_logprobs"] is True
    assert parameters["return_cumulative_logprob"] is True


def test_perf_metrics_are_asked_for_by_a_flag() -> None:
    request = build_request("fastserve", "x", {}, stream=True, perf_metrics=True)
    assert _parameters(request)["return_perf_metrics"] is True


def test_options_and_flags_are_those_of_the_protocol() -> None:
    assert set(protocol.PARAMETER_KEYS) >= OPTION_NAMES
    request = build_request("fastserve", "x", {"logprobs": 1}, stream=True, perf_metrics=True)
    assert _parameters(request).keys() <= set(protocol.PARAMETER_KEYS)


def test_an_integer_keeps_all_its_digits() -> None:
    request = build_request("fastserve", "x", {"seed": 2**64 - 1}, stream=True)
    assert _parameters(request)["seed"] == 2**64 - 1


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("lone surrogate \ud800", {}, "text_input"),
        ([1, 2**31], {}, "input_ids"),
        ([1, "2"], {}, "input_ids"),
        ([1.5], {}, "input_ids"),
        ("x", {"temperature": float("nan")}, "temperature"),
        ("x", {"temperature": float("inf")}, "temperature"),
        ("x", {"stop": [b"bytes"]}, "stop"),
    ],
)
def test_what_the_wire_cannot_carry_is_refused_by_name(
    prompt: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: got "):
        build_request("fastserve", prompt, options, stream=True)


def test_an_unknown_option_is_a_programming_error_that_lists_the_options() -> None:
    with pytest.raises(TypeError, match=r"'max_token'; there are: .*max_tokens"):
        build_request("fastserve", "x", {"max_token": 3}, stream=True)


def test_a_chunk_in_the_middle() -> None:
    response = _response(text_output=["é"], output_ids=[7, 9])
    assert parse_response(response) == Chunk(text="é", token_ids=(7, 9), finish_reason=None)


def test_a_chunk_may_have_no_tokens() -> None:
    chunk = parse_response(_response(text_output=[""], output_ids=[], finish_reason=["stop"]))
    assert chunk == Chunk(text="", token_ids=(), finish_reason="stop")


def test_the_last_chunk_with_everything() -> None:
    logprobs = [
        {
            "token_id": 7,
            "token": " a",
            "logprob": -0.5,
            "top": [{"token_id": 7, "token": " a", "logprob": -0.5}],
        }
    ]
    perf = {spec.name: number for number, spec in enumerate(protocol.PERF_OUTPUTS, 1_700_000_000)}
    response = _response(
        text_output=[" a"],
        output_ids=[7],
        finish_reason=["length"],
        num_input_tokens=[3],
        cumulative_logprob=[-1.5],
        logprobs=[json.dumps(logprobs)],
        **{name: [value] for name, value in perf.items()},
    )
    chunk = parse_response(response)
    assert chunk.num_input_tokens == 3
    assert chunk.cumulative_logprob == -1.5
    assert chunk.logprobs == (TokenLogprob(7, " a", -0.5, (TokenLogprob(7, " a", -0.5),)),)
    assert chunk.perf == PerfMetrics(**perf)


def test_numbers_and_strings_equal_what_tritonclient_reads() -> None:
    response = _response(
        text_output=["日本語"], output_ids=[-1, 2**31 - 1], cumulative_logprob=[-0.1]
    )
    theirs = InferResult(response)
    chunk = parse_response(response)
    assert chunk.text == theirs.as_numpy("text_output")[0].decode()
    assert list(chunk.token_ids) == theirs.as_numpy("output_ids").tolist()
    assert chunk.cumulative_logprob == theirs.as_numpy("cumulative_logprob")[0]


@pytest.mark.parametrize(
    ("name", "datatype", "raw"),
    [
        ("text_output", "BYTES", b"\x05\x00\x00\x00abc"),  # shorter than it says
        ("text_output", "BYTES", b"\x01\x00\x00\x00\xff"),  # not UTF-8
        ("output_ids", "INT32", b"\x00\x00\x00"),
        ("output_ids", "FP64", b"\x00" * 8),
    ],
)
def test_a_response_that_makes_no_sense_is_a_server_error(
    name: str, datatype: str, raw: bytes
) -> None:
    response = _response(text_output=["a"], output_ids=[1])
    index = [output.name for output in response.outputs].index(name)
    response.outputs[index].datatype = datatype
    response.raw_output_contents[index] = raw
    with pytest.raises(ServerError, match="cannot read the response of model 'fastserve'"):
        parse_response(response)


def test_a_response_of_another_model_is_a_server_error() -> None:
    with pytest.raises(ServerError, match="output_ids"):
        parse_response(_response(text_output=["a"]))
