"""Stop words across token boundaries, and nothing lost."""

from __future__ import annotations

import pytest
from fastserve_backend.engine.text_stream import TextStream
from hypothesis import given
from hypothesis import strategies as st


class Pieces:
    """A detokenizer whose token n is the n-th piece of a list."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def step(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def stream(pieces: list[str], stop: tuple[str, ...], min_tokens: int = 0) -> tuple[list[str], bool]:
    text = TextStream(Pieces(pieces), stop)
    sent = []
    for index in range(len(pieces)):
        piece, stopped = text.push(index, may_stop=index + 1 >= min_tokens)
        sent.append(piece)
        if stopped:
            return sent, True
    return [*sent, text.finish()], False


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["Hello", " END", " more"], ("END",), ["Hello", " "]),
        (["a", "E", "N", "D", "b"], ("END",), ["a", "", "", ""]),
        (["xEN", "Dy"], ("END",), ["x", ""]),
        (["one\n", "\ntwo"], ("\n\n",), ["one", ""]),
        (["ab", "c"], ("zzz", "bc"), ["a", ""]),
        (["aXbY"], ("Y", "X"), ["a"]),  # the earliest in the text wins
        (["aab", "aabb"], ("aabb",), ["", "aab"]),
    ],
)
def test_a_stop_word_ends_the_text_before_it(
    pieces: list[str], stop: tuple[str, ...], expected: list[str]
) -> None:
    assert stream(pieces, stop) == (expected, True)


def test_a_false_start_is_released() -> None:
    assert stream(["aE", "N", "x"], ("END",)) == (["a", "", "ENx", ""], False)
    assert stream(["aEN"], ("END",)) == (["a", "EN"], False)


def test_below_min_tokens_a_stop_word_is_text() -> None:
    assert stream(["END", "-", "END"], ("END",), min_tokens=2) == (["END", "-", ""], True)


@given(
    pieces=st.lists(st.text("abc", max_size=4), min_size=1, max_size=20),
    stop=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
)
def test_streamed_text_equals_the_whole_text_cut_at_the_first_stop_word(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    sent, stopped = stream(pieces, stop)
    whole = ""
    for piece in pieces:  # a stop word counts as soon as the text contains it
        whole += piece
        found = [at for word in stop if (at := whole.find(word)) >= 0]
        if found:
            assert stopped
            assert "".join(sent) == whole[: min(found)]
            return
    assert not stopped
    assert "".join(sent) == whole
