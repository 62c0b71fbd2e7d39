from __future__ import annotations

import json
import struct
from array import array
from typing import Any

import numpy as np
import pytest
from fastserve_client import (
    Chunk,
    Completion,
    PerfMetrics,
    PromptToken,
    ServerError,
    TokenLogprob,
    protocol,
)
from fastserve_client.grpc_codec import decode_response, encode_request
from fastserve_client.request import InferRequest
from fastserve_client.response import read_chunk
from tritonclient.grpc import InferInput, InferResult, service_pb2

_SPECS = {spec.name: spec for spec in (*protocol.INPUTS, *protocol.OUTPUTS)}


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


def test_a_request_is_tensors_of_the_protocol() -> None:
    request = InferRequest(
        "fastserve",
        {"input_ids": (5, 0, 2**31 - 1), "sampling_parameters": '{"stop": ["é"]}'},
        "a1",
    )
    message = encode_request(request)
    assert (message.model_name, message.id) == ("fastserve", "a1")
    for tensor in message.inputs:
        spec = _SPECS[tensor.name]
        assert tensor.datatype == spec.datatype
        assert list(tensor.shape) == [3 if spec.variable_length else 1]
    raw = dict(
        zip((tensor.name for tensor in message.inputs), message.raw_input_contents, strict=True)
    )
    assert struct.unpack("<3i", raw["input_ids"]) == (5, 0, 2**31 - 1)
    text = '{"stop": ["é"]}'.encode()
    assert raw["sampling_parameters"] == struct.pack("<I", len(text)) + text


def test_an_array_of_token_ids_travels_as_a_tuple_does() -> None:
    ids = (5, 0, -1, 2**31 - 1)
    requests = [InferRequest("fastserve", {"input_ids": kind}) for kind in (ids, array("i", ids))]
    assert encode_request(requests[0]) == encode_request(requests[1])


def _decode(response: Any) -> Chunk:
    return read_chunk("fastserve", decode_response(response))


def test_a_chunk_in_the_middle() -> None:
    response = _response(text_output=["é"], output_ids=[7, 9])
    assert _decode(response) == Chunk(text="é", token_ids=(7, 9), finish_reason=None)


def test_a_chunk_may_have_no_tokens() -> None:
    chunk = _decode(_response(text_output=[""], output_ids=[], finish_reason=["stop"]))
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
        num_cached_tokens=[2],
        cumulative_logprob=[-1.5],
        logprobs=[json.dumps(logprobs)],
        **{name: [value] for name, value in perf.items()},
    )
    chunk = _decode(response)
    assert (chunk.num_input_tokens, chunk.num_cached_tokens) == (3, 2)
    assert chunk.cumulative_logprob == -1.5
    assert chunk.logprobs == (TokenLogprob(7, " a", -0.5, (TokenLogprob(7, " a", -0.5),)),)
    assert chunk.perf == PerfMetrics(**perf)


def test_a_chunk_with_its_prompt() -> None:
    part = {"token_id": 8, "token": "\ufffd", "bytes": [0xC3]}
    entry = part | {"logprob": -0.5, "rank": 2, "top": [part | {"logprob": -0.25}]}
    chunk = _decode(
        _response(
            text_output=[" a"],
            output_ids=[7],
            prompt_logprobs=[json.dumps([None, entry])],
            prompt_tokens=[json.dumps([{"token_id": 2, "token": "", "special": "</s>"}, part])],
        )
    )
    top = TokenLogprob(8, "\ufffd", -0.25, part=b"\xc3")
    assert chunk.prompt_logprobs == (None, TokenLogprob(8, "\ufffd", -0.5, (top,), b"\xc3", 2))
    assert chunk.prompt_tokens == (
        PromptToken(2, "", special="</s>"),
        PromptToken(8, "\ufffd", b"\xc3"),
    )
    whole = Completion.from_chunks([chunk, Chunk("b", (9,))])
    assert whole.prompt_logprobs == chunk.prompt_logprobs


def test_numbers_and_strings_equal_what_tritonclient_reads() -> None:
    response = _response(
        text_output=["日本語"], output_ids=[-1, 2**31 - 1], cumulative_logprob=[-0.1]
    )
    theirs = InferResult(response)
    chunk = _decode(response)
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
        _decode(response)


def test_a_response_of_another_model_is_a_server_error() -> None:
    with pytest.raises(ServerError, match="output_ids"):
        _decode(_response(text_output=["a"]))
