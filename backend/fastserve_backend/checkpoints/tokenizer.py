"""Turns text into token ids and back, without torch.

Every token stands for some bytes. Decoding joins them and reads UTF-8, with U+FFFD for broken
parts. So a stream only has to remember the bytes of one unfinished character.
(`tokenizers.decoders.DecodeStream` stalls after a lone invalid byte, and decodes everything that it
holds at every step.)
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fastserve_backend.checkpoints.chat_options import DEFAULT_CHAT, ChatOptions
from fastserve_backend.checkpoints.chat_template import Message
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.hub import download, is_hub_id
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.errors import FastServeError

# Ids of OPT's special tokens, which the built-in tokenizer shares.
_OPT_EOS = 2
_SPECIALS = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>"}
_NUM_SPECIAL = len(_SPECIALS)

NO_CHAT_TEMPLATE = "the model has no chat template; send a prompt as text"

_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]


class TokenizationError(FastServeError):
    """A text has no token ids."""


class Tokenizer(ABC):
    """A model's tokenizer. Threads may share an instance."""

    vocab_size: int
    max_token_bytes: int
    """The most UTF-8 bytes that one token stands for, which bounds the length of a prompt."""
    specials: Mapping[int, str]
    """The special tokens by id, as a prompt spells them. In an answer they have no text."""
    chat_template: str | None = None
    """The Jinja source of the model's chat template, if it has one."""
    tool_template: str | None = None
    """The source of the template that takes its place if there are tools, if there is another."""
    end_token_ids: tuple[int, ...] = ()
    """End tokens that the tokenizer's files name, if the model's vocabulary has them; see
    `end_tokens`."""

    @abstractmethod
    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile, however long the text is.

        Args:
            special_tokens: add the tokens that the model expects around a prompt.

        Raises:
            TokenizationError: the text has a lone surrogate, which UTF-8 cannot hold, or a token
                that the model's vocabulary lacks; or the tokenizer fails.
        """

    @abstractmethod
    def render_chat(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> str:
        """The prompt that makes the model answer the last message, or continue it. It spells out
        all special tokens that the model expects.

        Raises:
            TokenizationError: there is no template, or it refuses the messages.
        """

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of `token_id`; none for a special or unknown token."""

    def spelled_bytes(self, token_id: int) -> bytes:
        """The bytes of `token_id`; those of a special token as a prompt spells it."""
        special = self.specials.get(token_id)
        return self.token_bytes(token_id) if special is None else special.encode()

    def written(self, token_id: int) -> str:
        """`token_id` for people to read; a special token by its name."""
        return self.specials.get(token_id) or self.decode([token_id])

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids` without special tokens. Invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def stream(self, *, skip_special_tokens: bool = True) -> TextDecoder:
        """A new incremental decoder for one job's generated tokens."""
        return TextDecoder(self.token_bytes if skip_special_tokens else self.spelled_bytes)


class TextDecoder:
    """Decodes one job's tokens as they arrive. All pieces joined are the text of all bytes.

    It holds back at most three bytes, an unfinished character. The cost of a step does not grow
    with the job's length.

    Args:
        token_bytes: returns the bytes of a token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes: whole characters, often the whole token."""
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        """The unfinished rest, as U+FFFD. Call this once, after the last token."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """The tokenizer for random weights: a token for each byte, and pseudo-words for other ids.

    Ids 0 to 3 are OPT's special tokens, and 4 to 259 the bytes. Every higher id decodes to a space
    and a word of its own, so that a random model's output looks like text. No table is built.
    """

    def __init__(self, vocab_size: int) -> None:
        first_word = _NUM_SPECIAL + 256
        if vocab_size < first_word:
            raise ModelError(
                f"vocab_size is {vocab_size}, but the built-in tokenizer of random weights needs "
                f"at least {first_word}; add tokenizer files to the model or enlarge vocab_size"
            )
        self.vocab_size = vocab_size
        self.max_token_bytes = 1
        self.specials = _SPECIALS
        self._first_word = first_word

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        begin = [_OPT_EOS] if special_tokens else []
        return [*begin, *(byte + _NUM_SPECIAL for byte in utf8(text))]

    def render_chat(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> str:
        raise TokenizationError(NO_CHAT_TEMPLATE)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id >= self._first_word:
            return _pseudo_word(token_id - self._first_word) if token_id < self.vocab_size else b""
        return bytes((token_id - _NUM_SPECIAL,)) if token_id >= _NUM_SPECIAL else b""


def _pseudo_word(index: int) -> bytes:
    """A word that spells `index` with syllables as digits; it has at least two."""
    word = ""
    while index or len(word) < 4:
        index, syllable = divmod(index, len(_SYLLABLES))
        word = _SYLLABLES[syllable] + word
    return f" {word}".encode()


def utf8(text: str) -> bytes:
    """UTF-8 of `text`. Raises TokenizationError for a lone surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise TokenizationError(
            f"text has a lone surrogate, U+{ord(text[error.start]):04X}, at character "
            f"{error.start}; send valid Unicode"
        ) from None


def load_tokenizer(model: str, tokenizer: str | None, config: ModelConfig) -> Tokenizer:
    """The tokenizer for `model`: from `tokenizer` (a directory or hub id) if given, else the
    model's own. Random weights without tokenizer files get the built-in one.

    Raises:
        ModelError: there is no usable tokenizer, or it has ids that the model's vocabulary lacks.
    """
    try:
        return _load(model, tokenizer, config)
    except OSError as error:  # such as a directory on the way that may not be searched
        given = config.directory if tokenizer is None else tokenizer
        raise ModelError(f"tokenizer {given!r} cannot be read: {error.strerror}") from None


def _load(model: str, tokenizer: str | None, config: ModelConfig) -> Tokenizer:
    from fastserve_backend.checkpoints.hf_tokenizer import HFTokenizer, has_tokenizer_files

    if tokenizer is not None:
        directory = Path(tokenizer).expanduser()
        if not directory.is_dir():
            if not is_hub_id(tokenizer):
                raise ModelError(
                    f"tokenizer {tokenizer!r} is no directory and no Hugging Face id (owner/name "
                    "or owner/name@revision)"
                )
            directory = download(tokenizer, weights=False)
    elif config.directory is not None and has_tokenizer_files(Path(config.directory)):
        directory = Path(config.directory)
    elif config.load_format == "dummy":
        return ByteTokenizer(config.vocab_size)
    else:
        raise ModelError(
            f"model {model!r}: {config.directory} has no tokenizer (tokenizer.json, tekken.json, "
            "or vocab.json with merges.txt); add it, or name one with tokenizer"
        )
    return HFTokenizer(directory, config.vocab_size)
