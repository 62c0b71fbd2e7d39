"""Each way to the server has the defaults of the model's generation_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient, InvalidRequest
from openai import OpenAI
from opinionated_model import DEFAULTS, REFUSAL, save_opinionated_model
from running_gateway import RunningGateway, running_gateway
from running_server import running_server
from serving_client import GENERATE, generate, post
from tiny_model import engine_options

PROMPT = "Hello"
SHAPE: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def log_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "server.log"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, log_path: Path) -> Iterator[TritonServer]:
    model = save_opinionated_model(tmp_path_factory.mktemp("model"), DEFAULTS)
    with running_server(EngineConfig().with_keys(**engine_options(model)), log_path) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(
    triton: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("gateway") / "gateway.log"
    with running_gateway(f"grpc://{triton.endpoints.grpc_url}", log_path) as running:
        yield running


def by_tensors(triton: TritonServer, **fields: Any) -> str:
    answer = generate(triton.endpoints.grpc_url, text_input=PROMPT, stream=True, **SHAPE, **fields)
    assert answer.error is None, answer.error
    return answer.text


def by_json(triton: TritonServer, **fields: Any) -> str:
    parameters = json.dumps({**SHAPE, **fields})
    answer = generate(
        triton.endpoints.grpc_url, text_input=PROMPT, stream=True, sampling_parameters=parameters
    )
    assert answer.error is None, answer.error
    return answer.text


def by_http(triton: TritonServer, **fields: Any) -> str:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, **SHAPE, **fields}
    answer = post(triton.endpoints.http_url, GENERATE, body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["text_output"]
    return text


def by_client(triton: TritonServer, **fields: Any) -> str:
    with FastServeClient(triton.endpoints.http_url) as client:
        return client.generate(PROMPT, **SHAPE, **fields).text


@pytest.mark.parametrize("ask", [by_tensors, by_json, by_http, by_client])
def test_at_the_server(triton: TritonServer, ask: Any) -> None:
    greedy = ask(triton, temperature=0.0)
    assert ask(triton) == ask(triton, seed=3) == greedy
    hot = ask(triton, top_k=-1, seed=3)
    assert hot == ask(triton, top_k=-1, temperature=2.5, seed=3)
    assert hot != ask(triton, top_k=-1, temperature=0.3, seed=3)


def test_at_the_gateway(client: OpenAI, triton: TritonServer) -> None:
    def ask(more: dict[str, Any] | None = None, **fields: Any) -> str:
        extra = {"ignore_eos": True, **(more or {})}
        answer = client.completions.create(
            model="fastserve", prompt=PROMPT, max_tokens=24, extra_body=extra, **fields
        )
        return answer.choices[0].text

    assert ask() == ask(seed=3) == ask(temperature=0) == by_json(triton)
    hot = ask({"top_k": -1}, seed=3)
    assert hot == ask({"top_k": -1}, temperature=2.5, seed=3) == by_json(triton, top_k=-1, seed=3)
    assert hot != ask({"top_k": -1}, temperature=0.3, seed=3)


def test_chats_have_them_too(client: OpenAI) -> None:
    def ask(**fields: Any) -> str | None:
        messages: Any = [{"role": "user", "content": PROMPT}]
        answer = client.chat.completions.create(
            model="fastserve", messages=messages, max_tokens=24, **fields
        )
        return answer.choices[0].message.content

    assert ask() == ask(seed=3) == ask(temperature=0)


def test_a_refusal_of_the_chat_template_reaches_clients(
    client: OpenAI, triton: TritonServer
) -> None:
    with pytest.raises(openai.BadRequestError, match=REFUSAL) as caught:
        client.chat.completions.create(model="fastserve", messages=SYSTEM)  # type: ignore[arg-type]
    assert caught.value.param == "messages"
    with (
        FastServeClient(triton.endpoints.http_url) as direct,
        pytest.raises(InvalidRequest, match=REFUSAL),
    ):
        direct.generate(SYSTEM)
    answer = post(triton.endpoints.http_url, GENERATE, {"messages": json.dumps(SYSTEM)})
    assert answer.status_code == 400
    assert REFUSAL in answer.json()["error"]


@pytest.mark.usefixtures("triton")
def test_the_log_has_them_once(log_path: Path) -> None:
    lines = log_path.read_text().splitlines()
    found = [line for line in lines if "defaults from generation_config.json" in line]
    assert len(found) == 1
    assert found[0].endswith("defaults from generation_config.json: temperature 2.5, top_k 1")
