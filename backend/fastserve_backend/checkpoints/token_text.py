"""What bytes a token stands for.

Two vocabularies are known. Byte-level ones (GPT-2, OPT, Llama 3) spell each byte with a letter of
its own. SentencePiece's (LLaMA 1 and 2) spell text, "▁" for a space and <0x0A> for a byte that no
token has. Tokens that were added to a vocabulary are found in a text as they
are, so they stand for what was added. (`tokenizers` reads them by the vocabulary's spelling too,
which makes other characters of "ć" or "▁".)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as FastTokenizer

Spelling = Callable[[str], bytes]
"""From a token's written form in a vocabulary to its bytes."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


def spelling_of(fast: FastTokenizer) -> Spelling | None:
    """How the vocabulary of `fast` spells bytes; None: in no way that is known."""
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


def _byte_level(token: str) -> bytes:
    """With a letter outside the alphabet it is plain text."""
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
    """Bytes of the tokens that were added to a vocabulary of such spelling, by id: what was added,
    and none of special ones.

    A token can be the vocabulary's too, which makes it of other text: of two spaces where "▁▁" was
    added. That text counts where it is one, since it is the more frequent. Bytes of SentencePiece's
    stay bytes, though a trainer may have called them special.
    """
    model = fast.model
    ignores_merges = getattr(model, "ignore_merges", False)
    if ignores_merges:  # then the vocabulary makes whatever it has
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
    """Neither a part of a character nor a control character, of which all but two are rare."""
    try:
        text = spelled.decode()
    except UnicodeDecodeError:
        return False
    return all(letter.isprintable() or letter in "\t\n" for letter in text)
