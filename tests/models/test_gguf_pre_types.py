"""The ways in which GGUF files say that text is split before it is encoded."""

from __future__ import annotations

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_pre_types import pre_type

TEXT = "It's 12345 HTMLPages,\n\n  we'LL/\nnaïve 日本"


def pieces(name: str, text: str = TEXT) -> list[str]:
    """The parts of the text, by their places in it."""
    parts = pre_type(name).splitter.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in parts]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            ("gpt-2", "default", "phi-2", "olmo", "granite-docling"),
            ["It", "'s", " 12345", " HTMLPages", ",", "\n\n ", " we", "'", "LL", "/", "\n",
             "naïve", " 日本"],
        ),
        (
            ("smollm", "starcoder", "refact"),
            ["It", "'s", " ", "1", "2", "3", "4", "5", " HTMLPages", ",", "\n\n ", " we", "'",
             "LL", "/", "\n", "naïve", " 日本"],
        ),
        (
            ("llama-bpe", "llama3", "falcon3", "dbrx"),
            ["It", "'s", " ", "123", "45", " HTMLPages", ",\n\n", " ", " we", "'LL", "/\n",
             "naïve", " 日本"],
        ),
        (
            ("qwen2", "deepseek-r1-qwen", "qwen35"),
            ["It", "'s", " ", "1", "2", "3", "4", "5", " HTMLPages", ",\n\n", " ", " we", "'LL",
             "/\n", "naïve", " 日本"],
        ),
        (
            ("tekken",),
            ["It", "'s", " ", "1", "2", "3", "4", "5", " HTMLPages", ",\n\n", " ", " we", "'LL",
             "/\n", "naïve", " 日本"],
        ),
        (
            ("gpt-4o", "llama4"),
            ["It's", " ", "123", "45", " HTMLPages", ",\n\n", " ", " we'LL", "/\n", "naïve",
             " 日本"],
        ),
        (
            ("deepseek-coder",),
            ["It", "'", "s", " ", "1", "2", "3", "4", "5", " HTMLPages", ",", "\n", "\n", " ",
             " we", "'", "LL", "/", "\n", "naïve", " ", "日本"],
        ),
        (
            ("deepseek-v3",),
            ["It", "'s", " ", "123", "45", " HTMLPages", ",\n\n", " ", " we", "'LL", "/\n",
             "naïve", " ", "日本"],
        ),
    ],
)  # fmt: skip
def test_text_is_cut_where_the_name_says(names: tuple[str, ...], expected: list[str]) -> None:
    for name in names:
        assert pieces(name) == expected, name
        assert "".join(expected) == TEXT


def test_marks_belong_to_the_letters_before_them_where_the_name_says() -> None:
    text = "नमस्ते"  # "namaste", with a virama and vowel signs
    assert pieces("qwen35", text) == [text]
    assert pieces("gpt-4o", text) == [text]
    assert len(pieces("qwen2", text)) > 1


def test_words_may_begin_with_capitals_but_not_end_with_them() -> None:
    assert pieces("tekken", "theHTML Page") == ["the", "HTML", " Page"]
    assert pieces("gpt-4o", "theHTML Page") == ["the", "HTML", " Page"]
    assert pieces("qwen2", "theHTML Page") == ["theHTML", " Page"]


def test_defaults_that_come_with_a_name() -> None:
    whole = {name for name in ("llama-bpe", "falcon3", "tekken", "dbrx", "qwen2", "gpt-4o")
             if pre_type(name).ignores_merges and pre_type(name).adds_begin}  # fmt: skip
    assert whole == {"llama-bpe", "falcon3", "tekken"}


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ModelError, match=r"text as 'klingon'; known are default, .*gpt-4o.*; use"):
        pre_type("klingon")
