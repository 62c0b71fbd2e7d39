"""Stop words across token boundaries; no text is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fastserve_backend.checkpoints.chat_options import DEFAULT_CHAT, ChatOptions
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer, Tokenizer
from fastserve_backend.engine.text_stream import TextStream
from hypothesis import given
from hypothesis import strategies as st


class Pieces(Tokenizer):
    """A tokenizer whose token n is the n-th piece of a list. Pieces in angle brackets are special
    tokens."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces
        self.specials = {n: piece for n, piece in enumerate(pieces) if piece.startswith("<")}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def render_chat(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> str:
        raise NotImplementedError

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self.specials else self._pieces[token_id].encode()


def stream(
    pieces: list[str],
    stop: tuple[str, ...],
    min_tokens: int = 0,
    *,
    has_end: bool = False,
    skip_special_tokens: bool = True,
) -> tuple[list[str], bool]:
    """``has_end``: the last piece is that of an end token."""
    text = TextStream(Pieces(pieces), stop, skip_special_tokens=skip_special_tokens)
    sent = []
    for index in range(len(pieces)):
        is_end = has_end and index == len(pieces) - 1
        piece, stopped = text.push(index, may_stop=index + 1 >= min_tokens, is_end=is_end)
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


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["Hi", "<end>", "more"], "<end>", "Hi"),
        (["Hi", "<end>", "\n", "more"], "<end>\n", "Hi"),
        (["Hi", " EN", "D", "<end>"], "END<end>", "Hi "),
        (["Hi", "\n", "<end>", "\n", "more"], "\n<end>\n", "Hi"),
        (["Hi", "<a>", "<b>", "more"], "<a><b>", "Hi"),
        (["Hi", "<a>", "<a>", "<b>", "more"], "<a><b>", "Hi"),
        (["Hi", "<a>", "x", "<b>"], "<a>x<b>", "Hi"),
        # Spelled with ordinary tokens it is text that the client sees.
        (["Hi ", "\\<e", "nd", ">", "more", "<end>"], "<end>", "Hi \\"),
        # Special tokens that no stop word names have no text, and interrupt no word.
        (["Hi E", "<pad>", "ND", "more"], "END", "Hi "),
        (["Hi E", "<pad>", "ND", "<end>"], "END<end>", "Hi "),
    ],
)
def test_a_stop_word_may_name_special_tokens(pieces: list[str], stop: str, expected: str) -> None:
    sent, stopped = stream(pieces, (stop, "never"))
    assert ("".join(sent), stopped) == (expected, True)


@pytest.mark.parametrize("stop", [">", "end", "<", "d>x", "x<e", "<end", "end>"])
def test_a_part_of_a_special_token_is_no_stop_word(stop: str) -> None:
    sent, stopped = stream(["x", "<end>", "x", "<end>"], (stop, "never<end>"))
    assert ("".join(sent), stopped) == ("xx", False)


def test_below_min_tokens_special_tokens_stop_nothing() -> None:
    pieces = ["a", "<end>", "b", "<end>", "c"]
    assert stream(pieces, ("<end>",), min_tokens=3) == (["a", "", "b", ""], True)
    assert stream(pieces, ("b<end>",), min_tokens=5) == (["a", "", "", "", "bc", ""], False)


@pytest.mark.parametrize("end", ["<end>", "."])
def test_the_end_token_has_no_text_but_may_complete_a_stop_word(end: str) -> None:
    pieces = ["Hi", " END", end]
    assert stream(pieces, (), has_end=True) == (["Hi", " END", "", ""], False)
    assert stream(pieces, (f"END{end}",), has_end=True) == (["Hi", " ", ""], True)
    sent, stopped = stream(pieces, (f"{end}x", "END!"), has_end=True)
    assert ("".join(sent), stopped) == ("Hi END", False)


