"""The part of a prompt that goes to the length predictor."""

from __future__ import annotations

import msgspec
from fastserve_backend.length_prediction.messages import Predict, to_predictor_decoder
from fastserve_backend.length_prediction.prompt_text import cut, cut_tokens, last_user_words


def test_the_users_last_words_count() -> None:
    system = {"role": "system", "content": "You are a cat."}
    first, last = ({"role": "user", "content": text} for text in ("Hello", "And a dog?"))
    answer = {"role": "assistant", "content": "Meow"}
    assert last_user_words([system, first, answer, last]) == "And a dog?"
    assert last_user_words([system, first, answer]) == "Hello"
    assert last_user_words([system]) is None


def test_of_a_long_text_both_ends_are_left() -> None:
    assert cut("short") == "short"
    text = "begin" + "x" * 10_000 + "end"
    assert cut(text).startswith("beginx")
    assert cut(text).endswith("xend")
    assert len(cut(text)) < 700
    tokens = list(range(10_000))
    assert cut_tokens(tokens)[:3] == [0, 1, 2]
    assert cut_tokens(tokens)[-1] == 9_999
    assert len(cut_tokens(tokens)) == 200
    assert cut_tokens((7, 8)) == [7, 8]


def test_any_text_is_a_message_of_bounded_size() -> None:
    for text in ("", "\N{PARTY POPPER}" * 10_000, "half a pair: \ud83c", "\0"):
        data = msgspec.msgpack.encode(Predict(2**50, cut(text)))
        assert len(data) < 4096
        assert to_predictor_decoder.decode(data).number == 2**50
