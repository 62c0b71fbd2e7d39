"""Writes a GGUF file's tokenizer as tokenizer.json, tokenizer_config.json and chat_template.jinja.

It is built from the file's fields directly. Versions of transformers read them differently, and it
ignores the field that names how text is split before it is encoded. Spaces in a SentencePiece
vocabulary, and the defaults for special tokens, are handled as in llama.cpp.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split

from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_vocabulary import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    Fields,
    GGUFVocabulary,
)
from fastserve_backend.checkpoints.hf_tokenizer import around_prompt

# From Llama 3's own tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = ("default", "gpt-2")
_SMOLLM = ("smollm",)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")

_log = logging.getLogger(__name__)


def save_tokenizer(file: Fields, directory: Path) -> None:
    """Write the tokenizer of a GGUF file to `directory`.

    Raises:
        ModelError: the tokenizer cannot be read, or splits text in a way that is not known here.
            Splitting it differently would silently make answers worse.
    """
    try:
        vocabulary = GGUFVocabulary.of(file)
        fast = _read(file, vocabulary)
    except ModelError:
        raise
    except Exception as error:  # damage can show as any kind of error
        raise ModelError(f"its tokenizer cannot be read ({error!r})") from error
    fast.post_processor = _post_processor(file, vocabulary, fast)
    fast.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for key, name in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        token = vocabulary.named(file, name)
        if token is not None:
            settings[key] = token
    duplicates = vocabulary.duplicates()
    if duplicates:
        settings["duplicate_tokens"] = duplicates
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = file.field("tokenizer.chat_template")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _read(file: Fields, vocabulary: GGUFVocabulary) -> FastTokenizer:
    make = _byte_level if vocabulary.kind == BYTE_LEVEL else _sentencepiece
    fast = make(file, vocabulary)
    fast.add_tokens(
        [
            AddedToken(token, special=vocabulary.is_special(token_id), normalized=False)
            for token, token_id in vocabulary.ids.items()
            if vocabulary.is_added(token_id)
        ]
    )
    return fast


def _sentencepiece(file: Fields, vocabulary: GGUFVocabulary) -> FastTokenizer:
    merges = file.field("tokenizer.ggml.merges")
    fast = FastTokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(file, vocabulary) if merges is None else _pairs(merges),
            unk_token=vocabulary.named(file, "unknown") or vocabulary.tokens[0],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    fast.normalizer = _sentencepiece_spaces(file)
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return fast


def _merges_by_score(file: Fields, vocabulary: GGUFVocabulary) -> list[tuple[str, str]]:
    """All ways to merge two tokens into a third: best score first, then the longest left part."""
    ids, scores = vocabulary.ids, file.required("tokenizer.ggml.scores")
    scored = [
        (scores[token_id], token[:cut], token[cut:])
        for token, token_id in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    scored.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in scored]


def _pairs(merges: list[str]) -> list[tuple[str, str]]:
    return [(left, right) for left, right in (merge.split(" ") for merge in merges)]


def _sentencepiece_spaces(file: Fields) -> normalizers.Normalizer:
    """Puts a space before a text, and after each special token, if the file asks for it."""
    adds_space = file.field("tokenizer.ggml.add_space_prefix", True)
    return normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if adds_space else []), normalizers.Replace(" ", "▁")]
    )


def _byte_level(file: Fields, vocabulary: GGUFVocabulary) -> FastTokenizer:
    fast = FastTokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_pairs(file.required("tokenizer.ggml.merges")),
            ignore_merges=file.field("tokenizer.ggml.pre") in _LLAMA3,
        )
    )
    fast.pre_tokenizer = _pre_tokenizer(file)
    fast.decoder = decoders.ByteLevel()
    return fast


def _pre_tokenizer(file: Fields) -> PreTokenizer:
    """The splitter of text, by the name in the file."""
    name = file.field("tokenizer.ggml.pre")
    if name is None:
        _log.warning(
            "the file does not say how its tokenizer splits text (tokenizer.ggml.pre): GPT-2's way "
            "is taken; if the model was trained with another, its answers are worse"
        )
        name = "default"
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


def _post_processor(
    file: Fields, vocabulary: GGUFVocabulary, fast: FastTokenizer
) -> processors.PostProcessor:
    """Adds the begin and end tokens around a prompt, with llama.cpp's defaults."""
    adds_begin = file.field(
        "tokenizer.ggml.add_bos_token",
        file.field("tokenizer.ggml.model") == SENTENCEPIECE
        or file.field("tokenizer.ggml.pre") in _LLAMA3,
    )
    adds_end = file.field("tokenizer.ggml.add_eos_token", False)
    begin = vocabulary.named(file, "bos") if adds_begin else None
    end = vocabulary.named(file, "eos") if adds_end else None
    return around_prompt(fast, begin, end)
