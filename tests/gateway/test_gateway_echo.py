"""``echo`` and ``prompt_logprobs``: what the gateway says about prompts is what transformers
computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.models.loader import load_model
from fastserve_backend.models.weights import dummy_tensors, numel
from fastserve_client.results import PromptToken
from fastserve_gateway.prompt_answers import prompt_offsets
from openai import OpenAI
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway
from tiny_model import TINY_OPT
from transformers import OPTConfig, OPTForCausalLM

TOLERANCE = 1e-4
"""Of a natural logarithm."""
VOCAB_SIZE: int = TINY_OPT["vocab_size"]  # type: ignore[assignment]
GREEDY: dict[str, Any] = {"model": "fastserve", "temperature": 0}


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> OPTForCausalLM:
    """The shared server's random weights in transformers' model."""
    config = load_model_config(str(tiny_model), load_format="dummy", dtype="float32")
    parameters = load_model(config, torch.device("cpu")).parameters()
    num_elements = sum(numel(one.shape) for one in parameters.values())
    weights = {
        f"model.decoder.{stored.name}": stored.read_dequantized(())
        for stored in dummy_tensors(parameters, num_elements, torch.float32)
    }
    model = OPTForCausalLM(OPTConfig.from_pretrained(tiny_model)).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # it is the embedding
    return model


@torch.inference_mode()
def exact_logprobs(model: OPTForCausalLM, token_ids: list[int]) -> torch.Tensor:
    """For each token but the first, those of the whole vocabulary at its place."""
    logprobs: torch.Tensor = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs


def test_log_probabilities_of_a_batch(client: OpenAI, reference: OPTForCausalLM) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(4, VOCAB_SIZE) for _ in range(n)] for n in (1, 2, 17, 300, 2500)]
    # lm-eval sends such requests.
    answer = client.completions.create(
        prompt=prompts, echo=True, logprobs=1, max_tokens=1, extra_body={"ignore_eos": True},
        **GREEDY,
    )  # fmt: skip
    assert len(answer.choices) == len(prompts)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert logprobs.top_logprobs is not None
        first, *others = logprobs.token_logprobs
        assert first is None
        assert logprobs.top_logprobs[0] is None
        assert len(others) == len(prompt)  # with the new token
        if len(prompt) == 1:
            continue
        exact = exact_logprobs(reference, prompt)
        own = exact.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert others[:-1] == pytest.approx(own.tolist(), abs=TOLERANCE)
        likeliest = [max(top.values()) for top in logprobs.top_logprobs[1:-1]]
        assert likeliest == pytest.approx(exact.max(-1).values.tolist(), abs=TOLERANCE)


@pytest.mark.parametrize("prompt", ["Hé!", [2, *"Hé!".encode(), 700, 0xC3]])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_the_text_begins_with_the_prompt(
    client: OpenAI, prompt: Any, logprobs: int | None, max_tokens: int
) -> None:
    """Also if its last token is a part of a character."""
    echoed = "Hé!"
    if not isinstance(prompt, str):
        prompt = [token + 4 if 2 < token < 260 else token for token in prompt]
        echoed = "Hé! bula\ufffd"
    asked: dict[str, Any] = {
        "prompt": prompt, "n": 2, "seed": 1, "model": "fastserve", "logprobs": logprobs,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    plain = client.completions.create(**asked, max_tokens=max_tokens or 1)
    whole = client.completions.create(**asked, max_tokens=max_tokens, echo=True)
    for choice, without in zip(whole.choices, plain.choices, strict=True):
        answer = without.text if max_tokens else ""
        assert choice.finish_reason == "length"
        assert choice.text == echoed + answer
        if logprobs is None:
            assert choice.logprobs is None
            continue
        found = choice.logprobs
        assert found is not None
        assert found.tokens is not None
        assert found.token_logprobs is not None
        assert found.top_logprobs is not None
        num_prompt = len(found.tokens) - max_tokens
        assert "".join(found.tokens[:3]) == "H\ufffd"  # after a special token
        assert found.token_logprobs[0] is None
        assert all(len(top) in (2, 3) for top in found.top_logprobs[1:])
        expected = [0, 0, 1, 1, 2, *([3, len(echoed) - 1] if isinstance(prompt, list) else [])]
        assert without.logprobs is not None
        if max_tokens:
            expected += [len(echoed) + offset for offset in without.logprobs.text_offset or ()]
            assert found.token_logprobs[num_prompt:] == pytest.approx(
                without.logprobs.token_logprobs or [], abs=TOLERANCE
            )
        assert found.text_offset == expected
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 2 * max_tokens
    texts, joined = ["", ""], [[], []]  # type: list[str], list[list[Any]]
    usage = None
    for event in client.completions.create(
        **asked, max_tokens=max_tokens, echo=True, stream=True,
        stream_options={"include_usage": True},
    ):  # fmt: skip
        usage = event.usage
        for part in event.choices:
            texts[part.index] += part.text
            if part.logprobs is not None:
                assert part.logprobs.tokens is not None
                assert part.logprobs.text_offset is not None
                joined[part.index] += zip(
                    part.logprobs.tokens, part.logprobs.text_offset, strict=True
                )
    assert texts == [choice.text for choice in whole.choices]
    if logprobs is not None:
        assert joined == [
            list(zip(one.logprobs.tokens or (), one.logprobs.text_offset or (), strict=True))
            for one in whole.choices
            if one.logprobs is not None
        ]
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_a_prompt_that_is_cut(client: OpenAI) -> None:
    """The text is that of the tokens which are used."""
    answer = client.completions.create(
        model="fastserve", prompt="Hello", echo=True, max_tokens=0, logprobs=0,
        extra_body={"truncate_prompt_tokens": 2},
    )  # fmt: skip
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "lo"
    assert logprobs is not None
    assert (logprobs.tokens, logprobs.text_offset) == (["l", "o"], [0, 1])


def test_prompt_logprobs_in_the_shape_of_vllm(
    gateway: RunningGateway, reference: OPTForCausalLM
) -> None:
    prompt = [9, 400, 31]
    body = {
        "model": "fastserve", "prompt": [prompt, prompt[:1]], "max_tokens": 1, "prompt_logprobs": 2,
        "echo": True, "logprobs": 0,
    }  # fmt: skip
    url = f"{gateway.api_url}/completions"
    response = httpx2.post(url, json=body, timeout=REQUEST_TIMEOUT_S)
    choice, short = response.json()["choices"]
    assert short["prompt_logprobs"] == [None]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, entry, row in zip(
        prompt[1:], others, exact_logprobs(reference, prompt), strict=True
    ):
        top = row.topk(2)
        assert entry.keys() == {str(token_id), *map(str, top.indices.tolist())}
        assert next(iter(entry)) == str(token_id)
        for name, one in entry.items():
            logprob = float(row[int(name)])
            assert one["logprob"] == pytest.approx(logprob, abs=TOLERANCE)
            assert one["rank"] == 1 + int((row > row[int(name)]).sum())
    assert others[1]["31"]["decoded_token"] == chr(31 - 4)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "max_tokens": -1}, "max_tokens"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"echo": True, "max_tokens": 0, "prompt": [5] * 4000}, "prompt"),
    ],
)
def test_what_is_wrong_is_named(
    gateway: RunningGateway, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "fastserve", "prompt": "Hello"} | fields
    response = httpx2.post(f"{gateway.api_url}/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


BEGIN = PromptToken(1, "", special="<s>")


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("Hi", [BEGIN, PromptToken(5, "Hi")], [0, 0]),
        ("<s>Hi", [BEGIN, BEGIN, PromptToken(5, "Hi")], [0, 3, 3]),
        ("Hi <s>o", [PromptToken(5, " Hi"), PromptToken(6, " "), BEGIN, PromptToken(7, "o")],
         [0, 2, 3, 6]),
        ("é!", [PromptToken(8, "\ufffd", b"\xc3"), PromptToken(9, "\ufffd", b"\xa9"),
                PromptToken(10, "!")], [0, 0, 1]),
        ("Hi", [PromptToken(1, "<s>", special="<s>"), PromptToken(5, "Hi")], [0, 0]),
        ("Ｈi", [PromptToken(5, "Hi")], [0]),
    ],
)  # fmt: skip
def test_offsets_in_a_text(text: str, tokens: list[PromptToken], offsets: list[int]) -> None:
    assert prompt_offsets(text.encode(), tokens) == offsets