@pytest.mark.parametrize(
    ("stop", "expected", "stops"),
    [
        ((), "x<a>y<b>", False),
        (("never",), "x<a>y<b>", False),
        (("<a>",), "x", True),
        (("y<b>",), "x<a>", True),
        (("a>y", "<b>"), "x<", True),
        (("<b><end>",), "x<a>y", True),
        (("<b><end>.",), "x<a>y<b>", False),
    ],
)
def test_special_tokens_are_text_on_request_except_the_end_token(
    stop: tuple[str, ...], expected: str, stops: bool
) -> None:
    pieces = ["x", "<a>", "y", "<b>", "<end>"]
    sent, stopped = stream(pieces, stop, has_end=True, skip_special_tokens=False)
    assert ("".join(sent), stopped) == (expected, stops)


def test_a_special_token_on_request_ends_a_cut_character() -> None:
    tokenizer = ByteTokenizer(300)  # é is two bytes, and token 2 is </s>
    (first, second) = tokenizer.encode("é", special_tokens=False)
    for skips, expected in ((True, "é"), (False, "\ufffd</s>\ufffd")):
        text = TextStream(tokenizer, ("</s>x",), skip_special_tokens=skips)
        sent = [text.push(one, may_stop=True)[0] for one in (first, 2, second)]
        assert "".join(sent) + text.finish() == expected


@given(
    pieces=st.lists(st.sampled_from(["a", "b", "ab", "ba", "<a>", "<b>"]), min_size=1, max_size=9),
    stop=st.lists(
        st.lists(st.sampled_from(["a", "b", "<a>"]), min_size=1, max_size=4).map("".join),
        min_size=1, max_size=3,
    ).map(tuple),
)  # fmt: skip
def test_streams_of_special_tokens_are_cut_at_the_first_stop_word(
    pieces: list[str], stop: tuple[str, ...]
) -> None:
    """Compares with the whole text, without special tokens except the one that stop words may
    name."""
    sent, stopped = stream(pieces, stop)
    for end in range(1, len(pieces) + 1):
        some = [piece for piece in pieces[:end] if piece != "<b>"]
        plain = "".join(piece for piece in some if piece != "<a>")
        spelled = "".join(some)
        lengths = [len(plain) - at for word in stop if (at := plain.find(word)) >= 0]
        lengths += [
            len(spelled[at:].replace("<a>", ""))
            for word in stop
            if "<a>" in word and (at := spelled.find(word)) >= 0
        ]
        if lengths:
            assert stopped
            assert "".join(sent) == plain[: len(plain) - max(lengths)]
            return
    assert not stopped
    assert "".join(sent) == "".join(piece for piece in pieces if not piece.startswith("<"))


@given(
    pieces=st.lists(st.text("abc<", max_size=4), min_size=1, max_size=20),
    stop=st.lists(st.text("abc<", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    skips_specials=st.booleans(),
)
def test_streamed_text_equals_the_whole_text_cut_at_the_first_stop_word(
    pieces: list[str], stop: tuple[str, ...], skips_specials: bool
) -> None:
    """Pieces that begin with < are special tokens."""
    if skips_specials:
        pieces = [piece.lstrip("<") for piece in pieces]
    sent, stopped = stream(pieces, stop, skip_special_tokens=skips_specials)
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


@given(
    st.lists(st.sampled_from(["a", "b", "ab", "<x>", "<y>", "é"]), min_size=1, max_size=24),
    st.lists(st.sampled_from(["ab", "ba", "a<x>b", "<y>", "aab", "é<x>"]), max_size=3),
    st.booleans(),
    st.integers(0, 24),
)
def test_a_resumed_text_goes_on_where_the_lost_one_was(
    pieces: list[str], stop: list[str], skips: bool, min_tokens: int
) -> None:
    def text_stream() -> TextStream:
        return TextStream(Pieces(pieces), stop, skip_special_tokens=skips)

    whole = text_stream()
    for index in range(len(pieces)):
        resumed = text_stream()
        resumed.resume(range(index))
        may_stop = index + 1 >= min_tokens
        expected = whole.push(index, may_stop=may_stop)
        assert resumed.push(index, may_stop=may_stop) == expected
        if expected[1]:
            return
    assert resumed.finish() == whole.finish()


def test_a_resumed_text_completes_a_character() -> None:
    tokenizer = ByteTokenizer(300)
    ids = tokenizer.encode("x" * 2000 + "é", special_tokens=False)
    text = TextStream(tokenizer, ())
    text.resume(ids[:-1])
    assert text.push(ids[-1], may_stop=True) == ("é", False)
