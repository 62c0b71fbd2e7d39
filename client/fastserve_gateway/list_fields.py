"""Types of fields that may hold many values.

Such a field is checked as a whole, up to its first mistake, and its length before its values.
pydantic would keep an error for each value, and for each member of a union.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

from fastserve_client.protocol import MAX_INT32
from pydantic import PlainValidator

from fastserve_gateway.errors import invalid
from fastserve_gateway.strict_fields import MAX_NAME_CHARS

MAX_STOP_WORDS = 16
MAX_STOP_TOKEN_IDS = 128
"""The server's limit, like all of these. While the server reads a million of them, only to refuse
them, other requests wait."""
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 64
MAX_WORD_CHARS = 256
"""Of a stop word or a bad word."""
MAX_LOGIT_BIASES = 300
"""OpenAI's limit too."""
MAX_INCLUDED = 64
"""Far more than there are values of ``include``."""
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""OpenAI's limits."""
# An id has no more digits, and a bias no more characters that count.
_MAX_ID_CHARS = 20
# Lists are checked piece by piece, so that other threads run between two pieces.
_PIECE = 1 << 16


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str) or _all(str, value):
        return value
    if _all(int, value):
        return _token_ids(value)
    if _all(list, value) and all(_all(int, one) for one in value):
        return [_token_ids(one) for one in value]
    raise ValueError("must be text, token ids, or a list of at least one of them")


def _check_tokens(value: Any) -> Any:
    if _all(int, value):
        return _token_ids(value)
    raise ValueError("must be a list of at least one token id")


def _token_ids(value: list[int]) -> Sequence[int]:
    """They take half of the memory in this form, and no time when they are sent."""
    try:
        return array("i", value)
    except OverflowError:
        wrong = next(one for one in value if abs(one) > MAX_INT32)
        got = f"got {str(wrong)[:_MAX_ID_CHARS]}, which is no token id"
        raise ValueError(f"{got}; must be integers that fit 32 bits") from None


def _check_stop(value: Any) -> Any:
    if value is None or _are_words([value] if isinstance(value, str) else value, MAX_STOP_WORDS):
        return value
    raise ValueError(f"must be text or {_words(MAX_STOP_WORDS)}")


def _check_stop_sequences(value: Any) -> Any:
    if value is None or _are_words(value, MAX_STOP_WORDS):
        return value
    raise ValueError(f"must be {_words(MAX_STOP_WORDS)}")


def _check_stop_token_ids(value: Any) -> Any:
    if value is None or type(value) is int or _is_short(int, value, MAX_STOP_TOKEN_IDS):
        return value
    raise ValueError(f"must be a token id or a list of at most {MAX_STOP_TOKEN_IDS} of them")


def _check_allowed(value: Any) -> Any:
    if value is None or (value and _is_short(int, value, MAX_ALLOWED_TOKEN_IDS)):
        return value
    raise ValueError(f"must be a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids, or left out")


def _check_bad_words(value: Any) -> Any:
    if value is None or _are_words(value, MAX_BAD_WORDS):
        return value
    raise ValueError(f"must be {_words(MAX_BAD_WORDS)}")


def _check_biases(value: Any) -> Any:
    if value is None or (
        isinstance(value, dict)
        and len(value) <= MAX_LOGIT_BIASES
        and set(map(type, value.values())) <= {int, float}
        and max(map(len, value), default=0) <= _MAX_ID_CHARS
    ):
        return value
    raise ValueError(f"must give at most {MAX_LOGIT_BIASES} token ids a number each")


def _check_included(value: Any) -> Any:
    if value is None or _is_short(str, value, MAX_INCLUDED):
        return value
    raise ValueError(f"must be a list of at most {MAX_INCLUDED} texts")


def _check_metadata(value: Any) -> Any:
    """Raises ApiError, too: it names the value that is wrong."""
    if value is None:
        return value
    if not isinstance(value, dict) or len(value) > MAX_METADATA:
        raise ValueError(f"must be a JSON object of at most {MAX_METADATA} texts")
    for name, text in value.items():
        if len(name) > MAX_METADATA_KEY_CHARS:
            allowed = f"the name must have at most {MAX_METADATA_KEY_CHARS} characters"
            raise invalid(f"metadata.{name[:MAX_NAME_CHARS]}", allowed)
        if not isinstance(text, str) or len(text) > MAX_METADATA_CHARS:
            allowed = f"must be text of at most {MAX_METADATA_CHARS} characters"
            raise invalid(f"metadata.{name}", allowed)
    return value


def _words(most: int) -> str:
    return f"a list of at most {most} texts, each of at most {MAX_WORD_CHARS} characters"


def _are_words(value: Any, most: int) -> bool:
    return _is_short(str, value, most) and all(len(one) <= MAX_WORD_CHARS for one in value)


def _is_short(kind: type, value: Any, most: int) -> bool:
    return value == [] or (isinstance(value, list) and len(value) <= most and _all(kind, value))


def _all(kind: type, value: Any) -> bool:
    # A bool is an int to Python, but no token. There may be a million, so no Python runs for each.
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            set(map(type, value[begin : begin + _PIECE])) == {kind}
            for begin in range(0, len(value), _PIECE)
        )
    )


PromptField = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_check_prompt)
]
TokensField = Annotated[list[int], PlainValidator(_check_tokens)]
StopField = Annotated[str | list[str] | None, PlainValidator(_check_stop)]
StopSequencesField = Annotated[list[str] | None, PlainValidator(_check_stop_sequences)]
StopTokenIdsField = Annotated[list[int] | int | None, PlainValidator(_check_stop_token_ids)]
AllowedTokenIdsField = Annotated[list[int] | None, PlainValidator(_check_allowed)]
BadWordsField = Annotated[list[str] | None, PlainValidator(_check_bad_words)]
LogitBiasField = Annotated[dict[str, float] | None, PlainValidator(_check_biases)]
IncludedField = Annotated[list[str] | None, PlainValidator(_check_included)]
MetadataField = Annotated[dict[str, str] | None, PlainValidator(_check_metadata)]
