"""tekken.json, the tokenizer file of Mistral's models, against tiktoken and its format."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.token_text import spelling_of
from gguf_files import SPECIAL as NOT_IN_RANKS
from gguf_files import byte_level_bpe
from hypothesis import given
from hypothesis import strategies as st

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
NUM_SPECIAL = 8  # two have no name
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def pieces() -> list[bytes]:
    """All bytes, and the tokens that were learned, in order of rank."""
    spelling = spelling_of(byte_level_bpe())
    assert spelling is not None
    vocabulary = byte_level_bpe().get_vocab()
    learned = [spelling(one) for one in sorted(vocabulary, key=vocabulary.__getitem__)]
    return [bytes([byte]) for byte in range(256)] + [
        one for one in learned if len(one) > 1 and one.decode("latin1") not in NOT_IN_RANKS
    ]


def write_tekken(directory: Path, **changes: Any) -> Path:
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(pieces()) + 1,
        "default_vocab_size": NUM_SPECIAL + len(pieces()),
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v7",
    }
    vocab = [
        {"rank": rank, "token_bytes": b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate([*pieces(), b"beyond the size"])
    ]
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)
    ]
    fields = {"config": config, "vocab": vocab, "special_tokens": special, **changes}
    (directory / "tekken.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    directory = write_tekken(tmp_path_factory.mktemp("tekken"))
    return HFTokenizer(directory, NUM_SPECIAL + len(pieces()))


@given(st.text(st.sampled_from("Hello wrd,tsxk. 日é12\n"), max_size=40) | st.text(max_size=20))
def test_ids_are_the_formats(ours: HFTokenizer, text: str) -> None:
    ranks = {piece: rank for rank, piece in enumerate(pieces())}
    theirs = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    text = text.encode("utf-8", "ignore").decode()
    expected = [NUM_SPECIAL + rank for rank in theirs.encode(text)]
    assert ours.encode(text, special_tokens=False) == expected
    assert ours.decode(expected) == text


def test_special_tokens_have_the_first_ids(ours: HFTokenizer) -> None:
    assert ours.encode("Hello")[0] == 1
    assert ours.encode("[INST]a[/INST]</s>", special_tokens=False)[::2] == [3, 4]
    assert ours.encode("<SPECIAL_7>", special_tokens=False) == [7]
    assert 2 in ours.end_token_ids
    assert ours.decode([1, *ours.encode("Hello", special_tokens=False), 2]) == "Hello"


def test_older_files_do_not_list_special_tokens(tmp_path: Path) -> None:
    directory = write_tekken(tmp_path, special_tokens=None)
    tokenizer = HFTokenizer(directory, NUM_SPECIAL + len(pieces()))
    assert tokenizer.encode("[AVAILABLE_TOOLS]", special_tokens=False) == [5]


@pytest.mark.parametrize("changes", [{"vocab": None}, {"config": {}}, {"vocab": [{"rank": 0}]}])
def test_a_damaged_file_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="damaged or incomplete"):
        HFTokenizer(write_tekken(tmp_path, **changes), 1000)
