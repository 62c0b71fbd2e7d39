"""The tokenizer of tests that read checkpoints."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_byte_tokenizer(directory: Path) -> Path:
    """Saves a byte-level BPE tokenizer of single bytes as Hugging Face's file; returns
    ``directory``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    vocab |= {symbol: index + 4 for index, symbol in enumerate(alphabet)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    fast.save(str(directory / "tokenizer.json"))
    return directory
