"""Special cases of texts and ids: special tokens, leading spaces, ids without a token."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.tokenizer import TokenizationError
from gguf_files import BEGIN, END, END_OF_TURN, SPECIAL, VOCAB_SIZE, byte_level_bpe
from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

BEGINNING = {"bos_token": SPECIAL[1]}


def write(
    directory: Path,
    pre_tokenizer: PreTokenizer | None = None,
    *,
    begins: bool = False,
    **settings: object,
) -> Path:
    """With `begins`, tokenizer.json puts BEGIN before a text."""
    fast = deepcopy(byte_level_bpe())
    if pre_tokenizer is not None:
        fast.pre_tokenizer = pre_tokenizer
    if begins:
        fast.post_processor = TemplateProcessing(
            single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], BEGIN)]
        )
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


@pytest.mark.parametrize("named", ["LlamaTokenizer", "LlamaTokenizerFast"])
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("flags", "begins", "ends"),
    [
        ({"add_bos_token": True, "add_eos_token": False}, True, False),
        ({"add_bos_token": False, "add_eos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"add_bos_token": False}, False, False),
        ({"add_eos_token": True}, True, True),
    ],
)
def test_tokens_around_a_text_of_llamas_classes(
    tmp_path: Path, flags: dict[str, bool], begins: bool, ends: bool, in_file: bool, named: str
) -> None:
    """tokenizer_config.json decides, whatever tokenizer.json says, as in transformers 4, on which
    authors rely. transformers 5 ignores these flags, so it gets them as arguments."""
    directory = write(tmp_path, begins=in_file, tokenizer_class=named, **BEGINNING, **flags)
    ids = HFTokenizer(directory, VOCAB_SIZE).encode("Hello world")
    assert (ids.count(BEGIN), ids.count(END)) == (begins, ends)
    as_arguments = {"add_bos_token": begins, "add_eos_token": ends}
    assert ids == AutoTokenizer.from_pretrained(directory, **as_arguments)("Hello world").input_ids


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize(
    ("named", "flags"),
    [
        ("LlamaTokenizerFast", {}),
        ("LlamaTokenizerFast", {"add_bos_token": None, "add_eos_token": None}),
        ("PreTrainedTokenizerFast", {"add_bos_token": True}),
        ("PreTrainedTokenizerFast", {"add_bos_token": False}),
    ],
)
def test_tokens_around_a_text_that_tokenizer_json_decides(
    tmp_path: Path, named: str, flags: dict[str, bool | None], in_file: bool
) -> None:
    directory = write(tmp_path, begins=in_file, tokenizer_class=named, **BEGINNING, **flags)
    ids = HFTokenizer(directory, VOCAB_SIZE).encode("Hello world")
    assert ids == AutoTokenizer.from_pretrained(directory)("Hello world").input_ids
    assert ids.count(BEGIN) == in_file


def test_a_token_to_put_before_a_text_that_has_no_name(tmp_path: Path) -> None:
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": None, "add_bos_token": True}
    directory = write(tmp_path, **settings)
    with pytest.raises(ModelError, match=r"vocabulary has no '<s>'; name the token as bos_token"):
        HFTokenizer(directory, VOCAB_SIZE)


def test_a_text_that_the_library_panics_at(tmp_path: Path) -> None:
    """The library panics where a pattern backtracks too often. A panic is no Exception."""
    split = Split(Regex("(a+)+$"), behavior="isolated")
    bytes_after = ByteLevel(add_prefix_space=False, use_regex=False)
    ours = HFTokenizer(write(tmp_path, Sequence([split, bytes_after])), VOCAB_SIZE)
    with pytest.raises(TokenizationError, match=r"fails at this text: .*retry"):
        ours.encode("a" * 40 + "b")
    assert ours.decode(ours.encode("ab")) == "ab"
