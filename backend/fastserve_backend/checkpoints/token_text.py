"""The bytes that a token stands for.

Two kinds of vocabulary are known. Byte-level ones (GPT-2, OPT, Llama 3) have a letter for each
byte. SentencePiece's (LLaMA 1 and 2) hold text, with "▁" for a space and <0x0A> for a byte that no
token has. An added token is found in a text as it is written, so it stands for just that.
(`tokenizers` would read it in the vocabulary's spelling, which changes letters such as "ć" or "▁".)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as FastTokenizer

Spelling = Callable[[str], bytes]
"""Turns a token's written form in a vocabulary into its bytes."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def spelling_of(fast: FastTokenizer) -> Spelling | None:
    """How the vocabulary of `fast` spells bytes; None if the spelling is unknown."""
    if isinstance(fast.decoder, decoders.ByteLevel):
        return _byte_level
    if bool(getattr(fast.model, "byte_fallback", False)) and "▁" in fast.get_vocab():
        return _sentencepiece
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 is itself, the rest U+0100 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
_LETTER_OF = {byte: letter for letter, byte in _BYTE_OF.items()}


def byte_level(piece: bytes) -> str:
    """How a byte-level vocabulary spells these bytes."""
    return "".join(map(_LETTER_OF.__getitem__, piece))


def _byte_level(token: str) -> bytes:
    """A token with a letter outside the alphabet is plain text."""
    try:
        return bytes(_BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def bytes_of_added(
    fast: FastTokenizer, spelling: Spelling, added: Mapping[int, AddedToken]
) -> dict[int, bytes]:
    """The bytes of added tokens, by id: the text that was added, nothing for a special token.

    An added token may also be in the vocabulary, where its spelling means other text: "▁▁" means
    two spaces. Then that text counts, because it is more frequent. SentencePiece's byte tokens stay
    bytes, even if a trainer has marked them as special.
    """
    model = fast.model
    ignores_merges = getattr(model, "ignore_merges", False)
    if ignores_merges:  # with this the vocabulary would make every token that it has
        model.ignore_merges = False
    try:
        return {
            token_id: _added(token, spelling, _makes(model, token.content, token_id))
            for token_id, token in added.items()
        }
    finally:
        if ignores_merges:
            model.ignore_merges = True


def _makes(model: object, written: str, token_id: int) -> bool:
    try:
        return [one.id for one in model.tokenize(written)] == [token_id]  # type: ignore[attr-defined]
    except (
        Exception
    ):  # such as for letters that it cannot spell, with an unknown token that is gone
        return False


def _added(token: AddedToken, spelling: Spelling, is_made: bool) -> bytes:
    if spelling is _sentencepiece and _BYTE_TOKEN.fullmatch(token.content):
        return spelling(token.content)
    if token.special:
        return b""
    text = spelling(token.content)
    return text if is_made and _is_text(text) else token.content.encode()


def _is_text(spelled: bytes) -> bool:
    """Whether it is whole printable characters. Tabs and newlines count; other control characters
    are rare."""
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter in "\t\n" for letter in text)
