"""Types of fields that may hold many values.

Such a field is checked as a whole, up to its first mistake. pydantic would keep an error for each
value, and for each member of a union.
"""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

from pydantic import PlainValidator

MAX_STOP_WORDS = 16
MAX_STOP_TOKEN_IDS = 128
"""The server's limit, like all of these. While the server reads a million of them, only to refuse
them, other requests wait."""
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 64
MAX_LOGIT_BIASES = 300
"""OpenAI's limit too."""


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str) or _all(int, value) or _all(str, value):
        return value
    if _all(list, value) and all(value) and _all(int, list(chain.from_iterable(value))):
        return value
    raise ValueError("must be text, token ids, or a list of at least one of them")


def _check_tokens(value: Any) -> Any:
    if _all(int, value):
        return value
    raise ValueError("must be a list of at least one token id")


def _check_stop(value: Any) -> Any:
    if value is None or isinstance(value, str) or _is_short(str, value, MAX_STOP_WORDS):
        return value
    raise ValueError(f"must be text or a list of at most {MAX_STOP_WORDS} texts")


def _check_stop_token_ids(value: Any) -> Any:
    if value is None or type(value) is int or _is_short(int, value, MAX_STOP_TOKEN_IDS):
        return value
    raise ValueError(f"must be a token id or a list of at most {MAX_STOP_TOKEN_IDS} of them")


def _check_allowed(value: Any) -> Any:
    if value is None or (_all(int, value) and len(value) <= MAX_ALLOWED_TOKEN_IDS):
        return value
    raise ValueError(f"must be a list of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids, or left out")


def _check_bad_words(value: Any) -> Any:
    if value is None or _is_short(str, value, MAX_BAD_WORDS):
        return value
    raise ValueError(f"must be a list of at most {MAX_BAD_WORDS} texts")


def _check_biases(value: Any) -> Any:
    if value is None or (
        isinstance(value, dict)
        and len(value) <= MAX_LOGIT_BIASES
        and set(map(type, value.values())) <= {int, float}
    ):
        return value
    raise ValueError(f"must give at most {MAX_LOGIT_BIASES} token ids a number each")


def _is_short(kind: type, value: Any, most: int) -> bool:
    return value == [] or (_all(kind, value) and len(value) <= most)


def _all(kind: type, value: Any) -> bool:
    # A bool is an int to Python, but no token. There may be millions, so no Python runs for each.
    return isinstance(value, list) and set(map(type, value)) == {kind}


PromptField = Annotated[
    str | list[str] | list[int] | list[list[int]], PlainValidator(_check_prompt)
]
TokensField = Annotated[list[int], PlainValidator(_check_tokens)]
StopField = Annotated[str | list[str] | None, PlainValidator(_check_stop)]
StopTokenIdsField = Annotated[list[int] | int | None, PlainValidator(_check_stop_token_ids)]
AllowedTokenIdsField = Annotated[list[int] | None, PlainValidator(_check_allowed)]
BadWordsField = Annotated[list[str] | None, PlainValidator(_check_bad_words)]
LogitBiasField = Annotated[dict[str, float] | None, PlainValidator(_check_biases)]
