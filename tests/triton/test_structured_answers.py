"""Structured answers and biased tokens through the real server, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import jsonschema
import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import AsyncFastServeClient, FastServeClient, InvalidRequest
from serving_client import GENERATE, metric, post, wait_until_idle

PROMPT = "Once upon a time"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Which city is the capital of France? Answer in JSON."}]


def test_a_trained_model_fills_in_a_schema(chat_endpoints: Endpoints) -> None:
    with FastServeClient(chat_endpoints.grpc_url) as client:
        wanted = {"json_schema": SCHEMA}
        answer = client.generate(QUESTION, max_tokens=80, temperature=0, structured_output=wanted)
        assert answer.finish_reason == "stop"
        assert json.loads(answer.text)["city"] == "Paris"
        jsonschema.validate(json.loads(answer.text), SCHEMA)
        wanted = {"choice": ["London", "Paris", "Rome"]}
        with client.stream(QUESTION, temperature=0, structured_output=wanted) as chunks:
            assert "".join(chunk.text for chunk in chunks) == "Paris"


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": r"\d{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]{2}/'}, r"a\d\d"),
    ],
)
def test_every_client(wanted: dict[str, Any], pattern: str, url: str) -> None:
    options: Any = {"temperature": 2.0, "structured_output": wanted, "seed": 3}

    async def ask() -> str:
        async with AsyncFastServeClient(url) as client:
            return (await client.generate(PROMPT, **options)).text

    with FastServeClient(url) as client:
        answer = client.generate(PROMPT, **options)
    assert re.fullmatch(pattern, answer.text)
    assert answer.finish_reason == "stop"
    assert asyncio.run(ask()) == answer.text


def test_a_body_of_http_has_them_as_json_texts(endpoints: Endpoints) -> None:
    body = {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "structured_output": json.dumps({"choice": ["yes", "no"]}),
        "logit_bias": json.dumps({str(4 + ord("y")): -100}),
    }
    assert post(endpoints.http_url, GENERATE, body).json()["text_output"] == "no"


def test_biased_tokens(url: str) -> None:
    with FastServeClient(url) as client:
        answer = client.generate(PROMPT, max_tokens=4, logit_bias={4 + ord("x"): 100})
        assert answer.text == "xxxx"
        with pytest.raises(InvalidRequest, match=r"logit_bias\[7\]: got 100.5; must be"):
            client.generate(PROMPT, logit_bias={7: 100.5})


def test_a_grammar_that_is_none_counts_as_refused(endpoints: Endpoints, url: str) -> None:
    wait_until_idle(endpoints)
    ended = metric(endpoints.metrics_url, "fastserve_requests_total", finish_reason="error")
    with FastServeClient(url) as client:
        for stream in (False, True):
            options: Any = {"structured_output": {"regex": "(a"}, "max_tokens": 5}
            with pytest.raises(InvalidRequest, match=r"structured_output.regex: got '\(a'; .*uncl"):
                list(client.stream(PROMPT, **options)) if stream else client.generate(
                    PROMPT, **options
                )
    wait_until_idle(endpoints)
    after = metric(endpoints.metrics_url, "fastserve_requests_total", finish_reason="error")
    assert after == ended
