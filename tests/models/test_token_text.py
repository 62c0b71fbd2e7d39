"""The text of tokens. An added token stands for the text that was added."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer
from tokenizer_files import sentencepiece, train, write_added_tokens, write_json, write_opt_files
from tokenizers import AddedToken, Tokenizer, models, normalizers

# Added tokens with letters that mean bytes in a byte-level vocabulary, and with its form of spaces.
WORDS = ["đem", "Bác", "Začnimo", "kuća", "ñandú", "ĉu", "Ġgantija", "ÀÈ", "日本", "Ünïcode 日",
         "đ", "ñ", "č", "a  b", "▁", "x▁y", "<0x0A>", "<tool▁call>"]  # fmt: skip
FLAGS: list[dict[str, bool]] = [
    {},
    {"normalized": False},
    {"normalized": True},
    {"lstrip": True},
    {"rstrip": True},
    {"lstrip": True, "rstrip": True, "normalized": False},
    {"single_word": True},
]


def tokenizer(
    directory: Path, fast: Tokenizer, vocab_size: int = 600, **settings: Any
) -> HFTokenizer:
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    write_json(directory, "tokenizer_config.json", settings)
    return HFTokenizer(directory, vocab_size)


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_added_tokens_of_a_byte_level_vocabulary(tmp_path: Path, flags: dict[str, bool]) -> None:
    fast = train()
    fast.add_tokens([AddedToken(word, special=False, **flags) for word in WORDS])
    ours = tokenizer(tmp_path, fast)
    ids = {word: fast.token_to_id(word) for word in WORDS}
    assert {word: ours.decode([one]) for word, one in ids.items()} == {word: word for word in WORDS}
    # With some flags spaces beside a token belong to it.
    text = ours.decode(ours.encode("Hello đem kuća 日本"))
    assert text.replace(" ", "") == "Hellođemkuća日本"


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_added_tokens_of_sentencepiece(tmp_path: Path, flags: dict[str, bool]) -> None:
    words = [word for word in WORDS if word not in ("▁", "<0x0A>")]
    fast = sentencepiece("legacy")
    fast.add_tokens([AddedToken(word, special=False, **flags) for word in words])
    ours = tokenizer(tmp_path, fast)
    ids = {word: fast.token_to_id(word) for word in words}
    assert {word: ours.decode([one]) for word, one in ids.items()} == {word: word for word in words}


def test_added_tokens_behind_a_normalizer(tmp_path: Path) -> None:
    fast = train()
    fast.normalizer = normalizers.Lowercase()
    fast.add_tokens([AddedToken("ĐEM", normalized=True)])
    ours = tokenizer(tmp_path, fast)
    assert ours.decode(ours.encode("đem")) == "ĐEM"


@pytest.mark.parametrize("make", [train, lambda: sentencepiece("first")])
def test_special_tokens_have_no_text(tmp_path: Path, make: Any) -> None:
    fast = make()
    fast.add_tokens([AddedToken("<đem>", special=True), AddedToken("<x▁y>", special=True)])
    ours = tokenizer(tmp_path, fast)
    for word in ("<đem>", "<x▁y>"):
        token_id = fast.token_to_id(word)
        assert (ours.token_bytes(token_id), ours.written(token_id)) == (b"", word)


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("named", ["eos_token", "pad_token", None])
def test_what_any_file_calls_special_is_no_text(
    tmp_path: Path, named: str | None, in_file: bool
) -> None:
    fast = train()
    fast.add_tokens([AddedToken("<kuća>", special=in_file), AddedToken("<đem>")])
    token_id = fast.token_to_id("<kuća>")
    token = {"content": "<kuća>", "special": not in_file and named is None}
    settings: dict[str, Any] = {"added_tokens_decoder": {str(token_id): token}}
    if named is not None:
        settings[named] = "<kuća>"
    ours = tokenizer(tmp_path, fast, **settings)
    assert ours.decode(ours.encode("a<kuća>b<đem>")) == "ab<đem>"


def test_a_vocabularys_own_text_counts_where_a_text_makes_the_token(tmp_path: Path) -> None:
    """A list of added tokens may include the vocabulary's own, in the vocabulary's spelling."""
    fast = train()
    world = fast.token_to_id("Ġworld")
    fast.add_tokens([AddedToken("Ġworld", normalized=False), AddedToken("Ġ", normalized=False)])
    ours = tokenizer(tmp_path, fast)
    assert ours.encode("Hello world")[-1] == world
    assert ours.decode(ours.encode("Hello world ")) == "Hello world "

    fields = json.loads(sentencepiece("legacy").to_str())
    fields["model"]["vocab"]["▁▁"] = 400
    fields["model"]["merges"].insert(0, ["▁", "▁"])
    fast = Tokenizer.from_str(json.dumps(fields))
    fast.add_tokens([AddedToken("▁▁", normalized=False)])
    ours = tokenizer(tmp_path, fast)
    assert 400 in ours.encode("Hello   world")
    assert ours.decode(ours.encode("Hello   world")) == " Hello   world"


@pytest.mark.parametrize("special", [True, False])
def test_bytes_that_were_added_are_bytes(tmp_path: Path, special: bool) -> None:
    """A trainer adds its special tokens like this."""
    fast = sentencepiece("legacy")
    fast.add_tokens([AddedToken(f"<0x{byte:02X}>", special=special) for byte in range(256)])
    ours = tokenizer(tmp_path, fast)
    assert ours.decode(ours.encode("Hello\n日本 😀")) == " Hello\n日本 😀"


def test_merges_that_are_ignored_make_no_text_of_added_tokens(tmp_path: Path) -> None:
    fast = train()
    vocab = json.loads(fast.to_str())["model"]["vocab"] | {"ĉu": 500, "Ġgantija": 501}
    fast.model = models.BPE(vocab=vocab, merges=[], ignore_merges=True)
    fast.add_tokens([AddedToken("ĉu", normalized=False), AddedToken("Ġgantija", normalized=False)])
    ours = tokenizer(tmp_path, fast)
    assert ours.decode([500, 501]) == "ĉuĠgantija"
    world = vocab["Ġworld"]
    assert ours.encode(" world") == [world]  # as before


class TestIds:
    """Added tokens have the ids in the files, and each id has its text."""

    def write(self, directory: Path, change: Any, **settings: Any) -> HFTokenizer:
        fields = json.loads(train().to_str())
        change(fields)
        write_json(directory, "tokenizer.json", fields)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
        write_json(directory, "tokenizer_config.json", settings)
        return HFTokenizer(directory, 600)

    def added(self, token_id: int, content: str, *, special: bool = False) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {"id": token_id, "content": content, "special": special, **flags}

    def test_gaps_between_added_tokens(self, tmp_path: Path) -> None:
        tokens = {450: "<tool>", 455: "kuća", 460: "<end>"}
        ours = self.write(
            tmp_path,
            lambda fields: fields["added_tokens"].extend(
                self.added(*one, special=one[1] == "<end>") for one in tokens.items()
            ),
        )
        assert ours.encode("<tool>kuća<end>") == [450, 455, 460]
        assert ours.decode([450, 455, 460]) == "<tool>kuća"
        assert ours.encode("Hello world") == train().encode("Hello world").ids

    def test_gaps_in_the_vocabulary(self, tmp_path: Path) -> None:
        """A token that is only named does not exist."""

        def change(fields: dict[str, Any]) -> None:
            vocab = fields["model"]["vocab"]
            last = max(vocab, key=vocab.__getitem__)
            vocab[last] = 500
            fields["added_tokens"].append(self.added(501, "<tool>"))

        ours = self.write(tmp_path, change, pad_token="[PAD]")
        texts = [ours.written(token_id) for token_id in range(503)]
        assert texts[501:] == ["<tool>", "[PAD]"]
        assert ours.encode("<tool>[PAD]") == [501, 502]
        assert ours.token_bytes(500)

    @pytest.mark.parametrize("in_settings", [True, False])
    def test_an_added_token_that_the_vocabulary_has(
        self, tmp_path: Path, in_settings: bool
    ) -> None:
        token = next(
            one for one in train().get_vocab() if one.isalpha() and one.isascii() and one[1:]
        )
        if in_settings:
            settings = {"added_tokens_decoder": {"450": {"content": token}}}
            ours = self.write(tmp_path, lambda fields: None, **settings)
        else:
            ours = self.write(
                tmp_path, lambda fields: fields["added_tokens"].append(self.added(450, token))
            )
        assert ours.decode([450]) == token
        assert ours.decode(ours.encode(token)) == token

    def test_an_added_token_twice(self, tmp_path: Path) -> None:
        tokens = [self.added(450, "kuća"), self.added(451, "kuća")]
        ours = self.write(tmp_path, lambda fields: fields["added_tokens"].extend(tokens))
        assert ours.decode([450, 451]) == "kućakuća"
        assert ours.encode("kuća") == [450]

    @pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json"])
    def test_a_token_of_the_vocabulary_twice(self, tmp_path: Path, name: str) -> None:
        """JSON lets a name come twice in an object."""
        if name == "tokenizer.json":
            self.write(
                tmp_path, lambda fields: fields["added_tokens"].append(self.added(402, "<é>"))
            )
        else:
            write_opt_files(tmp_path)
        text = (tmp_path / name).read_text(encoding="utf-8")
        world = json.dumps("Ġworld", ensure_ascii=name == "tokenizer.json")
        assert f"{world}:" in text
        (tmp_path / name).write_text(text.replace(f"{world}:", f"{world}: 401, {world}:"))
        ours = HFTokenizer(tmp_path, 600)
        assert ours.decode([401]) == " world"
        assert ours.decode(ours.encode("Hello world")).endswith("Hello world")
        assert name == "vocab.json" or ours.encode("<é>") == [402]

    def test_a_reserved_token_that_was_renamed(self, tmp_path: Path) -> None:
        """Authors rename one in tokenizer_config.json alone."""
        settings = {"added_tokens_decoder": {"390": {"content": "<|call|>", "special": True}}}

        def change(fields: dict[str, Any]) -> None:
            fields["model"]["vocab"]["<reserved>"] = 390

        ours = self.write(tmp_path, change, **settings)
        assert ours.encode("<|call|>") == [390]
        assert (ours.token_bytes(390), ours.written(390)) == (b"", "<|call|>")

    def test_added_tokens_json(self, tmp_path: Path) -> None:
        write_added_tokens(tmp_path)
        write_json(tmp_path, "added_tokens.json", {"[PAD]": 480, "kuća": 470})
        ours = HFTokenizer(tmp_path, 600)
        assert ours.encode("kuća[PAD]", special_tokens=False) == [470, 480]
        assert ours.decode([470, 480]) == "kuća"
