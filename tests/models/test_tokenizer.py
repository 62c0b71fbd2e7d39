"""Tokenizers: the built-in one, Hugging Face's files against transformers, and streams of text."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer, TokenizationError, Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from matrices import random_examples
from tokenizer_files import (
    LAYOUTS,
    SENTENCEPIECE_SIZE,
    VOCAB_SIZE,
    write_json,
    write_opt_files,
    write_sentencepiece,
)

TEXTS = [
    "",
    " ",
    "Hello world",
    " world",
    "  two  spaces\n\n\ttab ",
    "naïve café — “quotes” 日本語 한국어 العربية",
    "😀👩‍👩‍👧🏳️‍🌈 e\u0301",
    "</s> inside, <pad><unk> and <s>",
    "a <tool call> [PAD] <custom ü> b",
    "\x00\x7f\u2028\uffff",
    "I'll they're it's 1234567890",
]
SENTENCEPIECE_TEXTS = [
    "",
    "Hello world",
    "Hello  two   spaces",
    "line\n\tbreak\r\n",
    "naïve café 日本語 😀👩‍👩‍👧",
    "<0x0A> is no newline",
    "\x00\x7f\u2028",
    "a ▁ b▁c",
    "trailing ",
]
# The styles differ at the beginning of a text, and after a special token.
SPACED_TEXTS = [" ", " Hello", "    x", "a</s> b", "x<s>y", "<tool▁call>hi <tool▁call> ho"]


@pytest.fixture(scope="module", params=LAYOUTS)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(ours, transformers') from the same files."""
    from transformers import AutoTokenizer

    directory = LAYOUTS[request.param](tmp_path_factory.mktemp(request.param))
    write_json(directory, "config.json", {"model_type": "opt"})
    return HFTokenizer(directory, VOCAB_SIZE), AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def opt_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return HFTokenizer(write_opt_files(tmp_path_factory.mktemp("opt_tokenizer")), VOCAB_SIZE)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.step(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_transformers(both: Any, text: str) -> None:
    ours, theirs = both
    assert ours.encode(text) == theirs(text).input_ids


@random_examples(60)
@given(st.lists(st.integers(0, VOCAB_SIZE + 3), max_size=40))
def test_decode_equals_transformers(both: Any, ids: list[int]) -> None:
    """Any ids are decoded, including broken UTF-8 and ids without a token."""
    ours, theirs = both
    expected = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == expected


def test_opt_begins_with_its_end_token(opt_tokenizer: HFTokenizer) -> None:
    assert opt_tokenizer.encode("Hello")[0] == 2
    assert opt_tokenizer.encode("") == [2]
    assert opt_tokenizer.vocab_size == VOCAB_SIZE


@pytest.fixture(scope="module")
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(50272)


@pytest.fixture(scope="module", params=["opt_tokenizer", "byte_tokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    return tokenizer


class TestBothKinds:
    @random_examples(100)
    @given(st.text(max_size=60).filter(lambda text: "<" not in text))
    def test_round_trip(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    @settings(max_examples=50)
    @given(st.lists(st.sampled_from(["Hello", " world", "</s>", "😀", "日", " tokenizer"])))
    def test_max_token_bytes_bounds_the_text(self, tokenizer: Tokenizer, words: list[str]) -> None:
        text = "".join(words)
        assert len(text.encode()) <= len(tokenizer.encode(text)) * tokenizer.max_token_bytes

    @random_examples(100)
    @given(st.data())
    def test_stream_is_decode(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        """Random ids are mostly bytes of invalid UTF-8, which is the hardest case."""
        ids = data.draw(st.lists(st.integers(0, 420), max_size=60))
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)

    @random_examples(100)
    @given(st.text(max_size=40).filter(lambda text: "<" not in text))
    def test_stream_never_breaks_a_character(self, tokenizer: Tokenizer, text: str) -> None:
        text = text.replace("\ufffd", "")
        pieces = streamed(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == text
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""

    def test_stream_keeps_a_leading_space(self, tokenizer: Tokenizer) -> None:
        generated = tokenizer.encode(" world")[1:]
        assert "".join(streamed(tokenizer, generated)) == " world"

    def test_unfinished_tail_is_flushed(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a😀")[1:-1]
        pieces = streamed(tokenizer, ids)
        assert pieces[0] == "a"
        assert set(pieces[1:-1]) <= {""}
        assert pieces[-1] == "\ufffd"

    def test_lone_invalid_byte_is_not_held_back(self, tokenizer: Tokenizer) -> None:
        bad = next(i for i in range(4, 400) if tokenizer.token_bytes(i) == b"\xff")
        pieces = streamed(tokenizer, [bad, bad, bad])
        assert pieces == ["\ufffd"] * 3 + [""]

    def test_special_tokens_are_silent(self, tokenizer: Tokenizer) -> None:
        first = tokenizer.encode("a")[1]
        assert streamed(tokenizer, [2, first, 1, 2]) == ["", "a", "", "", ""]

    def test_long_streams_stay_cheap(self, tokenizer: Tokenizer) -> None:
        """The last thousand steps of a long run cost about as much as the first thousand."""
        stream = tokenizer.stream()
        bad = next(i for i in range(4, 400) if tokenizer.token_bytes(i) == b"\xff")

        def thousand() -> float:
            start = time.thread_time()
            for _ in range(1000):
                stream.step(bad)
            return time.thread_time() - start

        times = [thousand() for _ in range(30)]
        assert min(times[-10:]) < 10 * min(times[:10])

    @pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here"])
    def test_lone_surrogate(self, tokenizer: Tokenizer, text: str) -> None:
        with pytest.raises(TokenizationError, match="lone surrogate, U\\+D"):
            tokenizer.encode(text)


class TestByteTokenizer:
    @pytest.mark.parametrize("vocab_size", [260, 300, 50272, 300_000])
    def test_every_id_has_its_own_text(self, vocab_size: int) -> None:
        tokenizer = ByteTokenizer(vocab_size)
        words = [tokenizer.decode([i]) for i in range(260, vocab_size)]
        assert len(set(words)) == len(words)
        assert all(word[0] == " " and word[1:].isalpha() and word.isascii() for word in words)
        assert {tokenizer.token_bytes(i) for i in range(4, 260)} == {bytes([b]) for b in range(256)}

    def test_nothing_is_built_in_advance(self) -> None:
        def peak_bytes() -> int:
            """Other threads' bytes are traced, too."""
            tracemalloc.start()
            try:
                ByteTokenizer(300_000)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

        assert min(peak_bytes() for _ in range(5)) < 10_000

    def test_ids_outside_the_vocabulary_have_no_text(self) -> None:
        assert ByteTokenizer(300).decode([300, 10**9]) == ""

    def test_vocabulary_too_small(self) -> None:
        with pytest.raises(ModelError, match="vocab_size is 259"):
            ByteTokenizer(259)

    def test_same_text_everywhere(self) -> None:
        assert ByteTokenizer(300).encode("hi") == [2, 108, 109]
        assert ByteTokenizer(50272).decode([260, 261, 359, 360]) == " baba babe bazu beba"


@pytest.fixture(scope="module", params=["legacy", "first", "always", "never"])
def both_sentencepiece(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """(ours, transformers') from the same tokenizer.json."""
    from transformers import AutoTokenizer

    directory = write_sentencepiece(
        tmp_path_factory.mktemp(request.param), request.param, "PreTrainedTokenizerFast"
    )
    return HFTokenizer(directory, SENTENCEPIECE_SIZE), AutoTokenizer.from_pretrained(directory)


class TestSentencePiece:
    @pytest.mark.parametrize("text", [*SENTENCEPIECE_TEXTS, *SPACED_TEXTS])
    def test_equals_transformers(self, both_sentencepiece: Any, text: str) -> None:
        """Decoding keeps the leading space, which transformers removes from every text, and added
        tokens, which transformers turns into spaces."""
        ours, theirs = both_sentencepiece
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        decoded = ours.decode(ids)
        expected = theirs.decode(ids, skip_special_tokens=True).replace(
            "<tool call>", "<tool▁call>"
        )
        assert decoded.removeprefix(" ") == expected

    @pytest.mark.parametrize("text", [*SENTENCEPIECE_TEXTS, *SPACED_TEXTS])
    def test_gemma_adds_no_space_before_a_text(self, tmp_path: Path, text: str) -> None:
        from transformers import AutoTokenizer

        write_sentencepiece(tmp_path, "gemma", "PreTrainedTokenizerFast")
        ours = HFTokenizer(tmp_path, SENTENCEPIECE_SIZE)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        expected = theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids) == expected.replace("<tool call>", "<tool▁call>")

    @pytest.mark.parametrize("text", SENTENCEPIECE_TEXTS)
    def test_equals_transformers_class_for_llama(self, tmp_path: Path, text: str) -> None:
        """That class treats leading spaces in its own way, whatever tokenizer.json says."""
        from transformers import AutoTokenizer

        write_sentencepiece(tmp_path, "legacy", "LlamaTokenizer")
        ours, theirs = (
            HFTokenizer(tmp_path, SENTENCEPIECE_SIZE),
            AutoTokenizer.from_pretrained(tmp_path),
        )
        assert type(theirs).__name__.startswith("Llama")
        assert ours.encode(text) == theirs(text).input_ids

    def test_a_space_at_the_beginning_is_a_token(self, tmp_path: Path) -> None:
        """SentencePiece itself does so: it puts one more space before every text."""
        write_sentencepiece(tmp_path, "legacy", "LlamaTokenizer")
        ours = HFTokenizer(tmp_path, SENTENCEPIECE_SIZE)
        assert ours.decode(ours.encode(" Hello")) == "  Hello"

    @random_examples(100)
    @given(st.text(max_size=40).filter(lambda text: "<" not in text and "▁" not in text))
    def test_stream_never_breaks_a_character(self, both_sentencepiece: Any, text: str) -> None:
        """This includes characters whose bytes have a token each, such as emoji."""
        ours, _ = both_sentencepiece
        text = text.replace("\ufffd", "")
        pieces = streamed(ours, ours.encode(text))
        assert "".join(pieces) in (text, f" {text}")
        assert not any("\ufffd" in piece for piece in pieces)
        assert pieces[-1] == ""

    @random_examples(100)
    @given(st.lists(st.integers(0, SENTENCEPIECE_SIZE + 3), max_size=40))
    def test_stream_is_decode(self, both_sentencepiece: Any, ids: list[int]) -> None:
        ours, _ = both_sentencepiece
        assert "".join(streamed(ours, ids)) == ours.decode(ids)

    def test_bytes_of_one_character(self, both_sentencepiece: Any) -> None:
        ours, _ = both_sentencepiece
        ids = [3 + byte for byte in "😀".encode()]
        assert streamed(ours, ids) == ["", "", "", "😀", ""]
        assert streamed(ours, ids[:2]) == ["", "", "\ufffd"]
        assert ours.token_bytes(3 + 0x0A) == b"\n"

    def test_special_tokens_are_silent(self, both_sentencepiece: Any) -> None:
        ours, _ = both_sentencepiece
        assert streamed(ours, [0, 1, 2]) == ["", "", "", ""]
        added = ours.encode("<tool▁call>")[-1]
        assert ours.token_bytes(added) == "<tool▁call>".encode()

    @pytest.mark.parametrize("text", SENTENCEPIECE_TEXTS)
    def test_max_token_bytes_bounds_the_text(self, both_sentencepiece: Any, text: str) -> None:
        ours, _ = both_sentencepiece
        assert len(text.encode()) <= len(ours.encode(text)) * ours.max_token_bytes
