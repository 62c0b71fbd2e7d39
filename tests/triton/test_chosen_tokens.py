"""Fields that choose tokens, spell them and cut prompts, through the real server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import FastServeClient, InvalidRequest
from serving_client import GENERATE, post

PROMPT = "Once upon a time"
A, B = 4 + ord("a"), 4 + ord("b")


def test_options_of_the_client(url: str) -> None:
    with FastServeClient(url) as client:

        def ask(prompt: Any = PROMPT, **options: Any) -> Any:
            options = {"max_tokens": 6, "ignore_eos": True, "seed": 1} | options
            return client.generate(prompt, **options)

        assert set(ask(allowed_token_ids=[A, B]).text) <= set("ab")
        in_turn = ask(allowed_token_ids=[A, B], bad_words=["aa", "bb"]).text
        assert in_turn in ("ababab", "bababa")
        likeliest = ask(temperature=0).token_ids
        assert ask(temperature=2.0, min_p=1.0).token_ids == likeliest
        spelled: dict[str, Any] = {"logit_bias": {0: 100}, "max_tokens": 2}
        assert ask(**spelled).text == ""
        assert ask(skip_special_tokens=False, **spelled).text == "<s><s>"
        logprobs = ask(skip_special_tokens=False, logprobs=0, **spelled).logprobs
        assert [one.token for one in logprobs] == ["<s>", "<s>"]
        short = ask("a" * 10_000, truncate_prompt_tokens=5, temperature=0)
        assert short.num_input_tokens == 5
        assert short.token_ids == ask([A] * 5, temperature=0).token_ids
        whole = ask([A] * 10_000, truncate_prompt_tokens=-1)
        assert whole.num_input_tokens + 6 == 3840
        with pytest.raises(InvalidRequest, match=r"^allowed_token_ids, bad_words: got '\d tokens'"):
            ask(allowed_token_ids=[A, B], bad_words=["aa", "ba", "bb", "ab"])


def test_a_body_of_http_has_lists_as_json_texts(endpoints: Endpoints) -> None:
    body = {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "max_tokens": 3,
        "min_p": 0.5,
        "allowed_token_ids": json.dumps([A, B]),
        "bad_words": "b",
        "truncate_prompt_tokens": 2,
        "skip_special_tokens": False,
    }
    assert post(endpoints.http_url, GENERATE, body).json()["text_output"] == "aaa"
