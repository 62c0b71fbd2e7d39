"""BPE tokenizers from Hugging Face's files, read with `tokenizers` alone.

`transformers.AutoTokenizer` would import torch, and does little for these files:

- tokenizer.json is used as it is. Only the classes of GPT-2 and GPT-NeoX set the space before a
  text, and LLaMA's the tokens around it.
- vocab.json with merges.txt (as OPT and GPT-2 ship them) give a GPT-2 tokenizer. Its special tokens
  come from tokenizer_config.json and special_tokens_map.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from fastserve_backend.checkpoints.chat_options import DEFAULT_CHAT, ChatOptions
from fastserve_backend.checkpoints.chat_template import ChatTemplate, ChatTemplateError, Message
from fastserve_backend.checkpoints.end_tokens import tokenizer_ends
from fastserve_backend.checkpoints.errors import ModelError
from fastserve_backend.checkpoints.limits import check_file
from fastserve_backend.checkpoints.tekken import TEKKEN_FILE, TEKKEN_NAMES, tekken_as_json
from fastserve_backend.checkpoints.token_ids import (
    around_prompt,
    build_tokenizer,
    parse_with_duplicates,
)
from fastserve_backend.checkpoints.token_text import bytes_of_added, spelling_of
from fastserve_backend.checkpoints.tokenizer import (
    NO_CHAT_TEMPLATE,
    TokenizationError,
    Tokenizer,
    utf8,
)

_GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
_GPT_NEOX_CLASSES = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
_LLAMA_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast")
_GPT2_SPECIAL = "<|endoftext|>"  # GPT-2's begin, end and unknown token, unless a file names others

# Defaults of transformers' LLaMA classes for what tokenizer_config.json leaves out.
_LLAMA_AROUND = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_bos_token": True,
    "add_eos_token": False,
}

# In the order in which transformers registers them: it fixes the ids of those not in vocab.json.
_SPECIAL_KEYS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", TEKKEN_FILE, "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
)
# The ends of a text, of a turn and of a message.
_END_KEYS = ("eos_token", "eot_token", "eom_token")


def has_tokenizer_files(directory: Path) -> bool:
    """Whether `directory` holds a tokenizer that HFTokenizer can read."""
    kinds = ("tokenizer.json",), (TEKKEN_FILE,), ("vocab.json", "merges.txt")
    return any(all((directory / name).is_file() for name in names) for names in kinds)


class HFTokenizer(Tokenizer):
    """A BPE tokenizer from `directory`, for a model of `vocab_size` ids.

    `encode` equals `transformers.AutoTokenizer.from_pretrained(directory)(text).input_ids`, and
    `render_chat` its `apply_chat_template` with `tokenize=False` and the same options, with seven
    differences:

    - Decoding SentencePiece keeps the space before a text, because the text continues a prompt.
    - For the class LlamaTokenizer, add_bos_token and add_eos_token in tokenizer_config.json count,
      as in transformers 4. Authors rely on that, though transformers 5 ignores them if there is a
      tokenizer.json.
    - For LlamaTokenizer, tokenizer.json also decides about spaces at the beginning of a text and
      after special tokens. Transformers 5 has a rule of its own.
    - For GPTNeoXTokenizer, tokenizer.json decides about tokens around a text. Transformers 5 adds
      none.
    - If tokenizer_config.json names no class, tokenizer.json is used as it is. Transformers 5
      chooses a class by the model.
    - An empty list of tools counts as none.
    - System messages that the template does not write where they are come elsewhere: see
      `system_messages`.

    Raises:
        ModelError: files are missing, damaged or unsupported.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        if not has_tokenizer_files(directory):
            raise ModelError(
                f"tokenizer {str(directory)!r} has no tokenizer.json, no {TEKKEN_FILE}, and no "
                "vocab.json with merges.txt"
            )
        try:
            for path in (directory / name for name in _FILES):
                if path.is_file():
                    check_file(path)
            settings = _settings(directory)
            # Its process starts while the vocabulary is read.
            template = ChatTemplate.load(directory, settings, _special_tokens(settings))
            files = _load(directory, settings)
            named_ends = _named_ends(directory, settings)
            fast = files.fast
            fast.encode("a")  # some damage shows only when a text is encoded
            if template is not None:
                template.check()
        except (ModelError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in `tokenizers` is not an Exception
            raise ModelError(
                f"tokenizer {str(directory)!r} cannot be read: its files are damaged or incomplete "
                f"({error!r}); download them again, or name another one with tokenizer"
            ) from error
        spelling = spelling_of(fast)
        if spelling is None:
            raise ModelError(
                f"tokenizer {str(directory)!r} is neither byte-level nor SentencePiece BPE (its "
                f"decoder is {type(fast.decoder).__name__}); no other kind is supported"
            )
        # Tokens added for training, such as padding, may have larger ids: `encode` refuses them.
        if files.largest >= vocab_size:
            raise ModelError(
                f"tokenizer {str(directory)!r} has token id {files.largest}, but the model's "
                f"vocab_size is {vocab_size}; use the tokenizer that belongs to the model"
            )
        # Never cut or pad prompts silently, whatever tokenizer.json has left switched on.
        fast.no_truncation()
        fast.no_padding()
        fast.encode_special_tokens = bool(settings.get("split_special_tokens", False))
        self.vocab_size = vocab_size
        # A byte-level symbol is one byte. Anything else is text, of up to 4 bytes a character.
        self.max_token_bytes = 4 * max(map(len, fast.get_vocab(with_added_tokens=True)))
        self._fast = fast
        self._template = template
        if template is not None:
            self.chat_template = template.source
            self.tool_template = template.tool_source
        self._spelling = spelling
        added = files.added()
        self._bytes = {token_id: spelling(token) for token_id, token in files.further.items()}
        self._bytes |= bytes_of_added(fast, spelling, added)
        self.specials = {
            token_id: token.content
            for token_id, token in added.items()
            if token.special and not self._bytes[token_id]
        }
        self.end_token_ids = tuple(
            token_id
            for token_id in tokenizer_ends(fast, added, named_ends, template)
            if token_id < vocab_size
        )

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        utf8(text)
        try:
            # As a batch: to encode a single text `tokenizers` would hold the interpreter's lock.
            [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=special_tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a pattern that backtracks too often panics
            raise TokenizationError(f"the tokenizer fails at this text: {error}") from error
        ids: list[int] = encoding.ids
        beyond = next((one for one in ids if one >= self.vocab_size), None)
        if beyond is not None:
            raise TokenizationError(
                f"the prompt has the token {self.written(beyond)!r} ({beyond}), but the "
                f"model's vocabulary has {self.vocab_size} ids"
            )
        return ids

    def render_chat(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_CHAT) -> str:
        if self._template is None:
            raise TokenizationError(NO_CHAT_TEMPLATE)
        try:
            return self._template.render(messages, options)
        except ChatTemplateError as error:
            raise TokenizationError(str(error)) from None

    def token_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            token = self._fast.id_to_token(token_id)
            if token is None:  # not cached: any number of ids have no token
                return b""
            known = self._bytes[token_id] = self._spelling(token)
        return known


@dataclass(frozen=True)
class _Files:
    """A tokenizer as its files describe it, with what `tokenizers` cannot hold."""

    fast: FastTokenizer
    largest: int
    """The vocabulary's largest id. Added tokens may have larger ones."""
    further: Mapping[int, str]
    """Tokens of the vocabulary that have a second id, by that id."""
    further_added: Mapping[int, AddedToken]
    """Added tokens that have a second id, by that id."""
    special: Set[str]
    """The added tokens that a file marks as special or names in a special role."""

    def added(self) -> dict[int, AddedToken]:
        """All added tokens, by id."""
        tokens = {**self.fast.get_added_tokens_decoder(), **self.further_added}
        for token in tokens.values():
            token.special = token.special or token.content in self.special
        return tokens


def _load(directory: Path, settings: dict[str, Any]) -> _Files:
    tokenizer_class = settings.get("tokenizer_class")
    add_prefix_space = bool(settings.get("add_prefix_space", False))
    text = _tokenizer_json(directory)
    if text is not None:
        fields, further = parse_with_duplicates(text)
        vocabulary = _vocabulary(fields)
        in_file = {
            one["id"]: _token(one, special=False) for one in fields.get("added_tokens") or ()
        }

        def make(whole: dict[str, int]) -> FastTokenizer:
            if whole is vocabulary:
                fast = FastTokenizer.from_str(text)
            else:
                model = {**fields["model"], "vocab": whole}
                fast = FastTokenizer.from_str(json.dumps({**fields, "model": model}))
            if (
                isinstance(fast.pre_tokenizer, pre_tokenizers.ByteLevel)
                and tokenizer_class in _GPT2_CLASSES + _GPT_NEOX_CLASSES
            ):  # in transformers these classes overrule tokenizer.json
                fast.pre_tokenizer.add_prefix_space = add_prefix_space
            _add_special_tokens(fast, settings)
            return fast

        files = _build(make, vocabulary, further, in_file, settings)
        given = {key: settings[key] for key in _LLAMA_AROUND if settings.get(key) is not None}
        if tokenizer_class in _LLAMA_CLASSES and given.keys() & {"add_bos_token", "add_eos_token"}:
            files.fast.post_processor = _tokens_around(files.fast, _LLAMA_AROUND | given)
        return files
    if tokenizer_class not in (None, *_GPT2_CLASSES):
        raise ModelError(
            f"tokenizer {str(directory)!r} is a {tokenizer_class} without tokenizer.json; write "
            "that file with transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    vocabulary, further = parse_with_duplicates((directory / "vocab.json").read_text("utf-8"))
    merges = _merges(directory / "merges.txt")

    def make_gpt2(whole: dict[str, int]) -> FastTokenizer:
        fast = FastTokenizer(models.BPE(whole, merges))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
        fast.decoder = decoders.ByteLevel()
        _add_special_tokens(fast, settings)
        return fast

    files = _build(make_gpt2, vocabulary, further, {}, settings)
    files.fast.post_processor = _tokens_around(files.fast, settings)
    return files


def _tokenizer_json(directory: Path) -> str | None:
    """The content of tokenizer.json, or what it would be; None: there is neither file."""
    # Read here, because the library cannot open a path that the stub's Python cannot spell, and
    # that Python only knows ASCII names.
    if (directory / "tokenizer.json").is_file():
        return (directory / "tokenizer.json").read_text("utf-8")
    if (directory / TEKKEN_FILE).is_file():
        return tekken_as_json(directory / TEKKEN_FILE)
    return None


def _vocabulary(fields: dict[str, Any]) -> dict[str, int]:
    """The vocabulary of a tokenizer.json; empty if the kind of model has it as a list."""
    vocabulary = fields["model"]["vocab"]
    return vocabulary if isinstance(vocabulary, dict) else {}


def _build(
    make: Callable[[dict[str, int]], FastTokenizer],
    vocabulary: dict[str, int],
    further: dict[int, str],
    in_file: dict[int, AddedToken],
    settings: dict[str, Any],
) -> _Files:
    in_settings = {token_id: _token(value, special=False) for token_id, value in _added(settings)}
    added = in_file | {one: token for one, token in in_settings.items() if one not in in_file}
    fast = build_tokenizer(make, vocabulary, added, (_text(value) for value in _named(settings)))
    listed: dict[int, str | AddedToken] = {**further, **added}
    forgotten = {one: token for one, token in listed.items() if fast.id_to_token(one) is None}
    # `gguf_tokenizer` writes these: text is a token of the vocabulary, an object an added token.
    for token_id, value in (settings.get("duplicate_tokens") or {}).items():
        forgotten[int(token_id)] = value if isinstance(value, str) else _token(value, special=False)
    special = {one.content for one in (*in_file.values(), *in_settings.values()) if one.special}
    special |= {_text(settings[key]) for key in _SPECIAL_KEYS if settings.get(key)}
    return _Files(
        fast,
        largest=max(vocabulary.values(), default=-1),
        further={one: token for one, token in forgotten.items() if isinstance(token, str)},
        further_added={
            one: token for one, token in forgotten.items() if not isinstance(token, str)
        },
        special=special,
    )


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


def _settings(directory: Path) -> dict[str, Any]:
    """The fields of tokenizer_config.json. If it lists no added tokens, special_tokens_map.json
    counts too. Without tokenizer.json, those of tekken.json or of GPT-2 are the defaults."""
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
    if not (directory / "tokenizer.json").is_file():
        is_tekken = (directory / TEKKEN_FILE).is_file()
        for key, name in TEKKEN_NAMES.items():
            settings.setdefault(key, name if is_tekken else _GPT2_SPECIAL)
    return settings


def _added(settings: dict[str, Any]) -> list[tuple[int, Any]]:
    """The added tokens of tokenizer_config.json or added_tokens.json, by id."""
    added = settings.get("added_tokens_decoder") or {}
    return sorted(((int(token_id), value) for token_id, value in added.items()), key=itemgetter(0))


def _named(settings: dict[str, Any]) -> Iterator[Any]:
    """The special tokens: first those with a role, then the additional ones."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # this model's own tokens, by name
        extra = extra.values()
    named = [settings.get(key) for key in _SPECIAL_KEYS]
    return (value for value in (*named, *extra) if value is not None)


def _add_special_tokens(fast: FastTokenizer, settings: dict[str, Any]) -> None:
    fast.add_tokens([_token(value, special=False) for _, value in _added(settings)])
    known = set(fast.get_added_tokens_decoder())
    for value in _named(settings):
        # A known token keeps its own flags, such as taking in the space before it.
        if fast.token_to_id(_text(value)) not in known:
            fast.add_special_tokens([_token(value, special=True)])


def _named_ends(directory: Path, settings: dict[str, Any]) -> list[str]:
    """The end tokens that any file names. A missing or null one in a file hides no other's."""
    parts = [settings]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if path.is_file():
            parts.append(json.loads(path.read_text(encoding="utf-8")))
    extra = [part.get("extra_special_tokens") for part in parts]
    parts += [one for one in extra if isinstance(one, dict)]
    return [_text(part[key]) for part in parts for key in _END_KEYS if part.get(key)]


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The tokens that a chat template knows by name."""
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
