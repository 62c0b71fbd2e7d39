"""The tokenizers of GGUF files follow the file's fields, in any version of the library."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.tokenizer import Tokenizer, load_tokenizer
from gguf_files import VOCAB_SIZE, Arrays, Fields, random_llama, with_tokenizer_fields, write_llama
from tokenizers import Tokenizer as FastTokenizer

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

WORDS = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "lo", "hello", "▁hello", "w", "▁w"]
ADDED = ["<|im_start|>", "<|im_end|>", "<tool call>"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *ADDED]
UNKNOWN, NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 1, 3, 4, 5, 6
TYPES = [
    UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS),
    USER_DEFINED, USER_DEFINED, CONTROL,
]  # fmt: skip
SCORES = [0.0] * 259 + [-float(n) for n in range(len(WORDS))] + [-1000.0] * len(ADDED)


def sentencepiece(tmp_path: Path, **changes: Any) -> Tokenizer:
    """A tokenizer as LLaMA 2's with added chat tokens. A change to None removes a field."""
    fields = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": SCORES,
        "token_type": TYPES,
        "eos_token_id": 2,
        "eot_token_id": 2,
        "pre": None,
        "merges": None,
    }
    fields |= changes
    return tokenizer(tmp_path, fields, len(fields["tokens"]))


def tokenizer(tmp_path: Path, fields: dict[str, Any], vocab_size: int = 301) -> Tokenizer:
    model = random_llama(vocab_size=vocab_size)
    file = write_llama(tmp_path / "m.gguf", model, change=with_tokenizer_fields(fields))
    convert(file, tmp_path / "out")
    return load_tokenizer("m", None, load_model_config(str(tmp_path / "out"), load_format="auto"))


def test_tokens_that_were_added_are_whole(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path)
    ids = ours.encode("<|im_start|>hello<|im_end|>w<tool call><unk>", special_tokens=False)
    assert [TOKENS[one] for one in ids] == [
        "<|im_start|>", "▁hello", "<|im_end|>", "▁w", "<tool call>", "<unk>",
    ]  # fmt: skip
    assert ours.decode(ids) == "<|im_start|> hello<|im_end|> w"  # chat tokens are kept as text


# Added tokens with letters that mean bytes in byte-level vocabularies, and with spaces as in
# SentencePiece.
WORDS_ADDED = ["đem", "Bác", "Začnimo", "kuća", "ĉu", "Ġgantija", "日本", "x▁y", "<tool>"]


@pytest.mark.parametrize("split", ["gpt-2", "llama-bpe"])
def test_tokens_that_were_added_to_a_byte_level_vocabulary(tmp_path: Path, split: str) -> None:
    size = VOCAB_SIZE + len(WORDS_ADDED)

    def change(given: Fields, arrays: Arrays) -> None:
        given["tokenizer.ggml.pre"] = split
        given["tokenizer.ggml.tokens"] += WORDS_ADDED
        given["tokenizer.ggml.token_type"] += [USER_DEFINED] * len(WORDS_ADDED)

    convert(
        write_llama(tmp_path / "m.gguf", random_llama(vocab_size=size), change=change),
        tmp_path / "out",
    )
    ours = load_tokenizer("m", None, load_model_config(str(tmp_path / "out"), load_format="auto"))
    assert [ours.decode([one]) for one in range(VOCAB_SIZE, size)] == WORDS_ADDED
    for word in WORDS_ADDED:
        assert ours.decode(ours.encode(f"Hello {word}")) == f"Hello {word}"


def test_tokens_that_were_added_to_sentencepieces(tmp_path: Path) -> None:
    ours = sentencepiece(
        tmp_path,
        tokens=[*TOKENS, *WORDS_ADDED],
        token_type=[*TYPES, *[USER_DEFINED] * len(WORDS_ADDED)],
        scores=[*SCORES, *[-1000.0] * len(WORDS_ADDED)],
    )
    assert [ours.decode([len(TOKENS) + n]) for n in range(len(WORDS_ADDED))] == WORDS_ADDED


