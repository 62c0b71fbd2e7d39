"""Small tokenizers, as models' repositories hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as FastTokenizer

VOCAB_SIZE = 420
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
CORPUS = ["Hello world, this is a test of the tokenizer. 日本語のテキスト 😀👩‍👩‍👧 naïve café"] * 20
SENTENCEPIECE_SIZE = 360


def train() -> FastTokenizer:
    """A small byte-level BPE with OPT's special tokens at their ids."""
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    return fast


def write_json(directory: Path, name: str, content: dict[str, Any]) -> None:
    (directory / name).write_text(json.dumps(content), encoding="utf-8")


def write_opt_files(directory: Path, **settings: Any) -> Path:
    """vocab.json, merges.txt and the settings that OPT's repositories hold."""
    train().model.save(str(directory))

    def token(content: str) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
        return {"__type": "AddedToken", "content": content, **flags}

    opt = {
        "errors": "replace",
        "unk_token": token("</s>"),
        "bos_token": token("</s>"),
        "eos_token": token("</s>"),
        "pad_token": token("<pad>"),
        "add_prefix_space": False,
        "add_bos_token": True,
        "tokenizer_class": "GPT2Tokenizer",
    }
    config = {k: v for k, v in {**opt, **settings}.items() if v is not None}
    write_json(directory, "tokenizer_config.json", config)
    return directory


def write_special_tokens_map(directory: Path) -> Path:
    write_opt_files(directory, bos_token=None, eos_token=None, unk_token=None, pad_token=None)
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    write_json(directory, "special_tokens_map.json", named)
    return directory


def write_added_tokens(directory: Path) -> Path:
    """Writes tokens that were added after training, as in old repositories."""
    write_opt_files(directory, pad_token="[PAD]")
    size = len(json.loads((directory / "vocab.json").read_text()))
    write_json(directory, "added_tokens.json", {"[PAD]": size + 1, "<tool call>": size})
    return directory


def write_tokenizer_json(directory: Path) -> Path:
    """tokenizer.json with a begin token in its post-processor and a token of plain text."""
    fast = train()
    fast.add_tokens(["<custom ü>"])
    fast.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 2)]
    )
    fast.enable_truncation(5)
    fast.enable_padding(length=9)
    fast.save(str(directory / "tokenizer.json"))
    named = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_json(
        directory, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    )
    return directory


# How words are split before they are encoded: Qwen's digits stand alone, Mistral's go by three.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_split(directory: Path, split: str, tokenizer_class: str, **named: str) -> Path:
    """Byte-level BPE that splits words by a pattern, as most families since 2024 do."""
    fast = train()
    if tokenizer_class == "Qwen2Tokenizer":
        fast.normalizer = normalizers.NFC()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": tokenizer_class, "eos_token": "<|im_end|>", **named}
    write_json(directory, "tokenizer_config.json", settings)
    return directory


def write_starcoder(directory: Path) -> Path:
    """GPT-2's class, but digits are split from each other (StarCoder2, Granite)."""
    fast = train()
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    fast.save(str(directory / "tokenizer.json"))
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    write_json(directory, "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", **named})
    return directory


LAYOUTS = {
    "opt": write_opt_files,
    "opt_no_bos": lambda directory: write_opt_files(directory, add_bos_token=False),
    "opt_eos": lambda directory: write_opt_files(directory, add_eos_token=True),
    "opt_prefix_space": lambda directory: write_opt_files(directory, add_prefix_space=True),
    "opt_default_special": lambda directory: write_opt_files(directory, bos_token=None),
    "special_tokens_map": write_special_tokens_map,
    "added_tokens": write_added_tokens,
    "tokenizer_json": write_tokenizer_json,
    "qwen": lambda directory: write_split(
        directory, QWEN_SPLIT, "Qwen2Tokenizer", pad_token="</s>"
    ),
    "tekken": lambda directory: write_split(directory, TEKKEN_SPLIT, "PreTrainedTokenizerFast"),
    "starcoder": write_starcoder,
}


def sentencepiece(style: str) -> FastTokenizer:
    """A small tokenizer like Llama 2's: "legacy" as its tokenizer.json is, else with the
    pre-tokenizer of newer conversions."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    fast = FastTokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    fast.normalizer = normalizers.Sequence(spaces)
    trainer = trainers.BpeTrainer(
        vocab_size=345, special_tokens=[*special, *byte_tokens], show_progress=False
    )
    fast.train_from_iterator(["Hello world, this is a text for the tokenizer"] * 20, trainer)
    # The trainer would make byte tokens special, so that they match in a text.
    fields = json.loads(fast.to_str())
    fields["added_tokens"] = [one for one in fields["added_tokens"] if one["content"] in special]
    fast = FastTokenizer.from_str(json.dumps(fields))
    if style == "gemma":  # no space before a text
        fast.normalizer = normalizers.Replace(" ", "▁")
    elif style != "legacy":
        fast.normalizer = None
        fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    if style == "gemma":
        fast.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast.add_tokens([AddedToken("<tool▁call>", normalized=False)])
    return fast


def write_sentencepiece(directory: Path, style: str, tokenizer_class: str) -> Path:
    sentencepiece(style).save(str(directory / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": tokenizer_class, **named}
    write_json(directory, "tokenizer_config.json", settings)
    write_json(directory, "config.json", {"model_type": "llama"})
    return directory
