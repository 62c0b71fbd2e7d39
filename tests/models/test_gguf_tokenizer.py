"""The tokenizer and the chat template of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastserve_backend.checkpoints.chat_options import ChatOptions
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_conversion import convert
from fastserve_backend.checkpoints.tokenizer import load_tokenizer
from gguf_files import BEGIN, Arrays, Fields, byte_level_bpe, config_of, random_llama, write_llama
from tokenizers import Regex, Tokenizer, pre_tokenizers

pytestmark = pytest.mark.usefixtures("conversions_anywhere")

TEXTS = ("Hello world", "  two\n\nlines", "naïve 日本 😀", "<|im_end|> in <|begin|> text", "")
HELLO = [{"role": "user", "content": "Hello"}]
LLAMA3 = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Split(
            Regex(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted directory of the plainest file."""
    folder = tmp_path_factory.mktemp("plain")
    convert(write_llama(folder / "m.gguf", random_llama()), folder / "out")
    return folder / "out"


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_the_vocabulary_was_made(directory: Path, text: str) -> None:
    ours = load_tokenizer("m", None, config_of(directory))
    assert ours.encode(text) == byte_level_bpe().encode(text).ids


def test_begin_token_where_the_file_asks_for_it(tmp_path: Path) -> None:
    model = random_llama()
    for asked in (True, False):
        directory = tmp_path / f"{asked}"
        file = write_llama(
            tmp_path / "m.gguf",
            model,
            change=lambda fields, _, asked=asked: fields.update(
                {"tokenizer.ggml.add_bos_token": asked}
            ),
        )
        convert(file, directory)
        ids = load_tokenizer("m", None, config_of(directory)).encode("Hello")
        assert (ids[0] == BEGIN) is asked
        assert BEGIN not in ids[1:]


def test_text_is_split_as_the_file_names_it(tmp_path: Path) -> None:
    # The vocabulary merges digits, but no merge crosses the boundaries of the split.
    texts = ("It's 1234567 o'CLOCK, I'LL go\n\n  now", " ½ 12", "a.b\nc")
    pieces = {
        "gpt-2": lambda text: byte_level_bpe().pre_tokenizer.pre_tokenize_str(text),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        ).pre_tokenize_str,
        "llama-bpe": LLAMA3.pre_tokenize_str,
    }
    seen = set()
    for name, split in pieces.items():
        directory = tmp_path / name
        change = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
        file = write_llama(
            tmp_path / "m.gguf",
            random_llama(),
            change=lambda fields, _, change=change: fields.update(change),
        )
        convert(file, directory)
        fast = Tokenizer.from_file(str(directory / "tokenizer.json"))
        for text in texts:
            assert fast.pre_tokenizer.pre_tokenize_str(text) == split(text)
        seen.add(str(fast.pre_tokenizer.pre_tokenize_str(texts[0])))
    assert len(seen) == 3


def test_llama_3_begins_with_its_begin_token(tmp_path: Path) -> None:
    file = write_llama(
        tmp_path / "m.gguf",
        random_llama(),
        change=lambda fields, _: fields.update({"tokenizer.ggml.pre": "llama-bpe"}),
    )
    convert(file, tmp_path / "out")
    ours = load_tokenizer("m", None, config_of(tmp_path / "out"))
    assert ours.encode("Hello")[0] == BEGIN
    # The template writes the begin token, which is not added again.
    chat = ours.encode(ours.render_chat(HELLO), special_tokens=False)
    assert chat[0] == BEGIN
    assert BEGIN not in chat[1:]


def test_a_split_that_is_not_known_is_refused(tmp_path: Path) -> None:
    file = write_llama(
        tmp_path / "m.gguf",
        random_llama(),
        change=lambda fields, _: fields.update({"tokenizer.ggml.pre": "klingon"}),
    )
    with pytest.raises(ModelError, match="splits text as 'klingon'; known are default, gpt-2"):
        convert(file, tmp_path / "out")


def test_sentencepiece(tmp_path: Path) -> None:
    """As in LLaMA 2 there are scores instead of merges, and bytes for text without a token."""
    words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "w", "▁w"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3, *([6] * 256), *([1] * len(words))]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(n) for n in range(len(words))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 2,
    }

    def change(given: Fields, arrays: Arrays) -> None:
        del given["tokenizer.ggml.pre"], given["tokenizer.ggml.merges"]
        given |= fields | {"llama.vocab_size": len(tokens)}

    file = write_llama(tmp_path / "m.gguf", random_llama(vocab_size=len(tokens)), change=change)
    convert(file, tmp_path / "out")
    ours = load_tokenizer("m", None, config_of(tmp_path / "out"))
    ids = ours.encode("hello w日\n")
    assert ids[0] == 1
    assert tokens[ids[1]] == "▁hello"
    assert ours.decode(ids) == " hello w日\n"

    for adds_space, expected in (
        (True, ["<s>", "<s>", "▁hello", "</s>", "▁hello"]),
        (False, ["<s>", "<s>", "hello", "</s>", "hello"]),
    ):
        fields["tokenizer.ggml.add_space_prefix"] = adds_space
        file = write_llama(tmp_path / "m.gguf", random_llama(vocab_size=len(tokens)), change=change)
        convert(file, tmp_path / f"{adds_space}")
        ours = load_tokenizer("m", None, config_of(tmp_path / f"{adds_space}"))
        assert [tokens[one] for one in ours.encode("<s>hello</s>hello")] == expected


def test_chat_template(directory: Path) -> None:
    ours = load_tokenizer("m", None, config_of(directory))
    ids = ours.encode(ours.render_chat(HELLO), special_tokens=False)
    text = "<|begin|>user: Hello<|im_end|>\nassistant: "
    assert ids == byte_level_bpe().encode(text).ids
    assert ids[0] == BEGIN
    assert ours.decode(ids) == "user: Hello\nassistant: "


def test_requests_with_tools_get_the_template_for_tools(tmp_path: Path) -> None:
    def change(fields: Fields, arrays: Arrays) -> None:
        del arrays
        fields["tokenizer.chat_templates"] = ["tool_use"]
        template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
        fields["tokenizer.chat_template.tool_use"] = template

    convert(write_llama(tmp_path / "m.gguf", random_llama(), change=change), tmp_path / "out")
    ours = load_tokenizer("m", None, config_of(tmp_path / "out"))
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
    assert ours.render_chat(HELLO, ChatOptions(tools=[tool])) == "look_up"
    assert "Hello" in ours.render_chat(HELLO)
