"""System messages anywhere, on each API, for a template that takes one at the front."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway

SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
DEVELOPER = {"role": "developer", "content": "Be brief."}
LIMIT = {"max_tokens": 1}


def post(gateway: RunningGateway, path: str, body: dict[str, Any]) -> dict[str, Any]:
    url, asked = f"{gateway.url}{path}", {"model": "fastserve", **body}
    answer = httpx2.post(url, json=asked, timeout=REQUEST_TIMEOUT_S)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@pytest.mark.parametrize("late", [SYSTEM, DEVELOPER])
def test_each_api_takes_them_anywhere(tool_gateway: RunningGateway, late: dict[str, Any]) -> None:
    """All are the same conversation: two system messages, then the user's."""
    counts = []
    for messages in ([SYSTEM, late, USER], [SYSTEM, USER, late], [USER, late, SYSTEM]):
        chat = post(tool_gateway, "/v1/chat/completions", {"messages": messages, **LIMIT})
        counts.append(chat["usage"]["prompt_tokens"])
        asked = {"messages": messages}
        counted = post(tool_gateway, "/v1/messages/count_tokens", asked)
        counts.append(counted["input_tokens"])
        usage = post(tool_gateway, "/v1/messages", {**asked, **LIMIT})["usage"]
        counts.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
        fields = {"input": messages, "max_output_tokens": 1}
        counts.append(post(tool_gateway, "/v1/responses", fields)["usage"]["input_tokens"])
    assert len(set(counts)) == 1


def test_they_are_joined_at_the_front(tool_gateway: RunningGateway) -> None:
    shown = post(
        tool_gateway,
        "/tokenize",
        {"messages": [USER, SYSTEM, DEVELOPER], "return_token_strs": True},
    )
    text = "".join(shown["token_strs"])
    assert text.startswith("\nsystem: Be brief.\n\nBe brief.\nuser: Hi")
