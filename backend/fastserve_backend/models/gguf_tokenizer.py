"""The tokenizer of a GGUF file, as tokenizer.json, tokenizer_config.json and chat_template.jinja.

transformers reads vocabulary, merges, special tokens and template. How text is split before it is
encoded is a name in GGUF, which transformers does not look at; and llama.cpp's defaults for the
begin token are not its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from transformers import AutoTokenizer

from .errors import ModelError

# Of Llama 3's own tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = ("default", "gpt-2")
_SMOLLM = ("smollm",)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")


class Fields(Protocol):
    """The metadata of a GGUF file."""

    def field(self, key: str, default: Any = None) -> Any: ...


def save_tokenizer(path: Path, file: Fields, directory: Path, vocab_size: int) -> None:
    """Write the tokenizer of the GGUF file at `path` to `directory`.

    Raises ModelError where it cannot be read, or splits text in a way that is not known here:
    encoding it in another would make answers worse without a sign of it.
    """
    pre_tokenizer = _pre_tokenizer(file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer.save_pretrained(directory)
    except Exception as error:  # what is missing or unknown shows as errors of any kind
        raise ModelError(f"its tokenizer cannot be read ({error!r})") from error
    saved = directory / "tokenizer.json"
    fields = json.loads(saved.read_text(encoding="utf-8"))
    # transformers adds GPT-2's special token to byte-level vocabularies without one, such as Llama
    # 3's, where it has no row in the model's table.
    fields["added_tokens"] = [one for one in fields["added_tokens"] if one["id"] < vocab_size]
    if file.field("tokenizer.ggml.pre") in _LLAMA3:
        fields["model"]["ignore_merges"] = True
    fast = FastTokenizer.from_str(json.dumps(fields))
    if pre_tokenizer is not None:
        fast.pre_tokenizer = pre_tokenizer
    fast.post_processor = _post_processor(file, fast)
    fast.save(str(saved))


def _pre_tokenizer(file: Fields) -> PreTokenizer | None:
    """How text is split before it is encoded; None for SentencePiece, which is not by rules."""
    if file.field("tokenizer.ggml.model") != "gpt2":
        return None
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
        file.field("tokenizer.ggml.model") == "llama"
        or file.field("tokenizer.ggml.pre") in _LLAMA3,
    )
    adds_end = file.field("tokenizer.ggml.add_eos_token", False)
    begin = file.field("tokenizer.ggml.bos_token_id") if adds_begin else None
    end = file.field("tokenizer.ggml.eos_token_id") if adds_end else None
    before = [] if begin is None else [(_token(fast, begin), begin)]
    after = [] if end is None else [(_token(fast, end), end)]
    return processors.TemplateProcessing(
        single=[*(token for token, _ in before), "$A", *(token for token, _ in after)],
        special_tokens=list(dict.fromkeys([*before, *after])),
    )


def _token(fast: FastTokenizer, token_id: int) -> str:
    token = fast.id_to_token(token_id)
    if token is None:
        raise ModelError(f"its special token {token_id} is not in the vocabulary")
    return token
