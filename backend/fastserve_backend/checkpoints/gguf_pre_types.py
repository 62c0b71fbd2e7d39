"""How byte-level tokenizers of GGUF files split text, by the names that the files have for it.

The names and what they mean are llama.cpp's. A split is a list of regular expressions. Each cuts
the pieces that those before it left into its matches and what is between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from fastserve_backend.checkpoints.errors import ModelError


@dataclass(frozen=True)
class PreType:
    """A way to split text, and two defaults that come with its name."""

    splitter: PreTokenizer
    ignores_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges say."""
    adds_begin: bool = False
    """Whether a prompt begins with the begin token, if the file does not say."""


def _split(*patterns: str) -> PreTokenizer:
    splits = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


# Parts of the expressions.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, endings: str = _ENDINGS, letter: str = r"\p{L}") -> str:
    """The split of GPT-4 and its relatives: they differ in how many digits are together."""
    return rf"{endings}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}|{_PUNCTUATION}|{_SPACES}"


def _words_by_case(digits: str, endings: str = "") -> str:
    """The split of GPT-4o and its relatives: a word may begin with capitals, not end with them."""
    ended = f"{endings}?" if endings else ""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{ended}|{before}{_UPPER}+{_LOWER}*{ended}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2 = PreType(ByteLevel(add_prefix_space=False))
_ONE_DIGIT = PreType(Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]))
_THREE_DIGITS = _split(_words(r"\p{N}{1,3}"))
_GPT4 = PreType(_THREE_DIGITS)
_LLAMA3 = PreType(_THREE_DIGITS, ignores_merges=True, adds_begin=True)
_QWEN2 = PreType(_split(_words(r"\p{N}")))
_QWEN35 = PreType(
    _split(
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )
)
_TEKKEN = PreType(_split(_words_by_case(r"\p{N}")), ignores_merges=True, adds_begin=True)
_GPT4O = PreType(_split(_words_by_case(r"\p{N}{1,3}", _ENDINGS)))
_DEEPSEEK_CODER = PreType(
    _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
)
_DEEPSEEK_V3 = PreType(
    _split(
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

_NAMES = (
    (_GPT2, "default gpt-2 phi-2 olmo mpt mellum gigachat exaone4 trillion granite-docling"),
    (_ONE_DIGIT, "smollm starcoder refact command-r codeshell exaone minerva-7b"),
    (_GPT4, "dbrx smaug-bpe chatglm-bpe glm4"),
    (_LLAMA3, "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0"),
    (_QWEN2, "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan"),
    (_QWEN35, "qwen35"),
    (_TEKKEN, "tekken"),
    (_GPT4O, "gpt-4o llama4"),
    (_DEEPSEEK_CODER, "deepseek-coder"),
    (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense"),
)
_BY_NAME = {name: kind for kind, names in _NAMES for name in names.split()}


def pre_type(name: str) -> PreType:
    """The way to split text that a file names. Raises ModelError if it is not known here:
    splitting it differently would silently make answers worse."""
    if name not in _BY_NAME:
        raise ModelError(
            f"its tokenizer splits text as {name!r}; known are {', '.join(_BY_NAME)}; use the "
            "model's Hugging Face checkpoint"
        )
    return _BY_NAME[name]