def test_tokens_under_two_ids_have_their_text(tmp_path: Path) -> None:
    """A text gets one of the two ids, but the model may choose the other."""
    twice = {"▁hello": NORMAL, "<0x41>": BYTE, "<tool call>": CONTROL, "<|im_end|>": USER_DEFINED,
             "</s>": NORMAL, "w": UNUSED}  # fmt: skip
    ours = sentencepiece(
        tmp_path,
        tokens=[*TOKENS, *twice],
        token_type=[*TYPES, *twice.values()],
        scores=[*SCORES, *[-1000.0] * len(twice)],
    )
    last = [ours.decode([len(TOKENS) + n]) for n in range(len(twice))]
    assert last == [" hello", "A", "", "<|im_end|>", "</s>", "w"]
    first = [ours.decode([TOKENS.index(token)]) for token in twice]
    assert first == [" hello", "A", "", "<|im_end|>", "", "w"]
    # The fields name the end token. An unused token is never written.
    assert ours.encode("</s>w", special_tokens=False)[0] == 2
    assert ours.encode("w", special_tokens=False) == [TOKENS.index("▁w")]
    assert ours.encode("ow", special_tokens=False)[-1] == TOKENS.index("w")


def test_begin_and_end_token_of_one_text(tmp_path: Path) -> None:
    ours = sentencepiece(
        tmp_path,
        tokens=[*TOKENS, "</s>"],
        token_type=[*TYPES, CONTROL],
        scores=[*SCORES, -1000.0],
        bos_token_id=len(TOKENS),
    )
    assert ours.encode("hello")[0] in (2, len(TOKENS))
    assert {2, len(TOKENS)} <= set(ours.end_token_ids)


@pytest.mark.parametrize(("added", "expected"), [(True, "hello"), (False, " hello")])
def test_a_first_space_is_dropped_only_where_one_was_added(
    tmp_path: Path, added: bool, expected: str
) -> None:
    """By other programs that read the converted files."""
    sentencepiece(tmp_path, add_space_prefix=added)
    fast = FastTokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert fast.decode([TOKENS.index("▁hello")]) == expected


def best_pairs(text: str) -> list[str]:
    """SentencePiece's BPE by its definition: it merges the best pair of neighbours, the first of
    equals, until none is left."""
    score = {word: -rank for rank, word in enumerate(WORDS)}
    pieces = list(text)
    while True:
        joined = [(score[both], -i) for i in range(len(pieces) - 1)
                  if (both := pieces[i] + pieces[i + 1]) in score]  # fmt: skip
        if not joined:
            return pieces
        at = -max(joined)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def test_tokens_of_the_best_scores_are_made_first(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path)
    letters = random.Random(1)
    for length in range(40):
        text = "".join(letters.choices("helow ", k=length))
        ids = ours.encode(text, special_tokens=False)
        expected = best_pairs("▁" + text.replace(" ", "▁")) if text else []
        assert [TOKENS[one] for one in ids] == expected


def test_merges_of_the_file_count_before_scores(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path, merges=["l l", "l o", "h e"])
    ids = ours.encode("hello", special_tokens=False)
    assert [TOKENS[one] for one in ids] == ["▁", "he", "ll", "o"]


def test_scores_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^metadata field tokenizer\.ggml\.scores is missing$"):
        sentencepiece(tmp_path, scores=None)


@pytest.mark.parametrize(("split", "warnings"), [(None, 1), ("default", 0), ("gpt-2", 0)])
def test_a_file_that_does_not_say_how_text_is_split(
    tmp_path: Path, split: str | None, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ours = tokenizer(tmp_path, {"pre": split})
    assert ours.decode(ours.encode("two words")) == "two words"
    messages = [
        record.message for record in caplog.records if "tokenizer.ggml.pre" in record.message
    ]
    assert len(messages) == warnings
    assert all("GPT-2's way" in message for message in messages)
