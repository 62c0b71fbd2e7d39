"""Answers of a gateway that run at the same time, in a form that can be compared.

How an answer is cut into chunks, its ids and its times differ each time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
from waiting import wait_for

REQUEST_TIMEOUT_S = 240.0
"""For a whole answer, and for a stream that waits until its server is started again."""
_DONE = "[DONE]"
_PING = 'data: {"type":"ping"}'
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete")
_CHANGING = {"id", "item_id", "call_id", "created_at", "completed_at", "sequence_number"}


@dataclass(frozen=True)
class Ask:
    """A request of one of the gateway's APIs."""

    route: str
    """Such as "chat/completions"."""
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        return bool(self.body["stream"])


class Asked:
    """Requests that run at the same time."""

    def __init__(self, url: str, asks: Sequence[Ask]) -> None:
        self.num_begun = 0
        self._counting = threading.Lock()
        self._url = url
        self._pool = ThreadPoolExecutor(len(asks))
        self._answers: list[Future[Any]] = [self._pool.submit(self._read, ask) for ask in asks]

    def wait_until_begun(self, number: int) -> None:
        """Returns when so many streams have begun."""
        wait_for(lambda: self.num_begun >= number, REQUEST_TIMEOUT_S)

    def answers(self) -> list[Any]:
        """Each as a value to compare by ``check_same``. Fails if one of them ended too early."""
        with self._pool:
            return [answer.result(REQUEST_TIMEOUT_S) for answer in self._answers]

    def _read(self, ask: Ask) -> Any:
        url = f"{self._url}/v1/{ask.route}"
        if not ask.streams:
            answer = httpx2.post(url, json=ask.body, timeout=REQUEST_TIMEOUT_S)
            assert answer.is_success, answer.text
            return _joined([answer.json()])
        events: list[str] = []
        with httpx2.stream("POST", url, json=ask.body, timeout=REQUEST_TIMEOUT_S) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == _PING:
                    continue
                if not events:
                    with self._counting:
                        self.num_begun += 1
                events.append(line.removeprefix("data: "))
        if events[-1] == _DONE:
            return _joined([json.loads(event) for event in events[:-1]])
        found = [json.loads(event) for event in events]
        assert found[-1].get("type") in _LAST_EVENTS, events[-1]
        return _merged(found)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Log-probabilities may differ by rounding."""
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=1e-3)
    assert {**found, "logprobs": None} == {**expected, "logprobs": None}


def _joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the client gets of one completion or chat completion."""
    assert len({event["id"] for event in events}) == 1
    texts: dict[str, str] = {}
    ends: dict[int, str] = {}
    tokens: list[Any] = []

    def add(name: str, text: str | None) -> None:
        texts[name] = texts.get(name, "") + (text or "")

    for event in events:
        for choice in event["choices"]:
            index = choice["index"]
            part = choice.get("delta", choice.get("message", choice))
            add(f"{index}: content", part.get("text", part.get("content")))
            add(f"{index}: reasoning", part.get("reasoning_content"))
            for call in part.get("tool_calls") or ():
                for name in ("name", "arguments"):
                    add(f"{index}: call {call['index']}: {name}", call["function"].get(name))
            found = choice.get("logprobs") or {}
            tokens += found.get("content") or ()
            tokens += zip(found.get("tokens", ()), found.get("token_logprobs", ()), strict=True)
            if choice["finish_reason"] is not None:
                assert index not in ends
                ends[index] = choice["finish_reason"]
    usage = events[-1]["usage"]
    logprobs: list[float] = []
    return {
        "texts": texts,
        "ends": ends,
        "usage": {name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
        "tokens": _without_numbers(tokens, logprobs),
        "logprobs": logprobs,
    }


def _merged(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the client gets of one response or message: its events, where a run of parts of one text
    counts as one event."""
    merged: list[tuple[Any, str]] = []
    output_tokens: list[int] = []
    for event in events:
        frame, text = _cut(_stable(event, output_tokens))
        if text is not None and merged and merged[-1][0] == frame:
            merged[-1] = frame, merged[-1][1] + text
        elif text != "":
            merged.append((frame, text or ""))
    return {"events": merged, "usage": output_tokens[-1], "logprobs": []}


def _cut(event: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """An event without the part of a text that it brings, and this part; None: it brings none."""
    delta = event.get("delta")
    if isinstance(delta, str):
        return {**event, "delta": None}, delta
    if isinstance(delta, dict) and event["type"] == "content_block_delta":
        (name,) = delta.keys() - {"type"}
        return {**event, "delta": {**delta, name: None}}, delta[name]
    return event, None


def _stable(value: Any, output_tokens: list[int]) -> Any:
    """The value without what differs each time. Counts of tokens go to ``output_tokens``."""
    if isinstance(value, list):
        return [_stable(one, output_tokens) for one in value]
    if not isinstance(value, dict):
        return value
    if usage := value.get("usage"):
        output_tokens.append(usage["output_tokens"])
    return {
        name: _stable(one, output_tokens)
        for name, one in value.items()
        if name not in _CHANGING | {"usage"}
    }


def _without_numbers(value: Any, numbers: list[float]) -> Any:
    """The value without its real numbers, which go to ``numbers``."""
    if isinstance(value, list | tuple):
        return [_without_numbers(one, numbers) for one in value]
    if isinstance(value, dict):
        return {name: _without_numbers(one, numbers) for name, one in value.items()}
    if isinstance(value, float):
        numbers.append(value)
        return None
    return value
