"""Integers beyond 32 bits over Triton's HTTP, which silently cuts those in tensors."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import FastServeClient, InvalidRequest
from serving_client import GENERATE, post

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def answer(endpoints: Endpoints, **fields: Any) -> httpx2.Response:
    return post(endpoints.http_url, GENERATE, {"max_tokens": 4, **GREEDY, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 2**32 + 1),
        ("max_tokens", 1 - 2**32),
        ("min_tokens", 2**32),
        ("top_k", 2**32 + 1),
        ("seed", 2**64 + 5),
        ("logprobs", 2**32 + 1),
    ],
)
def test_in_sampling_parameters_they_keep_all_digits(
    endpoints: Endpoints, name: str, value: int
) -> None:
    body = {"text_input": "a", "sampling_parameters": json.dumps({name: value})}
    refused = post(endpoints.http_url, GENERATE, body)
    assert refused.status_code == 400
    assert f"{name}: got {value}; " in refused.json()["error"]


def test_of_token_ids_the_server_keeps_32_bits(endpoints: Endpoints) -> None:
    """docs/requests.md says so, and must change if a later server refuses them."""
    large = answer(endpoints, input_ids=[2**32 + 5])
    assert large.json() == answer(endpoints, input_ids=[5]).json()


@pytest.mark.parametrize("token_id", [2**32 + 5, 5 - 2**32])
def test_the_client_sends_no_such_token_ids(endpoints: Endpoints, token_id: int) -> None:
    for url in (f"grpc://{endpoints.grpc_url}", endpoints.http_url):
        with (
            FastServeClient(url) as client,
            pytest.raises(InvalidRequest, match=rf"^input_ids: got {token_id}, "),
        ):
            client.generate([token_id], max_tokens=1)
