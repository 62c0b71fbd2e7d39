"""BPE tokenizers in Hugging Face's files, read with `tokenizers` alone.

Two kinds are known, and what the bytes of a token are: byte-level ones (GPT-2, OPT, Llama 3), which
spell each byte with a letter of its own, and SentencePiece's (LLaMA 1 and 2), which spell text, "▁"
for a space and <0x0A> for a byte that no token has.

`transformers.AutoTokenizer` would import torch. What it does for these files is small:
tokenizer.json is taken as it is, but for the space before a text of GPT-2's and GPT-NeoX' classes
and the tokens around one of LLaMA's; vocab.json with merges.txt (as OPT and GPT-2 ship) make a
GPT-2 tokenizer whose special tokens and begin-of-sequence token come from tokenizer_config.json and
special_tokens_map.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from fastserve_backend.models.chat_template import ChatTemplate, ChatTemplateError, Message
from fastserve_backend.models.errors import ModelError
from fastserve_backend.models.tokenizer import NO_CHAT_TEMPLATE, TokenizationError, Tokenizer, utf8

_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_GPT_NEOX_CLASSES = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_GPT2_SPECIAL = "<|endoftext|>"  # GPT-2's begin, end and unknown token where no file names others

# What transformers' LLaMA classes take where tokenizer_config.json does not say.
_LLAMA_AROUND = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_bos_token": True,
    "add_eos_token": False,
}

# Order in which transformers registers them, which fixes the ids of those not in vocab.json.
_SPECIAL_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def has_tokenizer_files(directory: Path) -> bool:
    """True if `directory` holds a tokenizer that HFTokenizer reads."""
    return (directory / "tokenizer.json").is_file() or (
        (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file()
    )


class HFTokenizer(Tokenizer):
    """A BPE tokenizer from `directory`, for a model of `vocab_size` ids.

    `encode` equals `transformers.AutoTokenizer.from_pretrained(directory)(text).input_ids`, and
    `render_chat` its `apply_chat_template` with `tokenize=False, add_generation_prompt=True`. Five
    things differ. Decoding SentencePiece keeps the space before a text, because what is decoded
    continues a prompt. For the class LlamaTokenizer, add_bos_token and add_eos_token count where
    tokenizer_config.json has them, as in transformers 4: authors rely on it, and transformers 5
    ignores them beside tokenizer.json. And tokenizer.json is followed where transformers 5 has a
    way of its own: of treating spaces at the beginning of a text and behind special tokens, for the
    class LlamaTokenizer; of putting no tokens around a text, for GPTNeoXTokenizer; and of choosing
    a class by the model, where tokenizer_config.json names none.

    Raises ModelError for missing, damaged or unsupported files.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        if not has_tokenizer_files(directory):
            raise ModelError(
                f"tokenizer {str(directory)!r} has neither tokenizer.json nor vocab.json with "
                "merges.txt"
            )
        try:
            settings = _settings(directory)
            fast = _load(directory, settings)
            fast.encode("a")  # some damage shows only then
            template = ChatTemplate.load(directory, settings, _special_tokens(settings))
        except (ModelError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # `tokenizers` raises Exception, or panics, which is none
            raise ModelError(f"tokenizer {str(directory)!r} cannot be read: {error}") from error
        if isinstance(fast.decoder, decoders.ByteLevel):
            self._to_bytes = _byte_level_bytes
        elif _is_sentencepiece(fast):
            self._to_bytes = _sentencepiece_bytes
        else:
            raise ModelError(
                f"tokenizer {str(directory)!r} is neither byte-level nor SentencePiece BPE (its "
                f"decoder is {type(fast.decoder).__name__}); no other kind is supported"
            )
        # Tokens that were added for training, as padding, may lie behind: `encode` refuses them.
        largest = max(fast.get_vocab(with_added_tokens=False).values(), default=-1)
        if largest >= vocab_size:
            raise ModelError(
                f"tokenizer {str(directory)!r} has token id {largest}, but the model's vocab_size "
                f"is {vocab_size}; use the tokenizer that belongs to the model"
            )
        # Prompts are never cut or padded silently, whatever was left switched on in tokenizer.json.
        fast.no_truncation()
        fast.no_padding()
        fast.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        self.vocab_size = vocab_size
        # A byte-level symbol is one byte; all else is text, of up to 4 bytes a character.
        self.max_token_bytes = 4 * max(map(len, fast.get_vocab(with_added_tokens=True)))
        self._fast = fast
        self._template = template
        self.specials = {
            token_id: token.content
            for token_id, token in fast.get_added_tokens_decoder().items()
            if token.special
        }
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        utf8(text)
        try:
            # Of a batch, since `tokenizers` keeps the interpreter's lock while it encodes one text.
            [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a pattern that goes back and forth too often is a panic
            raise TokenizationError(f"the tokenizer fails at this text: {error}") from error
        ids: list[int] = encoding.ids
        beyond = next((one for one in ids if one >= self.vocab_size), None)
        if beyond is not None:
            raise TokenizationError(
                f"the prompt has the token {self._fast.id_to_token(beyond)!r} ({beyond}), but the "
                f"model's vocabulary has {self.vocab_size} ids"
            )
        return ids

    def render_chat(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            raise TokenizationError(NO_CHAT_TEMPLATE)
        try:
            return self._template.render(messages)
        except ChatTemplateError as error:
            raise TokenizationError(f"the model's chat template refuses: {error}") from None

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = None if token_id in self.specials else self._fast.id_to_token(token_id)
            if token is None:  # (not kept: there is no end of ids that no token has)
                return b""
            known = self._bytes[token_id] = self._to_bytes(token)
        return known


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 is itself, the rest U+0100 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a token's written form; with a letter outside the alphabet it is plain text."""
    try:
        return bytes(_BYTE_OF[letter] for letter in token)
    except KeyError:
        return token.encode()


def _is_sentencepiece(fast: FastTokenizer) -> bool:
    return bool(getattr(fast.model, "byte_fallback", False)) and "▁" in fast.get_vocab()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _load(directory: Path, settings: dict[str, Any]) -> FastTokenizer:
    tokenizer_class = settings.get("tokenizer_class")
    add_prefix_space = bool(settings.get("add_prefix_space", False))
    # Read here: the library opens no path that the stub's Python, which takes file names for ASCII,
    # cannot spell.
    if (directory / "tokenizer.json").is_file():
        fast = FastTokenizer.from_str((directory / "tokenizer.json").read_text("utf-8"))
        if (
            isinstance(fast.pre_tokenizer, pre_tokenizers.ByteLevel)
            and tokenizer_class in _GPT2_CLASSES + _GPT_NEOX_CLASSES
        ):  # transformers lets these classes decide, whatever tokenizer.json says
            fast.pre_tokenizer.add_prefix_space = add_prefix_space
        _add_special_tokens(fast, settings)
        given = {key: settings[key] for key in _LLAMA_AROUND if settings.get(key) is not None}
        if tokenizer_class in _LLAMA_CLASSES and given.keys() & {"add_bos_token", "add_eos_token"}:
            fast.post_processor = _tokens_around(fast, _LLAMA_AROUND | given)
        return fast
    if tokenizer_class not in (None, *_GPT2_CLASSES):
        raise ModelError(
            f"tokenizer {str(directory)!r} is a {tokenizer_class} without tokenizer.json; write "
            "that file with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    vocabulary = json.loads((directory / "vocab.json").read_text("utf-8"))
    fast = FastTokenizer(models.BPE(vocabulary, _merges(directory / "merges.txt")))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    fast.decoder = decoders.ByteLevel()
    for key in ("bos_token", "eos_token", "unk_token"):
        settings.setdefault(key, _GPT2_SPECIAL)
    _add_special_tokens(fast, settings)
    fast.post_processor = _tokens_around(fast, settings)
    return fast


def _merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for line in path.read_text("utf-8").split("\n"):
        if line and not line.startswith("#version"):
            left, right = line.split(" ")
            merges.append((left, right))
    return merges


def _tokens_around(fast: FastTokenizer, settings: dict[str, Any]) -> processors.PostProcessor:
    begin, end = (
        _text(settings[key]) if settings.get(f"add_{key}") and settings[key] else None
        for key in ("bos_token", "eos_token")
    )
    for key, token in (("bos_token", begin), ("eos_token", end)):
        if token is not None and fast.token_to_id(token) is None:
            raise ModelError(
                f"tokenizer_config.json: add_{key} is true and {key} is left out, but the "
                f"vocabulary has no {token!r}; name the token as {key}"
            )
    return around_prompt(fast, begin, end)


def around_prompt(
    fast: FastTokenizer, begin: str | None, end: str | None
) -> processors.PostProcessor:
    """Puts these tokens before and behind a prompt."""
    around = dict.fromkeys(token for token in (begin, end) if token is not None)
    return processors.TemplateProcessing(
        single=[token for token in (begin, "$A", end) if token is not None],
        special_tokens=[(token, fast.token_to_id(token)) for token in around],
    )


def _settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json counts where that lists no added tokens."""
    settings: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.is_file() and "added_tokens_decoder" not in settings:
            settings.update(json.loads(path.read_text(encoding="utf-8")))
    legacy = directory / "added_tokens.json"
    if legacy.is_file() and "added_tokens_decoder" not in settings:
        named = {_text(settings[key]) for key in _SPECIAL_KEYS if settings.get(key)}
        settings["added_tokens_decoder"] = {
            token_id: {"content": text, "special": text in named}
            for text, token_id in json.loads(legacy.read_text(encoding="utf-8")).items()
        }
    return settings


def _add_special_tokens(fast: FastTokenizer, settings: dict[str, Any]) -> None:
    added = settings.get("added_tokens_decoder") or {}
    fast.add_tokens(
        [
            _token(value, special=False)
            for _, value in sorted(added.items(), key=lambda x: int(x[0]))
        ]
    )
    named = [settings.get(key) for key in _SPECIAL_KEYS]
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # tokens of this model alone, by name
        extra = extra.values()
    known = set(fast.get_added_tokens_decoder())
    for value in [*named, *extra]:
        # A token that is there already keeps its own flags (such as eating the space before it).
        if value is not None and fast.token_to_id(_text(value)) not in known:
            fast.add_special_tokens([_token(value, special=True)])


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """What a chat template knows by name."""
    extra = settings.get("extra_special_tokens")
    named = {key: settings.get(key) for key in _SPECIAL_KEYS}
    named |= extra if isinstance(extra, dict) else {}
    return {key: _text(value) for key, value in named.items() if value}


def _text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _token(value: str | dict[str, Any], *, special: bool) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=special, normalized=not special)
    flags = {k: bool(value.get(k, False)) for k in ("single_word", "lstrip", "rstrip")}
    special = special or bool(value.get("special", False))
    return AddedToken(
        value["content"],
        special=special,
        normalized=bool(value.get("normalized", not special)),
        **flags,
    )
