"""Where a conversation's system messages stand in its prompt.

Clients put system messages anywhere, and many templates take one, at the front. A template either
refuses the others or leaves them out without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_PARAGRAPH = "\n\n"


def later_system_texts(messages: Sequence[Message]) -> list[str]:
    """The texts of system messages that are not the first message."""
    return [one["content"].strip() for one in messages[1:] if one["role"] == "system"]


def placements(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Forms of a conversation with several system messages, the most faithful one first."""
    yield messages
    yield _in_turns(messages)
    yield _at_front(messages)


def _in_turns(messages: Sequence[Message]) -> list[Message]:
    """Joins the messages before the first answer at the front. Later ones become text of the user
    where they stand: moving them would change the prompt's beginning, whose KV is cached."""
    roles = [one["role"] for one in messages]
    num_first = roles.index("assistant") if "assistant" in roles else len(messages)
    placed = _at_front(messages[:num_first])
    joins = False
    for message in messages[num_first:]:
        is_system = message["role"] == "system"
        if is_system:
            message = {"role": "user", "content": message["content"]}
        both_users = bool(placed) and placed[-1]["role"] == message["role"] == "user"
        if both_users and (is_system or joins):  # many templates take no two in a row
            before = placed.pop()
            message = {**before, "content": _joined([before, message])}
        placed.append(message)
        joins = is_system
    return placed


def _at_front(messages: Sequence[Message]) -> list[Message]:
    """Joins all system messages to one, the first."""
    system = [one for one in messages if one["role"] == "system"]
    rest = [one for one in messages if one["role"] != "system"]
    return [{"role": "system", "content": _joined(system)}, *rest] if system else rest


def _joined(messages: Sequence[Message]) -> str:
    return _PARAGRAPH.join(one["content"] for one in messages if one["content"])
