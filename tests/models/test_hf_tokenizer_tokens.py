"""Texts and ids that are not as others: special tokens, spaces before, no tokens at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastserve_backend.models.hf_tokenizer import HFTokenizer
from fastserve_backend.models.tokenizer import TokenizationError
from gguf_files import END_OF_TURN, SPECIAL, VOCAB_SIZE, byte_level_bpe
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from transformers import AutoTokenizer


def write(directory: Path, pre_tokenizer: PreTokenizer | None = None, **settings: object) -> Path:
    fast = byte_level_bpe()
    if pre_tokenizer is not None:
        fast.pre_tokenizer = pre_tokenizer
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize("split", [True, False, None])
def test_special_tokens_in_a_text(tmp_path: Path, split: bool | None) -> None:
    directory = write(tmp_path, **({} if split is None else {"split_special_tokens": split}))
    ids = HFTokenizer(directory, VOCAB_SIZE).encode("Hello<|im_end|> world<|end|>")
    theirs = AutoTokenizer.from_pretrained(directory)
    assert ids == theirs("Hello<|im_end|> world<|end|>").input_ids
    assert (END_OF_TURN in ids) is not split


def test_ids_of_no_token_have_no_bytes_and_are_not_kept(tmp_path: Path) -> None:
    ours = HFTokenizer(write(tmp_path), VOCAB_SIZE)
    known = [ours.token_bytes(token_id) for token_id in range(VOCAB_SIZE)]
    assert b"".join(known)
    kept = len(ours._bytes)
    assert {ours.token_bytes(token_id) for token_id in range(VOCAB_SIZE, 10_000)} == {b""}
    assert len(ours._bytes) == kept


@pytest.mark.parametrize("setting", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    "named", ["GPT2Tokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"]
)
def test_space_before_a_text(
    tmp_path: Path, named: str, in_file: bool, setting: dict[str, bool]
) -> None:
    before = ByteLevel(add_prefix_space=in_file)
    directory = write(tmp_path, before, tokenizer_class=named, **setting)
    ids = HFTokenizer(directory, VOCAB_SIZE).encode("Hello world")
    assert ids == AutoTokenizer.from_pretrained(directory)("Hello world").input_ids


def test_a_text_that_the_library_panics_at(tmp_path: Path) -> None:
    """As it does where a pattern goes back and forth too often; a panic is no Exception."""
    split = Split(Regex("(a+)+$"), behavior="isolated")
    bytes_after = ByteLevel(add_prefix_space=False, use_regex=False)
    ours = HFTokenizer(write(tmp_path, Sequence([split, bytes_after])), VOCAB_SIZE)
    with pytest.raises(TokenizationError, match=r"fails at this text: .*retry"):
        ours.encode("a" * 40 + "b")
    assert ours.decode(ours.encode("ab")) == "ab"
