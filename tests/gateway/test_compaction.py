"""A summary leaves no two messages of the user in a row, which many templates refuse."""

from __future__ import annotations

from fastserve_gateway.compaction import summary_item, summary_message, summary_of, with_request

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def test_the_request_is_one_message_with_the_users_last() -> None:
    (asked,) = with_request([USER])
    assert asked["role"] == "user"
    assert asked["content"].startswith("Hi\n\nSummarize")
    assert [one["role"] for one in with_request([USER, ANSWER])] == ["user", "assistant", "user"]
    assert USER["content"] == "Hi"


def test_a_summary_comes_back() -> None:
    item = summary_item("cmp_1", "They said hi.")
    assert summary_of(item) == "They said hi."
    assert summary_message("They said hi.")["role"] == "system"
    for other in ({}, {"encrypted_content": None}, {"encrypted_content": "gAAA"}):
        assert summary_of(other) is None
