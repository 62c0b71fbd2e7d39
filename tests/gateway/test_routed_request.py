"""What the router gets to know of a job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastserve_client.request import EncodedMessages
from fastserve_gateway.fleet.routed_request import routed_request

SYSTEM = {"role": "system", "content": "Be brief. " * 200}
QUESTION = {"role": "user", "content": "Why is the sky blue?"}
ANSWER = {"role": "assistant", "content": "Short waves scatter more."}
NEXT = {"role": "user", "content": "And at night?"}
TOOLS = [{"type": "function", "function": {"name": "clock"}}]


def keys(prompt: Any, **options: Any) -> list[int]:
    return [prefix.key for prefix in routed_request(prompt, options).prefixes]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "longer"),
    [
        ([SYSTEM, QUESTION], [SYSTEM, QUESTION, ANSWER, NEXT]),
        ("word " * 512, "word " * 600),
        (list(range(512)), list(range(600))),
    ],
)
def test_a_longer_prompt_shares_the_beginnings_of_a_shorter_one(prompt: Any, longer: Any) -> None:
    shorter, all_keys = keys(prompt), keys(longer)
    assert len(shorter) > 2
    assert all_keys[: len(shorter)] == shorter
    assert len(all_keys) > len(shorter)


def test_the_order_of_keys_does_not_matter() -> None:
    turned = [dict(reversed(message.items())) for message in (SYSTEM, QUESTION)]
    assert keys(turned) == keys([SYSTEM, QUESTION])


@pytest.mark.parametrize("options", [{"tools": TOOLS}, {"chat_template_kwargs": {"date": "today"}}])
def test_what_a_template_writes_first_comes_first(options: Any) -> None:
    assert not set(keys([SYSTEM, QUESTION], **options)) & set(keys([SYSTEM, QUESTION]))


def test_all_turns_of_a_conversation_are_known_by_its_first_question() -> None:
    turns = [[SYSTEM, QUESTION], [SYSTEM, QUESTION, ANSWER, NEXT]]
    names = {routed_request(turn, {}).conversation for turn in turns}
    assert names == {keys(turns[0])[-1]}
    assert routed_request([SYSTEM, NEXT], {}).conversation not in names
    assert routed_request([SYSTEM], {}).conversation is None
    assert routed_request("a text", {}).conversation is None


def test_sizes_and_sessions() -> None:
    request = routed_request([7] * 100, {})
    assert (request.prompt_tokens, request.session) == (100, None)
    sessions = {
        routed_request("a", {"tenant": tenant, "session_id": "1"}).session
        for tenant in ("x", "y", None)
    }
    assert len(sessions) == 3


def test_requests_with_other_salts_have_nothing_in_common() -> None:
    requests = [
        routed_request([SYSTEM, QUESTION], {"session_id": "1", "cache_salt": salt})
        for salt in (None, "a", "b")
    ]
    all_keys = [prefix.key for request in requests for prefix in request.prefixes]
    assert len(set(all_keys)) == len(all_keys)
    assert len({request.session for request in requests}) == 3
    unsalted = routed_request([SYSTEM, QUESTION], {"session_id": "1"})
    assert unsalted == requests[0]


@pytest.mark.parametrize("prompt", ["\ud800", [1 << 40], [], ""])
def test_what_its_server_will_refuse_is_no_error_here(prompt: Any) -> None:
    routed_request(prompt, {})


def test_only_the_beginning_of_a_long_prompt_is_hashed() -> None:
    request = routed_request("x" * (1 << 20), {})
    assert request.prompt_tokens == 1 << 18
    assert request.prefixes[-1].end == 1 << 18


def test_of_a_long_conversation_only_the_beginning_is_encoded_again() -> None:
    class Unread(dict[str, str]):
        def items(self) -> Any:
            raise AssertionError("encoded")

    read: list[Any] = [SYSTEM, QUESTION, {**ANSWER, "content": "x" * (1 << 18)}]
    prompt = EncodedMessages([*read, NEXT])
    prompt[-1] = Unread()
    request = routed_request(prompt, {})
    assert request.prompt_tokens == len(prompt.text) // 4
    whole = routed_request([*read, NEXT], {})
    assert (request.prefixes, request.conversation) == (whole.prefixes, whole.conversation)
    late = EncodedMessages([{**ANSWER, "content": "x" * (1 << 18)}, QUESTION])
    assert routed_request(late, {}).conversation is None


def test_a_long_text_is_not_walked_character_by_character() -> None:
    """That would hold up the event loop: half a second for 5 MB."""

    class Unwalkable(str):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("walked")

    assert routed_request(Unwalkable("word " * 1000), {}).conversation is None
