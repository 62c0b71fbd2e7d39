"""What the router gets of a job: its prompt's beginnings, its size, its session."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from fastserve_client import protocol
from fastserve_client.options import Message, Prompt, RequestOptions
from fastserve_client.request import EncodedMessages

from fastserve_gateway.routing.prefixes import prompt_prefixes
from fastserve_gateway.routing.request import RoutedRequest

# A template writes them before the messages, or may.
_BEFORE_MESSAGES = (protocol.TOOLS, protocol.CHAT_TEMPLATE_KWARGS)
# Of English, in UTF-8.
_BYTES_A_TOKEN = 4
# Hashing more would hold up the event loop: this much takes about 0.5 ms.
_MAX_HASHED_BYTES = 1 << 18
# One for all: json.dumps would make one for each message.
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def routed_request(prompt: Prompt, options: RequestOptions) -> RoutedRequest:
    """Describes a job. A wrong prompt is described somehow: its server refuses it."""
    parts: list[bytes] = []
    num_bytes = 0
    for part in _parts(prompt, options):
        parts.append(part)
        num_bytes += len(part)
        if isinstance(prompt, EncodedMessages) and num_bytes >= _MAX_HASHED_BYTES:
            num_bytes = max(num_bytes, len(prompt.text))  # without encoding the rest again
            break
    salt = options.get("cache_salt") or ""
    prefixes = prompt_prefixes(_beginning(parts), salt)
    asked = _question_end(prompt, parts) if _is_conversation(prompt) else None
    conversation = next((prefix.key for prefix in prefixes if prefix.end == asked), None)
    return RoutedRequest(
        prompt_tokens=num_bytes // _BYTES_A_TOKEN,
        prefixes=prefixes,
        conversation=conversation,
        session=_session(options, salt),
    )


def _session(options: RequestOptions, salt: str) -> str | None:
    session_id = options.get("session_id")
    if session_id is None:
        return None
    return "/".join((options.get("tenant") or "", session_id, *([salt] if salt else ())))


def _parts(prompt: Prompt, options: RequestOptions) -> Iterator[bytes]:
    """The prompt in pieces: the messages of a conversation, after its tools. The next turn of a
    conversation begins with the same pieces. A token id has 4 bytes."""
    if isinstance(prompt, str):
        yield prompt.encode(errors="surrogatepass")
    elif _is_conversation(prompt):
        given: Mapping[str, Any] = options
        yield _canonical({name: given.get(name) for name in _BEFORE_MESSAGES})
        yield from map(_canonical, cast("Sequence[Message]", prompt))
    else:
        try:
            yield array("i", cast("Sequence[int]", prompt)).tobytes()
        except OverflowError:
            return  # one of them is no token id


def _is_conversation(prompt: Prompt) -> bool:
    return bool(prompt) and isinstance(prompt[0], Mapping)


def _question_end(prompt: Prompt, parts: Sequence[bytes]) -> int | None:
    """Where the first question of a conversation ends, in bytes of its parts."""
    for number, message in enumerate(prompt):
        if isinstance(message, Mapping) and message.get("role") == "user":
            is_read = number + 2 <= len(parts)
            return sum(map(len, parts[: number + 2])) if is_read else None
    return None


def _beginning(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The first ``_MAX_HASHED_BYTES`` of the parts."""
    left = _MAX_HASHED_BYTES
    for part in parts:
        yield part[:left]
        left -= len(part)
        if left <= 0:
            return


def _canonical(value: Mapping[str, Any]) -> bytes:
    """The same bytes for equal values."""
    return _ENCODER.encode(value).encode(errors="surrogatepass")
