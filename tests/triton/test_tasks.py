"""Requests that are no jobs are answered at once, over gRPC and HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import AsyncFastServeClient, FastServeClient, InvalidRequest, ModelDescription
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


async def test_tokens_of_a_text_and_back(url: str) -> None:
    with FastServeClient(url) as client:
        found = client.tokenize("Hé!", return_token_strs=True)
        ids = (2, *(4 + byte for byte in "Hé!".encode()))
        assert found.token_ids == ids
        assert (found.count, found.max_model_len) == (5, 240 * 16)
        assert found.token_strs == ("</s>", "H", "\ufffd", "\ufffd", "!")
        assert client.tokenize("Hé!", add_special_tokens=False).token_ids == ids[1:]
        assert client.tokenize("Hé!").token_strs is None
        assert client.tokenize("", add_special_tokens=False).count == 0
        assert client.tokenize("").token_ids == (2,)
        assert client.detokenize(ids) == "</s>Hé!"
        plain = client.generate("Hé!", max_tokens=1, add_special_tokens=False)
        assert plain.num_input_tokens == 4
    async with AsyncFastServeClient(url) as other:
        assert await other.tokenize("Hé!", return_token_strs=True) == found
        assert await other.detokenize(ids) == "</s>Hé!"


def test_tokens_of_a_conversation(chat_endpoints: Endpoints) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with FastServeClient(chat_endpoints.grpc_url) as client:
        found = client.tokenize(messages, return_token_strs=True, continue_final_message=True)
        assert found.token_strs is not None
        text = client.detokenize(found.token_ids)
        assert text == "".join(found.token_strs)
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello")
        answer = client.generate(messages, max_tokens=1, continue_final_message=True)
        assert answer.num_input_tokens == found.count
        with pytest.raises(InvalidRequest, match=r"^messages\[0\]: got 'colour'; unknown"):
            client.tokenize([{"role": "user", "content": "Hi", "colour": "red"}])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"task": "sing"}, "task: got 'sing'; must be one of describe"),
        ({"task": b"\xff"}, "task: got b"),
        ({"task": "describe", "text_input": "a"}, "text_input: got 'a value'; not with the task"),
        (
            {"task": "describe", "sampling_parameters": '{"top_k": 1}'},
            "top_k: got 'a value'; not with the",
        ),
        ({"task": "describe", "watch_interval_ms": 100}, "task, watch_interval_ms: got"),
        ({"text_input": "a", "parameters": {"task": "describe"}}, "task: got 'describe'; unknown"),
        ({"task": "tokenize"}, "text_input, messages: got 'none'; exactly one of text_input, mess"),
        ({"task": "tokenize", "input_ids": [5]}, "input_ids: got 'a value'; not with the task"),
        ({"task": "tokenize", "text_input": "a", "max_tokens": 1}, "max_tokens: got 'a value'; n"),
        (
            {"task": "tokenize", "text_input": "a", "parameters": {"tools": "[]"}},
            "tools: got 'a value'; only with messages",
        ),
        (
            {"task": "tokenize", "text_input": "a", "parameters": {"add_special_tokens": "x"}},
            "add_special_tokens: got 'x'; must be true or false",
        ),
        ({"task": "tokenize", "text_input": "a" * 5000}, "text_input: got '5000 characters'; This"),
        ({"task": "tokenize", "messages": "[]"}, "messages: got '2 characters'; must be a JSON"),
        (
            {"task": "tokenize", "messages": '[{"role": "user", "content": "a"}]'},
            "messages: got '1 messages'; the model has no chat template",
        ),
        ({"task": "detokenize", "text_input": "a"}, "text_input: got 'a value'; not with the task"),
        ({"task": "detokenize", "input_ids": [5, 1024]}, "input_ids: got 1024; token ids are 0 to"),
        ({"task": "detokenize", "input_ids": [5] * 5000}, "input_ids: got '5000 tokens'; This mod"),
        (
            {"text_input": "a", "parameters": {"return_token_strs": True}},
            "return_token_strs: got True; unknown parameter",
        ),
        (
            {"input_ids": [5], "parameters": {"add_special_tokens": True}},
            "add_special_tokens: got True; must be false or left out with input_ids",
        ),
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
