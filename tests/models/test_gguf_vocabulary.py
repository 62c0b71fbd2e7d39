"""The tokenizers of GGUF files: what a file's fields say, whatever version reads them."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.models.config import load_model_config
from fastserve_backend.models.errors import ModelError
from fastserve_backend.models.gguf_conversion import convert
from fastserve_backend.models.tokenizer import Tokenizer, load_tokenizer
from gguf_files import Arrays, Fields, random_llama, write_llama

WORDS = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "lo", "hello", "▁hello", "w", "▁w"]
ADDED = ["<|im_start|>", "<|im_end|>", "<tool call>"]
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, *ADDED]
UNKNOWN, NORMAL, CONTROL, USER_DEFINED, BYTE = 2, 1, 3, 4, 6


def sentencepiece(tmp_path: Path, **changes: Any) -> Tokenizer:
    """As LLaMA 2's, with tokens that were added for chat; None as a change removes a field."""
    fields = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": [0.0] * 259 + [-float(n) for n in range(len(WORDS))] + [-1000.0] * len(ADDED),
        "token_type": [
            UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS),
            USER_DEFINED, USER_DEFINED, CONTROL,
        ],
        "eos_token_id": 2,
        "eot_token_id": 2,
        "pre": None,
        "merges": None,
    }  # fmt: skip
    return tokenizer(tmp_path, fields | changes, len(TOKENS))


def tokenizer(tmp_path: Path, fields: dict[str, Any], vocab_size: int = 301) -> Tokenizer:
    def change(given: Fields, arrays: Arrays) -> None:
        for key, value in fields.items():
            given[f"tokenizer.ggml.{key}"] = value
            if value is None:
                del given[f"tokenizer.ggml.{key}"]

    file = write_llama(tmp_path / "m.gguf", random_llama(vocab_size=vocab_size), change=change)
    convert(file, tmp_path / "out")
    return load_tokenizer("m", None, load_model_config(str(tmp_path / "out"), load_format="auto"))


def test_tokens_that_were_added_are_whole(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path)
    ids = ours.encode("<|im_start|>hello<|im_end|>w<tool call><unk>", special_tokens=False)
    assert [TOKENS[one] for one in ids] == [
        "<|im_start|>", "▁hello", "<|im_end|>", "▁w", "<tool call>", "<unk>",
    ]  # fmt: skip
    assert ours.decode(ids) == "<|im_start|> hello<|im_end|> w"  # those of the chat are text


def best_pairs(text: str) -> list[str]:
    """SentencePiece's BPE as it is described: the best token of two neighbours, the first of
    equals, until there is none."""
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


def test_a_conversion_needs_no_transformers() -> None:
    """Of the packages that a server has installed."""
    code = """
import sys
sys.modules["transformers"] = None
import fastserve_backend.models.gguf_conversion, fastserve_backend.models.hf_tokenizer
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
