"""Large answers are read and written in pieces, away from the event loop."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from fastserve_client import protocol
from fastserve_client.errors import ServerError
from fastserve_client.response import is_large, read_chunk
from fastserve_gateway.answer_writer import AnswerWriter
from fastserve_gateway.json_pieces import json_pieces
from fastserve_gateway.json_size import SMALL_BODY_BYTES

VALUES = [
    {},
    [],
    {"a": []},
    {"choices": [{"logprobs": {"content": [{"top": [{"logprob": -1.5}], "token": "é\n"}]}}]},
    [[[[[[[1, None, True], "\ud83d\ude00"]]]]]],
    {"": {'quoted "name"': (1, 2.5e-9)}},
]
OUTPUTS = {protocol.OUTPUT_IDS: [5], protocol.TEXT_OUTPUT: ["x"]}
ENTRY = {"token_id": 5, "token": "x", "logprob": -0.5, "top": [], "rank": 1}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_pieces_are_the_whole(value: object, ensure_ascii: bool) -> None:
    whole = json.dumps(value, ensure_ascii=ensure_ascii, separators=(",", ":"))
    assert "".join(json_pieces(value, ensure_ascii=ensure_ascii)) == whole


def test_numbers_are_finite() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        list(json_pieces({"a": [float("nan")]}))


@pytest.mark.parametrize("text", ["", "[]", " [ null , ] ", json.dumps([None, ENTRY, ENTRY])])
def test_a_list_is_read_by_entry(text: str) -> None:
    outputs = OUTPUTS | {protocol.PROMPT_LOGPROBS_OUTPUT: [text]}
    entries = read_chunk("m", outputs).prompt_logprobs
    assert [entry and entry.token for entry in entries] == [
        entry and "x" for entry in json.loads(text.replace(", ]", "]") or "[]")
    ]


@pytest.mark.parametrize("text", ["{}", "[", "[null", "[null null]", "[nul]", "1"])
def test_no_list_is_an_error(text: str) -> None:
    with pytest.raises(ServerError, match="cannot read the response"):
        read_chunk("m", OUTPUTS | {protocol.PROMPT_LOGPROBS_OUTPUT: [text]})


def test_what_is_long_is_large() -> None:
    assert not is_large(OUTPUTS)
    assert is_large(OUTPUTS | {protocol.PROMPT_LOGPROBS_OUTPUT: ["[" + "null," * (1 << 16)]})


def test_only_large_answers_leave_the_event_loop() -> None:
    async def threads() -> list[threading.Thread]:
        writer = AnswerWriter()
        sizes = SMALL_BODY_BYTES, SMALL_BODY_BYTES + 1
        try:
            return [await writer.run(size, threading.current_thread) for size in sizes]
        finally:
            writer.close()

    small, large = asyncio.run(threads())
    assert small is threading.current_thread()
    assert large is not small
