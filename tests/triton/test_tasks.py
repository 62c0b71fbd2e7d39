"""Requests that are no jobs are answered at once, over gRPC and HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import AsyncFastServeClient, FastServeClient, ModelDescription
from serving_client import GENERATE, generate, post


async def test_the_description_of_a_model(url: str) -> None:
    description = ModelDescription(
        max_model_len=240 * 16,  # all that the KV cache holds
        chat_template=None,
    )
    with FastServeClient(url) as client:
        assert client.describe() == client.describe(timeout_s=30.0) == description
    async with AsyncFastServeClient(url) as other:
        assert await other.describe() == description


def test_the_description_has_the_source_of_the_chat_template(chat_endpoints: Endpoints) -> None:
    with FastServeClient(chat_endpoints.grpc_url) as client:
        description = client.describe()
    assert description.chat_template is not None
    assert "{% for message in messages %}" in description.chat_template
    assert description.max_model_len == 2048


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"task": "sing"}, "task: got 'sing'; must be one of describe"),
        ({"task": b"\xff"}, "task: got b"),
        ({"task": "describe", "text_input": "a"}, "text_input: got 'a value'; nothing may be"),
        ({"task": "describe", "sampling_parameters": '{"top_k": 1}'}, "sampling_parameters: got"),
        ({"task": "describe", "watch_interval_ms": 100}, "task, watch_interval_ms: got"),
        ({"text_input": "a", "parameters": {"task": "describe"}}, "task: got 'describe'; unknown"),
    ],
)
def test_bad_tasks_are_refused(inputs: dict[str, Any], message: str, endpoints: Endpoints) -> None:
    answer = generate(endpoints.grpc_url, **inputs)
    assert answer.error is not None
    assert answer.error.message().startswith(message)
    assert answer.num_finals == 1


def test_a_bad_task_over_http(endpoints: Endpoints) -> None:
    refused = post(endpoints.http_url, GENERATE, {"task": "sing"})
    assert refused.status_code == 400
    assert "task: got 'sing'" in refused.text
