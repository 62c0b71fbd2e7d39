"""Stop words do not count between two marks at the beginning of an answer."""

from __future__ import annotations

import pytest
from fastserve_backend.engine.text_stream import TextStream
from test_text_stream import Pieces

MARKS = ("<think>", "</think>")


def stopped_text(pieces: list[str], marks: tuple[str, ...], stop: str = "END") -> tuple[str, bool]:
    text = TextStream(Pieces(pieces), (stop,), skip_special_tokens=False, stop_not_between=marks)
    sent = ""
    for index in range(len(pieces)):
        piece, stops = text.push(index, may_stop=True)
        sent += piece
        if stops:
            return sent, True
    return sent + text.finish(), False


@pytest.mark.parametrize(
    ("pieces", "marks", "expected"),
    [
        (["<think>", "an END", "</think>", "b", "END"], MARKS, "<think>an END</think>b"),
        (["<th", "ink>EN", "D</th", "ink>", "bEND"], MARKS, "<think>END</think>b"),
        (["\n<think>END</think>", "bEND"], MARKS, "\n<think>END</think>b"),
        (["an END", "</think>", "END"], ("", "</think>"), "an END</think>"),
        (["bEND", "<think>"], MARKS, "b"),
        (["<b>", "END"], MARKS, "<b>"),
        (["<think>E", "N</think>", "D", "END"], MARKS, "<think>EN</think>D"),
    ],
)
def test_they_count_behind_the_marks(
    pieces: list[str], marks: tuple[str, ...], expected: str
) -> None:
    assert stopped_text(pieces, marks) == (expected, True)


def test_a_mark_is_no_stop_word() -> None:
    assert stopped_text(["<think>", "a", "</think>", "b"], MARKS, "</think>") == (
        "<think>a</think>b",
        False,
    )


def test_without_a_closing_mark_none_counts() -> None:
    assert stopped_text(["<think>", "END"], MARKS) == ("<think>END", False)


def test_a_resumed_text_knows_where_it_is() -> None:
    pieces = ["<think>", *["a"] * 3000, "END", "</think>", "END"]
    for place, stops in ((2, False), (3001, False), (3003, True)):
        text = TextStream(
            Pieces(pieces), ("END",), skip_special_tokens=False, stop_not_between=MARKS
        )
        text.resume(range(place))
        assert text.push(place, may_stop=True)[1] is stops
