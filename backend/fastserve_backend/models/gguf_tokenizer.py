"""The tokenizer of a GGUF file, as tokenizer.json, tokenizer_config.json and chat_template.jinja.

A byte-level vocabulary is built of the file's fields: how transformers reads one differs from
version to version, and it does not look at the name of how text is split before it is encoded. A
SentencePiece vocabulary is transformers' to read, but for what becomes of spaces. That, and the
defaults for the begin token, are llama.cpp's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import AutoTokenizer

from fastserve_backend.models.errors import ModelError
from fastserve_backend.models.hf_tokenizer import around_prompt

# Of Llama 3's own tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = ("default", "gpt-2")
_SMOLLM = ("smollm",)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")

_BYTE_LEVEL, _SENTENCEPIECE = "gpt2", "llama"  # GGUF's names of the kinds of vocabularies
_CONTROL, _USER_DEFINED = 3, 4  # its types of tokens that are found in a text before all others


class Fields(Protocol):
    """The metadata of a GGUF file."""

    def field(self, key: str, default: Any = None) -> Any: ...


def save_tokenizer(path: Path, file: Fields, directory: Path) -> None:
    """Write the tokenizer of the GGUF file at `path` to `directory`.

    Raises ModelError where it cannot be read, or splits text in a way that is not known here:
    encoding it in another would make answers worse without a sign of it.
    """
    try:
        fast = _read(path, file)
    except ModelError:
        raise
    except Exception as error:  # what is missing or unknown shows as errors of any kind
        raise ModelError(f"its tokenizer cannot be read ({error!r})") from error
    fast.post_processor = _post_processor(file, fast)
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        token = _token(file, fast, name)
        if token is not None:
            settings[key] = token
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = file.field("tokenizer.chat_template")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _read(path: Path, file: Fields) -> FastTokenizer:
    kind = file.field("tokenizer.ggml.model")
    if kind == _BYTE_LEVEL:
        return _byte_level(file)
    if kind == _SENTENCEPIECE:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        fast: FastTokenizer = tokenizer.backend_tokenizer
        fast.pre_tokenizer = None
        fast.normalizer = _sentencepiece_spaces(file)
        return fast
    raise ModelError(
        f"tokenizer.ggml.model is {kind!r}; known are {_BYTE_LEVEL} and {_SENTENCEPIECE}; use the "
        "model's Hugging Face checkpoint"
    )


def _sentencepiece_spaces(file: Fields) -> normalizers.Normalizer:
    """A text begins with a space, at its start and behind each special token."""
    adds_space = file.field("tokenizer.ggml.add_space_prefix", True)
    return normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if adds_space else []), normalizers.Replace(" ", "▁")]
    )


def _byte_level(file: Fields) -> FastTokenizer:
    tokens, types = file.field("tokenizer.ggml.tokens"), file.field("tokenizer.ggml.token_type")
    fast = FastTokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in file.field("tokenizer.ggml.merges")],
            ignore_merges=file.field("tokenizer.ggml.pre") in _LLAMA3,
        )
    )
    fast.pre_tokenizer = _pre_tokenizer(file)
    fast.decoder = decoders.ByteLevel()
    fast.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    return fast


def _pre_tokenizer(file: Fields) -> PreTokenizer:
    """How text is split before it is encoded."""
    name = file.field("tokenizer.ggml.pre", "default")
    if name in _GPT2:
        return ByteLevel(add_prefix_space=False)
    if name in _SMOLLM:
        return pre_tokenizers.Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        )
    if name in _LLAMA3:
        return pre_tokenizers.Sequence(
            [
                Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ModelError(
        f"its tokenizer splits text as {name!r}; known are {', '.join(_GPT2 + _SMOLLM + _LLAMA3)}; "
        "use the model's Hugging Face checkpoint"
    )


def _post_processor(file: Fields, fast: FastTokenizer) -> processors.PostProcessor:
    """The begin and end token around a prompt, with llama.cpp's defaults."""
    adds_begin = file.field(
        "tokenizer.ggml.add_bos_token",
        file.field("tokenizer.ggml.model") == _SENTENCEPIECE
        or file.field("tokenizer.ggml.pre") in _LLAMA3,
    )
    adds_end = file.field("tokenizer.ggml.add_eos_token", False)
    begin = _token(file, fast, "bos") if adds_begin else None
    end = _token(file, fast, "eos") if adds_end else None
    return around_prompt(fast, begin, end)


def _token(file: Fields, fast: FastTokenizer, name: str) -> str | None:
    """The special token of that name in GGUF; None where the file has none."""
    token_id = file.field(f"tokenizer.ggml.{name}_token_id")
    if token_id is None:
        return None
    token: str | None = fast.id_to_token(token_id)
    if token is None:
        raise ModelError(f"its special token {token_id} is not in the vocabulary")
    return token
