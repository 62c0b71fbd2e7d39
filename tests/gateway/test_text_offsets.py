"""Offsets of tokens that are parts of characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from fastserve_client.gateway.completions import CompletionAnswer
from fastserve_client.gateway.schemas import CompletionRequest
from fastserve_client.gateway.text_offsets import TextOffsets
from fastserve_client.results import Chunk, Completion, TokenLogprob
from hypothesis import example, given
from hypothesis import strategies as st

TEXTS = st.text(st.sampled_from("a \ufffdé一😀😁"), max_size=12)


def token_texts(pieces: Sequence[bytes]) -> list[str]:
    """As the server tells them."""
    return [piece.decode("utf-8", "replace") for piece in pieces]


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place for place in places if place < len(data))})
    return [data[start:end] for start, end in pairwise(bounds)]


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"Hi", b" \xf0\x9f", b"\x98", b"\x80", b"!"], [0, 2, 3, 3, 4]),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80", b"ab", b"c"], [0, 0, 0, 0, 1, 3]),
        ([b"\xf0\x9f", b"\x98\x80", b"\xf0\x9f", b"\x98\x81", b"a"], [0, 0, 1, 1, 2]),
        ([b"\xf0\x9f\x98", b"\x80 \xe4\xb8", b"\x80", b"a"], [0, 0, 2, 3]),
        ([b"a", b"\xff", b"b", b"\xf0\x9f"], [0, 1, 2, 3]),  # broken in the text as well
        ([b"\xf0\x9f\x98", b"", b"\x80", b"a"], [0, 0, 0, 1]),
    ],
)
def test_parts_of_characters(pieces: list[bytes], offsets: list[int]) -> None:
    text = b"".join(pieces).decode("utf-8", "replace")
    assert TextOffsets().add(token_texts(pieces), text) == offsets
    request = CompletionRequest(model="fastserve", prompt="a", logprobs=0)
    logprobs = tuple(TokenLogprob(5, token, -1.0) for token in token_texts(pieces))
    whole = Completion(text, (5,) * len(pieces), "length", 1, logprobs, None, None)
    choice = CompletionAnswer(request).choice(0, whole)
    assert choice["logprobs"]["text_offset"] == offsets


@given(TEXTS, st.lists(st.integers(0, 40)), st.sampled_from((b"", b"\xff", b"\xf0\x9f\x98")))
@example("一\ufffd", [1, 2], b"")
def test_a_stream_tells_where_it_is(text: str, places: list[int], rest: bytes) -> None:
    """Also where it ends with bytes that are no text."""
    pieces = cut(text.encode() + rest, places)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = TextOffsets(), 0
    for piece, token in zip(pieces, token_texts(pieces), strict=True):
        new = decoder.decode(piece)
        assert offsets.add([token], new) == [length]
        length += len(new)


@given(TEXTS, st.lists(st.integers(0, 40)))
def test_a_whole_text_has_a_place_for_each(text: str, places: list[int]) -> None:
    pieces = cut(text.encode(), places)
    tokens = token_texts(pieces)
    offsets = TextOffsets().add(tokens, text)
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        if "\ufffd" not in token:
            assert text.startswith(token, offset)


def test_text_that_is_held_back_for_a_stop_word() -> None:
    request = CompletionRequest(model="fastserve", prompt="a", logprobs=0, stream=True)
    answer = CompletionAnswer(request)
    found = []
    for token, text in (
        ("ab", ""),
        (" c", ""),
        ("\ufffd", ""),
        ("\ufffd\ufffd", ""),
        ("d", "ab c一d"),
    ):
        entry = TokenLogprob(5, token, -1.0)
        choice = answer.delta(0, Chunk(text, (5,), logprobs=(entry,)))
        assert choice is not None
        found += choice["logprobs"]["text_offset"]
    assert found == [0, 2, 4, 4, 5]


def test_the_work_a_token_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    num_steps = 0
    steps = TextOffsets._steps

    def counted(*arguments: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return steps(*arguments)

    monkeypatch.setattr(TextOffsets, "_steps", counted)
    for text in ("\ufffd" * 1000, "一" * 400, "😀" * 250):
        TextOffsets().add(["\ufffd"] * 1000, text)
    assert num_steps < 3 * 1000 * 130
