"""Special tokens in a text, and ids that no token has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastserve_backend.models.hf_tokenizer import HFTokenizer
from gguf_files import END_OF_TURN, SPECIAL, VOCAB_SIZE, byte_level_bpe
from transformers import AutoTokenizer


def write(directory: Path, **settings: object) -> Path:
    byte_level_bpe().save(str(directory / "tokenizer.json"))
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
