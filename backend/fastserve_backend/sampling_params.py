"""How one job's tokens are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastserve_backend.errors import InvalidRequestError
from fastserve_backend.grammars.structured_output import FIELD, StructuredOutput

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20  # the OpenAI API's limit; each alternative is a string per token on the wire
# Each new piece of text is compared with each prefix of each stop word: this bounds the work.
MAX_STOP_WORDS = 16
MAX_STOP_WORD_CHARS = 256
# Until min_tokens, each step bans each of them anew.
MAX_STOP_TOKEN_IDS = 128
# OpenAI's limits. A bias of 100 makes a token nearly certain, -100 nearly impossible.
MAX_LOGIT_BIASES = 300
MAX_LOGIT_BIAS = 100.0
# As JSON they take a tenth of what all sampling parameters may have.
MAX_ALLOWED_TOKEN_IDS = 16384
# Each token is compared with all of their beginnings.
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
# Logits divided by less may overflow. Divided by this, they choose the most likely token anyway.
LEAST_TEMPERATURE = 1e-5


class _DefaultFloat(float):
    """The default of a field, as a number that tells that the field was left out."""


class _DefaultInt(int):
    """The same as an integer."""


MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields for which a model may have defaults of its own."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one job; field names follow the request fields.

    The model's own defaults replace those of ``MODEL_DEFAULTS`` that are left out.

    Raises:
        InvalidRequestError: a value is outside its range (NaN counts as outside).
    """

    max_tokens: int = 16
    """Most tokens to generate, ≥ 1."""
    min_tokens: int = 0
    """Before this many tokens, end-of-sequence and stop tokens are not chosen, and stop words are
    ignored."""
    temperature: float = _DefaultFloat(1.0)
    """0 means greedy, and so does anything below ``LEAST_TEMPERATURE``."""
    top_p: float = _DefaultFloat(1.0)
    """Smallest set of tokens whose probability reaches this; in (0, 1]."""
    top_k: int = _DefaultInt(-1)
    """Only the k most likely tokens; -1 (or 0) means all."""
    min_p: float = _DefaultFloat(0.0)
    """Only tokens whose probability is at least this share of the likeliest token's; in [0, 1]. It
    counts after ``temperature`` and before ``top_k`` and ``top_p``, as in vLLM."""
    repetition_penalty: float = _DefaultFloat(1.0)
    """> 1 makes tokens of the prompt and the output less likely (CTRL, Keskar et al. 2019)."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that was generated; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time that it was generated; in [-2, 2]."""
    seed: int | None = None
    """The same seed and prompt give the same text, whatever else runs, unless the rest of the batch
    changes how logits are rounded (docs/architecture.md, Invariants). None: drawn at submission."""
    stop: Sequence[str] = ()
    """Generation ends when one of these words appears in the text; the word is not returned. A text
    alone is one stop word. A word may contain special tokens, which otherwise have no text, as the
    tokenizer spells them. Kept as a tuple."""
    stop_not_between: Sequence[str] = ()
    """Two marks: if the text begins with the first, or that is empty, ``stop`` counts only behind
    the second. So it does not end a model's reasoning. Kept as a tuple; empty: it always counts."""
    stop_token_ids: Collection[int] = ()
    """Generation ends with any of these tokens; that token is returned, but not its text. A number
    alone is one token. Kept as a frozenset."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (benchmarks force output lengths with it)."""
    skip_special_tokens: bool = True
    """False: special tokens of the answer have their text, as the tokenizer spells them. A token
    that ends the answer has none even so."""
    logprobs: int | None = None
    """n ≥ 0: log-probabilities of each token and of the n most likely ones. None: of no token."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The job computes its whole prompt then,
    whatever is in the prefix cache."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens, by id, before all else; from -100 to 100."""
    allowed_token_ids: Collection[int] | None = None
    """No other tokens are chosen; None: all may be. Without an end token among them, only
    ``max_tokens`` and ``stop`` end the answer. Kept as a frozenset."""
    bad_words: Sequence[str] = ()
    """Words that the answer must not contain, as in vLLM: of the tokens of each word, with and
    without a space before it, the last is not chosen after the others. A word alone is a list of
    one. Kept as a tuple."""
    structured_output: StructuredOutput | None = None
    """The form of the answer. The answer ends where its form allows no more, or allows an end and
    the model chooses it. ``max_tokens`` and ``stop`` may cut it short."""

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, "0 to max_tokens")
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p", self.top_p, "must be above 0 and at most 1")
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if not isinstance(self.skip_special_tokens, bool):
            allowed = "must be true or false"
            raise InvalidRequestError("skip_special_tokens", self.skip_special_tokens, allowed)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_stop_conditions()
        if self.logit_bias is not None:
            _check_logit_bias(self.logit_bias)
        self._check_token_rules()
        if self.structured_output is not None:
            if self.ignore_eos:
                allowed = f"must be false with {FIELD}, which ends with an end-of-sequence token"
                raise InvalidRequestError("ignore_eos", True, allowed)
            if self.min_tokens:
                allowed = f"must be 0 with {FIELD}, which may allow no more"
                raise InvalidRequestError("min_tokens", self.min_tokens, allowed)

    def _check_stop_conditions(self) -> None:
        stop = _words("stop_words", self.stop, MAX_STOP_WORDS, MAX_STOP_WORD_CHARS)
        object.__setattr__(self, "stop", stop)
        marks = _elements("stop_not_between", self.stop_not_between, str)
        if marks and (
            len(marks) != 2
            or not all(isinstance(one, str) and len(one) <= MAX_STOP_WORD_CHARS for one in marks)
            or not marks[1]
        ):
            allowed = f"must be two texts of up to {MAX_STOP_WORD_CHARS} characters, the second not"
            raise InvalidRequestError("stop_not_between", list(marks), f"{allowed} empty")
        object.__setattr__(self, "stop_not_between", marks)
        token_ids = _elements("stop_token_ids", self.stop_token_ids, int)
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            allowed = f"at most {MAX_STOP_TOKEN_IDS} token ids"
            raise InvalidRequestError("stop_token_ids", f"{len(token_ids)} token ids", allowed)
        for token_id in token_ids:
            _check_int("stop_token_ids", token_id, 0, 2**31 - 1, "a token id")
        object.__setattr__(self, "stop_token_ids", frozenset(token_ids))

    def _check_token_rules(self) -> None:
        bad_words = _words("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
        object.__setattr__(self, "bad_words", bad_words)
        if self.allowed_token_ids is None:
            return
        name = "allowed_token_ids"
        token_ids = _elements(name, self.allowed_token_ids, int)
        if not token_ids:
            raise InvalidRequestError(name, [], "at least one token id; leave it out to allow all")
        if len(token_ids) > MAX_ALLOWED_TOKEN_IDS:
            allowed = f"at most {MAX_ALLOWED_TOKEN_IDS} token ids"
            raise InvalidRequestError(name, f"{len(token_ids)} token ids", allowed)
        kept = frozenset(token_ids)
        if set(map(type, token_ids)) != {int} or min(kept) < 0 or max(kept) >= 2**31:
            for token_id in token_ids:  # there may be many, so not for those that are fine
                _check_int(name, token_id, 0, 2**31 - 1, "a token id")
        object.__setattr__(self, name, kept)

    def with_model_defaults(self, defaults: Mapping[str, float]) -> SamplingParams:
        """A copy in which ``defaults``, some of ``MODEL_DEFAULTS``, replace what was left out."""
        left_out = {
            name: value
            for name in MODEL_DEFAULTS
            if isinstance(value := getattr(self, name), _DefaultFloat | _DefaultInt)
        }
        # A plus makes a plain number, because messages to the ranks take no other.
        chosen: dict[str, Any] = {
            name: defaults.get(name, +value) for name, value in left_out.items()
        }
        return replace(self, **chosen)

    @property
    def greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def _elements(field: str, value: object, kind: type) -> tuple[Any, ...]:
    """The elements of a field for a list. A ``kind`` alone is a list of one, None an empty list.

    Raises InvalidRequestError: the value is no list. The elements are not checked.
    """
    if value is None:
        return ()
    if isinstance(value, kind):
        return (value,)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        names = {str: "text, or a list of texts", int: "a list of integers"}
        raise InvalidRequestError(field, value, f"must be {names[kind]}")
    return tuple(value)


def _words(field: str, value: object, most: int, most_chars: int) -> tuple[str, ...]:
    """The texts of a field, each of 1 to ``most_chars`` characters. Raises InvalidRequestError."""
    words = _elements(field, value, str)
    if len(words) > most:
        raise InvalidRequestError(field, f"{len(words)} words", f"at most {most} words")
    for word in words:
        if not isinstance(word, str) or not 0 < len(word) <= most_chars:
            raise InvalidRequestError(field, word, f"each word has 1 to {most_chars} characters")
        if any("\ud800" <= char <= "\udfff" for char in word):  # which no text has
            raise InvalidRequestError(field, word, "must be valid Unicode")
    return words


def _check_int(field: str, value: object, low: int, high: int, allowed: str | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        text = allowed or f"{low} to {high}"
        raise InvalidRequestError(field, value, f"must be an integer, {text}")


def _check_float(field: str, value: object, low: float, high: float) -> None:
    # NaN is in no range, so the comparison refuses it too.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidRequestError(field, value, f"must be a finite number, {low:g} to {high:g}")


def _check_logit_bias(biases: Mapping[int, float]) -> None:
    if len(biases) > MAX_LOGIT_BIASES:
        allowed = f"at most {MAX_LOGIT_BIASES} tokens"
        raise InvalidRequestError("logit_bias", f"{len(biases)} tokens", allowed)
    for token_id, bias in biases.items():
        _check_int("logit_bias", token_id, 0, 2**31 - 1, "a token id")
        _check_float(f"logit_bias[{token_id}]", bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)
