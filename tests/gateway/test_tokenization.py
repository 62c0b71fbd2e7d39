"""``/tokenize`` and ``/detokenize``: vLLM's shapes, and the prompts of completions."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from fastserve_client.protocol import MODEL_NAME
from openai import OpenAI
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway

HI = (4 + ord("H"), 4 + ord("i"))


def post(gateway: RunningGateway, path: str, body: Any) -> httpx2.Response:
    url = f"{gateway.api_url.removesuffix('/v1')}/{path}"
    return httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S)


def test_a_text_and_its_tokens(gateway: RunningGateway, client: OpenAI) -> None:
    answer = post(gateway, "tokenize", {"model": MODEL_NAME, "prompt": "Hi"}).json()
    tokens = [2, *HI]
    expected = {"count": 3, "max_model_len": 240 * 16, "tokens": tokens, "token_strs": None}
    assert answer == expected
    body = {"prompt": "Hi", "add_special_tokens": False, "return_token_strs": True}
    named = post(gateway, "tokenize", body).json()
    assert (named["tokens"], named["token_strs"]) == (list(HI), ["H", "i"])
    assert post(gateway, "detokenize", {"tokens": tokens}).json() == {"prompt": "</s>Hi"}
    assert post(gateway, "tokenize", {"prompt": ""}).json()["tokens"] == [2]
    for special, count in ((None, 3), (True, 3), (False, 2)):
        extra = {"add_special_tokens": special}
        completion = client.completions.create(
            model=MODEL_NAME, prompt="Hi", max_tokens=1, extra_body=extra
        )
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == count


def test_unknown_fields_are_named(gateway: RunningGateway) -> None:
    answer = post(gateway, "tokenize", {"prompt": "Hi", "colour": "red", "priority": 1})
    assert answer.status_code == 200
    assert answer.headers["FastServe-Ignored-Fields"] == "colour, priority"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "a" * 5000}, "prompt"),
        ("tokenize", {"messages": []}, "messages"),
        ("tokenize", {"messages": [{"role": "user"}]}, "messages.0.content"),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}], "tools": [5]}, "tools.0"),
        ("tokenize", {"messages": [{"role": "user", "content": "a"}]}, "messages"),  # no template
        ("tokenize", {"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": []}, "tokens"),
        ("detokenize", {"tokens": [True]}, "tokens"),
        ("detokenize", {"tokens": "5"}, "tokens"),
        ("detokenize", {"tokens": [5, 1024]}, "tokens"),
        ("detokenize", {"tokens": [2**40]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named(
    path: str, body: dict[str, Any], param: str, gateway: RunningGateway
) -> None:
    answer = post(gateway, path, body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("path", "field"), [("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [5]})]
)
def test_another_model_is_not_found(
    path: str, field: dict[str, Any], gateway: RunningGateway
) -> None:
    answer = post(gateway, path, {"model": "other", **field})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
