"""The tokenizer of tests that read checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

NUM_BYTE_TOKENS = 260
"""Four special tokens, and the bytes."""
NUM_ASCII_TOKENS = 132
"""Four special tokens, and the bytes of ASCII."""


def save_byte_tokenizer(
    directory: Path, specials: Sequence[str] = (), *, is_ascii: bool = False
) -> Path:
    """Saves a byte-level BPE tokenizer of single bytes as Hugging Face's file; returns
    ``directory``. The ids of more special tokens begin at ``NUM_BYTE_TOKENS``; with ``is_ascii``,
    which leaves the other bytes out, at ``NUM_ASCII_TOKENS``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if is_ascii:
        # A visible byte is its own character. The others, first the 34 of ASCII (0 to 32 and 127),
        # have those from U+0100 on, in order.
        invisible = {chr(0x100 + index) for index in range(34)}
        alphabet = [symbol for symbol in alphabet if symbol.isascii() or symbol in invisible]
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    vocab |= {symbol: index + 4 for index, symbol in enumerate(alphabet)}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>", *specials])
    fast.save(str(directory / "tokenizer.json"))
    return directory
