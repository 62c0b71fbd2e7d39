"""Writes a GGUF file's tokenizer as tokenizer.json and tokenizer_config.json, and its templates.

It is built from the file's fields directly. Versions of transformers read them differently, and it
ignores the field that names how text is split before it is encoded. Spaces in a SentencePiece
vocabulary, and the defaults for special tokens, are handled as in llama.cpp.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as FastTokenizer

from fastserve_backend.checkpoints.chat_template import (
    TEMPLATE_FILE,
    TOOL_TEMPLATE,
    TOOL_TEMPLATE_FILE,
)
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.gguf_pre_types import PreType, pre_type
from fastserve_backend.checkpoints.gguf_vocabulary import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    Fields,
    GGUFVocabulary,
)
from fastserve_backend.checkpoints.token_ids import around_prompt

# Spaces after Phi-3's special tokens belong to them, except after these. No field says so.
_PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")

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
    for field, name in (("", TEMPLATE_FILE), (f".{TOOL_TEMPLATE}", TOOL_TEMPLATE_FILE)):
        template = file.field(f"tokenizer.chat_template{field}")
        if template is not None:
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(template, encoding="utf-8")


def _read(file: Fields, vocabulary: GGUFVocabulary) -> FastTokenizer:
    make = _byte_level if vocabulary.kind == BYTE_LEVEL else _sentencepiece
    fast = make(file, vocabulary)
    is_phi3 = vocabulary.kind == SENTENCEPIECE and file.field("general.architecture") == "phi3"
    fast.add_tokens(
        [
            AddedToken(
                token,
                special=vocabulary.is_special(token_id),
                normalized=False,
                rstrip=is_phi3 and token not in _PHI3_KEEPS_SPACES,
            )
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
    # Whether there is a space before a text, and after each special token.
    adds_space = file.field("tokenizer.ggml.add_space_prefix", True)
    fast.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if adds_space else []), normalizers.Replace(" ", "▁")]
    )
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(content=" ", left=1)] if adds_space else []),
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


def _byte_level(file: Fields, vocabulary: GGUFVocabulary) -> FastTokenizer:
    split = _pre_type(file)
    fast = FastTokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_pairs(file.required("tokenizer.ggml.merges")),
            ignore_merges=split.ignores_merges,
        )
    )
    fast.pre_tokenizer = split.splitter
    fast.decoder = decoders.ByteLevel()
    return fast


def _pre_type(file: Fields) -> PreType:
    name = file.field("tokenizer.ggml.pre")
    if name is None:
        _log.warning(
            "the file does not say how its tokenizer splits text (tokenizer.ggml.pre): GPT-2's way "
            "is taken; if the model was trained with another, its answers are worse"
        )
        name = "default"
    return pre_type(name)


def _post_processor(
    file: Fields, vocabulary: GGUFVocabulary, fast: FastTokenizer
) -> processors.PostProcessor:
    """Adds the begin and end tokens around a prompt, with llama.cpp's defaults."""
    adds_begin = file.field("tokenizer.ggml.add_bos_token")
    if adds_begin is None:
        adds_begin = vocabulary.kind == SENTENCEPIECE or (
            pre_type(file.field("tokenizer.ggml.pre", "default")).adds_begin
        )
    adds_end = file.field("tokenizer.ggml.add_eos_token", False)
    begin = vocabulary.named(file, "bos") if adds_begin else None
    end = vocabulary.named(file, "eos") if adds_end else None
    return around_prompt(fast, begin, end)
