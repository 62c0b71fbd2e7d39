"""Which tokenizer a model gets, and which files are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.checkpoints.tokenizer import ByteTokenizer, TokenizationError, load_tokenizer
from tokenizer_files import VOCAB_SIZE, train, write_json, write_opt_files, write_tokenizer_json
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models


def config(directory: Path | None, load_format: str, vocab_size: int = VOCAB_SIZE) -> ModelConfig:
    if directory is None:
        return load_model_config("opt-125m", load_format="dummy")
    write_json(directory, "config.json", {"model_type": "opt", "vocab_size": vocab_size})
    (directory / "model.safetensors").touch()
    return load_model_config(str(directory), load_format=load_format)  # type: ignore[arg-type]


def test_builtin() -> None:
    tokenizer = load_tokenizer("opt-125m", None, config(None, "dummy"))
    assert isinstance(tokenizer, ByteTokenizer)
    assert tokenizer.vocab_size == 50272


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_models_own_files(tmp_path: Path, load_format: str) -> None:
    write_opt_files(tmp_path)
    tokenizer = load_tokenizer("m", None, config(tmp_path, load_format))
    assert isinstance(tokenizer, HFTokenizer)


def test_named_tokenizer_wins(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    write_opt_files(tmp_path / "tokenizer")
    tokenizer = load_tokenizer("m", str(tmp_path / "tokenizer"), config(None, "dummy"))
    assert isinstance(tokenizer, HFTokenizer)


@pytest.mark.parametrize("write", [write_opt_files, write_tokenizer_json])
def test_files_whose_path_python_cannot_spell(write: Callable[[Path], Any], tmp_path: Path) -> None:
    """The stub, whose Python takes file names for ASCII, finds a cache below /home/jürgen."""
    write(tmp_path)
    strange = tmp_path / os.fsdecode(b"c\xe4che")
    strange.mkdir()
    for file in [path for path in tmp_path.iterdir() if path.is_file()]:
        file.rename(strange / file.name)
    assert HFTokenizer(strange, VOCAB_SIZE).decode(HFTokenizer(strange, VOCAB_SIZE).encode("Hello"))


def test_random_weights_without_files(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer("m", None, config(tmp_path, "dummy")), ByteTokenizer)


def test_checkpoint_without_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer \(tokenizer\.json"):
        load_tokenizer("m", None, config(tmp_path, "auto"))


def test_named_tokenizer_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'\./nowhere' is no directory"):
        load_tokenizer("m", "./nowhere", config(None, "dummy"))
    with pytest.raises(ModelError, match=r"no tokenizer\.json, no tekken\.json"):
        load_tokenizer("m", str(tmp_path), config(None, "dummy"))


def test_a_name_that_the_system_refuses() -> None:
    """The name is too long. The system refuses names in unsearchable directories alike, though not
    to root."""
    with pytest.raises(ModelError, match=r"^tokenizer '\./n{300}'"):
        load_tokenizer("m", "./" + "n" * 300, config(None, "dummy"))


def test_more_ids_than_the_model(tmp_path: Path) -> None:
    write_opt_files(tmp_path)
    with pytest.raises(ModelError, match=r"token id \d+, but the model's vocab_size is 300"):
        load_tokenizer("m", None, config(tmp_path, "auto", vocab_size=300))


def test_tokens_that_were_added_may_lie_behind_the_vocabulary(tmp_path: Path) -> None:
    fast = train()
    size = fast.get_vocab_size()
    fast.add_special_tokens(["<padding>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer("m", None, config(tmp_path, "auto", vocab_size=size))
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
    message = rf"has the token '<padding>' \({size}\), but the model's vocabulary has {size} ids"
    with pytest.raises(TokenizationError, match=message):
        tokenizer.encode("Hello <padding>")


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "tokenizer_config.json"])
def test_damaged_file(tmp_path: Path, name: str) -> None:
    write_opt_files(tmp_path)
    (tmp_path / name).write_text('{"half": ')
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer("m", None, config(tmp_path, "auto"))


def test_damage_that_the_library_panics_at(tmp_path: Path) -> None:
    """A merge makes a token that is gone. The library panics, which is no Exception."""
    write_opt_files(tmp_path)
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    del vocab[max(vocab, key=len)]
    write_json(tmp_path, "vocab.json", vocab)
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer("m", None, config(tmp_path, "auto"))


def test_damage_that_shows_when_a_text_is_encoded(tmp_path: Path) -> None:
    write_tokenizer_json(tmp_path)
    fields = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    fields["post_processor"]["special_tokens"] = {}
    write_json(tmp_path, "tokenizer.json", fields)
    with pytest.raises(ModelError, match=r"cannot be read: .* damaged or incomplete .*; download"):
        load_tokenizer("m", None, config(tmp_path, "auto"))


def test_other_class_needs_tokenizer_json(tmp_path: Path) -> None:
    write_opt_files(tmp_path, tokenizer_class="RobertaTokenizer")
    with pytest.raises(ModelError, match=r"RobertaTokenizer without tokenizer\.json"):
        load_tokenizer("m", None, config(tmp_path, "auto"))


@pytest.mark.parametrize(
    ("model", "decoder"),
    [
        (models.WordLevel({"a": 0}, unk_token="a"), decoders.Metaspace()),
        (models.WordPiece({"a": 0, "[UNK]": 1}), decoders.WordPiece()),
        (models.Unigram([("a", 0.0), ("▁", -1.0)], 0), decoders.Metaspace()),
        (models.BPE({"a": 0, "▁": 1}, []), decoders.Metaspace()),
        (models.BPE({"a": 0}, [], byte_fallback=True), decoders.Fuse()),
    ],
    ids=lambda part: type(part).__name__,
)
def test_other_kinds(tmp_path: Path, model: Any, decoder: Any) -> None:
    fast = FastTokenizer(model)
    fast.decoder = decoder
    fast.save(str(tmp_path / "tokenizer.json"))
    kind = type(decoder).__name__
    with pytest.raises(ModelError, match=rf"neither .* SentencePiece BPE \(its decoder is {kind}"):
        load_tokenizer("m", None, config(tmp_path, "auto"))
