from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from fastserve_client import (
    Chunk,
    ClientError,
    InvalidRequest,
    PerfMetrics,
    ServerError,
    TokenLogprob,
    protocol,
)
from fastserve_client.http_codec import EventDecoder, encode_request, refusal, stream_path
from fastserve_client.request import InferRequest
from fastserve_client.response import read_chunk


def _event(**values: Any) -> bytes:
    return b"data: " + json.dumps(values, ensure_ascii=False).encode() + b"\n\n"


def _decode(*pieces: bytes) -> Sequence[Chunk | ClientError]:
    decoder = EventDecoder("fastserve")
    return [
        item if isinstance(item, ClientError) else read_chunk("fastserve", item)
        for piece in pieces
        for item in decoder.feed(piece)
    ]


def test_a_request_is_the_tensors_and_its_id() -> None:
    inputs = {"input_ids": (5, 0), "sampling_parameters": '{"stop": ["é"]}'}
    body = json.loads(encode_request(InferRequest("fastserve", inputs, "a1")))
    assert body == {"input_ids": [5, 0], "sampling_parameters": '{"stop": ["é"]}', "id": "a1"}
    assert "id" not in json.loads(encode_request(InferRequest("fastserve", inputs)))
    ids = InferRequest("fastserve", {"input_ids": array("i", (5, 0))})
    assert json.loads(encode_request(ids)) == {"input_ids": [5, 0]}


def test_the_name_of_a_model_is_a_segment_of_the_path() -> None:
    assert stream_path("a/b c") == "/v2/models/a%2Fb%20c/generate_stream"


def test_a_list_of_one_comes_as_its_element() -> None:
    one = _event(model_name="fastserve", model_version="1", text_output="é", output_ids=7)
    more = _event(text_output="é", output_ids=[7, 9])
    none = _event(text_output="", output_ids=[], finish_reason="stop", num_input_tokens=3)
    assert _decode(one, more, none) == [
        Chunk("é", (7,)),
        Chunk("é", (7, 9)),
        Chunk("", (), "stop", 3),
    ]


def test_the_last_chunk_with_everything() -> None:
    logprobs = [
        {
            "token_id": 7,
            "token": " a",
            "logprob": -0.5,
            "top": [{"token_id": 9, "token": "\ufffd", "logprob": -0.4, "bytes": [240, 159]}],
        }
    ]
    perf = {spec.name: number for number, spec in enumerate(protocol.PERF_OUTPUTS, 1_700_000_000)}
    event = _event(
        text_output=" a",
        output_ids=7,
        finish_reason="length",
        cumulative_logprob=-1.5,
        logprobs=json.dumps(logprobs),
        **perf,
    )
    (chunk,) = _decode(event)
    assert isinstance(chunk, Chunk)
    assert chunk.cumulative_logprob == -1.5
    likeliest = TokenLogprob(9, "\ufffd", -0.4, part=b"\xf0\x9f")
    assert chunk.logprobs == (TokenLogprob(7, " a", -0.5, (likeliest,)),)
    assert (chunk.logprobs[0].utf8, likeliest.utf8) == (b" a", b"\xf0\x9f")
    assert chunk.perf == PerfMetrics(**perf)


def test_events_may_be_cut_anywhere() -> None:
    first, second = _event(text_output="日本", output_ids=1), _event(text_output="語", output_ids=2)
    data = first + second
    for cut in range(len(data)):
        assert _decode(data[:cut], data[cut:]) == [Chunk("日本", (1,)), Chunk("語", (2,))]


def test_what_only_unicode_calls_a_line_end_does_not_end_an_event() -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x1cf"
    assert _decode(_event(text_output=text, output_ids=1)) == [Chunk(text, (1,))]


def test_an_error_in_an_event() -> None:
    first, second = _decode(
        _event(text_output="a", output_ids=1), _event(error="rank 0 died (signal 9)")
    )
    assert first == Chunk("a", (1,))
    assert isinstance(second, ServerError)
    assert str(second) == "rank 0 died (signal 9)"


@pytest.mark.parametrize(
    "event",
    [
        b"data: {\n\n",
        b"data: \xff\n\n",
        b"data: 3\n\n",
        _event(text_output="a"),
        _event(text_output=3, output_ids=1),
        _event(text_output="a", output_ids=1, logprobs="{"),
    ],
)
def test_an_event_that_makes_no_sense_is_a_server_error(event: bytes) -> None:
    with pytest.raises(ServerError, match="cannot read the response of model 'fastserve'"):
        _decode(event)


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (400, _event(error="top_p: got 2; must be"), InvalidRequest, "top_p: got 2; must be"),
        (404, b'{"error":"no such model"}', ServerError, "no such model"),
        (404, b"<html>", ServerError, "http://h:1 answered with the HTTP status 404"),
        (500, b'{"error":{"message":"of another kind"}}', ServerError, "HTTP status 500"),
        (500, b"[]", ServerError, "HTTP status 500"),
        (500, b"", ServerError, "HTTP status 500"),
    ],
)
def test_a_refusal_says_what_the_server_says(
    status: int, body: bytes, kind: type[ClientError], text: str
) -> None:
    error = refusal("http://h:1", status, body)
    assert type(error) is kind
    assert text in str(error)
