"""Priorities, objectives and tenants: what the gateway reads, refuses, passes on and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.engine_state import ListedJob
from fastserve_client.errors import error_from_message
from fastserve_client.key_file import read_key_file
from fastserve_gateway.app import create_app
from fastserve_gateway.auth import ApiKeys
from fastserve_gateway.errors import from_client_error
from lone_gateway import settings
from openai import OpenAI
from running_gateway import RunningGateway, running_gateway
from running_server import running_server
from serving_client import unfinished_jobs
from starlette.testclient import TestClient
from waiting import DEADLINE_S, wait_for

KEY_FILE = "chat:sk-chat\nops:2:sk-ops:-5\nslow:1:sk-slow:2\nsk-bare\n:sk-odd:1:2\n"
OPERATOR_KEY = "sk-operator"
# Tokens of a prompt, by which its job is found among others.
OWN_LENGTH = 37
LONG = 3000
PROMPT: dict[str, Any] = {"model": "fastserve", "prompt": "Hello"}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(KEY_FILE, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def guarded(
    endpoints: Endpoints, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    folder = tmp_path_factory.mktemp("guarded")
    operator_file = folder / "operator_keys"
    operator_file.write_text(OPERATOR_KEY, encoding="utf-8")
    url = f"grpc://{endpoints.grpc_url}"
    flags = ["--api-keys-file", str(key_file), "--operator-keys-file", str(operator_file)]
    with running_gateway(url, folder / "gateway.log", *flags) as running:
        yield running


@pytest.fixture
def alone() -> Iterator[TestClient]:
    """Without keys and without a server."""
    with TestClient(create_app(settings()), base_url="http://127.0.0.1:9000") as client:
        yield client


@pytest.fixture
def alone_with_keys(key_file: Path) -> Iterator[TestClient]:
    keys = ApiKeys(read_key_file(key_file))
    with TestClient(
        create_app(replace(settings(), keys=keys)), base_url="http://llm.example.com"
    ) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- what the server gets -----------------------------------------------------------------------


async def running_job(server: TritonServer, client: OpenAI, **fields: Any) -> ListedJob:
    """The server's job of a request with these fields."""
    extra_body = {"ignore_eos": True, **fields.pop("extra_body", {})}
    create = partial(
        client.completions.create, model="fastserve", prompt=[5] * OWN_LENGTH, max_tokens=LONG,
        stream=True, extra_body=extra_body, **fields,
    )  # fmt: skip
    url = f"grpc://{server.endpoints.grpc_url}"
    # Watched from before the job on: pictures wait for a reader that is slower than the job.
    async with (
        asyncio.timeout(DEADLINE_S),
        AsyncFastServeClient(url) as watcher,
        watcher.watch(0.05) as states,
    ):
        await anext(states)
        answer = asyncio.create_task(asyncio.to_thread(create))
        async for state in states:
            found = [job for job in state.jobs if job.prompt_tokens == OWN_LENGTH]
            if found:
                break
    (await answer).close()
    wait_for(lambda: unfinished_jobs(server.endpoints.metrics_url) == 0)
    (job,) = found
    return job


SLO_HEADERS = {"x-slo-ttft-ms": "1500", "x-slo-tpot-ms": "62.5"}
ROUTER_HEADERS = {"x-llm-d-slo-ttft-ms": "1500", "x-llm-d-slo-tpot-ms": "62.5"}


@pytest.mark.parametrize(
    ("fields", "service"),
    [
        ({}, (0, "", None, None)),
        ({"extra_headers": SLO_HEADERS}, (0, "", 1.5, 0.0625)),
        ({"extra_headers": ROUTER_HEADERS}, (0, "", 1.5, 0.0625)),
        ({"extra_headers": SLO_HEADERS | {"x-llm-d-slo-ttft-ms": "9"}}, (0, "", 1.5, 0.0625)),
        ({"extra_body": {"priority": 7, "tenant": "b"}}, (7, "b", None, None)),
        ({"extra_body": {"service_tier": "auto"}}, (0, "", None, None)),
        ({"extra_body": {"service_tier": "flex"}}, (1, "", None, None)),
        ({"extra_body": {"service_tier": "priority", "priority": -1}}, (-1, "", None, None)),
    ],
)
async def test_a_job_has_what_its_request_asks_for(
    server: TritonServer, client: OpenAI, fields: Any, service: tuple[Any, ...]
) -> None:
    job = await running_job(server, client, **fields)
    assert (job.priority, job.tenant, job.ttft_slo_s, job.tpot_slo_s) == service


@pytest.mark.parametrize(
    ("key", "fields", "service"),
    [
        ("sk-chat", {"service_tier": "default"}, (0, "chat")),
        ("sk-ops", {"service_tier": "priority"}, (-1, "ops")),
        ("sk-ops", {}, (0, "ops")),
        ("sk-slow", {}, (2, "slow")),
        ("sk-slow", {"service_tier": "auto"}, (2, "slow")),
        ("sk-slow", {"priority": 3}, (3, "slow")),
        ("sk-bare", {"service_tier": "flex"}, (1, "")),
        ("sk-odd:1:2", {}, (0, "")),
    ],
)
async def test_the_key_says_who_the_tenant_is(
    server: TritonServer, guarded: RunningGateway, key: str, fields: Any, service: tuple[int, str]
) -> None:
    with guarded.client(key) as client:
        job = await running_job(server, client, extra_body=fields)
    assert (job.priority, job.tenant) == service


def test_requests_are_counted_by_tenant(guarded: RunningGateway) -> None:
    def counted() -> dict[str, float]:
        lines = guarded.get("/metrics", key=OPERATOR_KEY).text.splitlines()
        name = "fastserve_gateway_tenant_requests_total"
        pairs = (line.rsplit(" ", 1) for line in lines if line.startswith(name))
        return {labels.removeprefix(name): float(number) for labels, number in pairs}

    before = counted()
    with guarded.client("sk-chat") as client:
        client.completions.create(**PROMPT, max_tokens=1)
        with pytest.raises(openai.PermissionDeniedError):
            client.completions.create(**PROMPT, extra_body={"priority": -1})
    for status in (200, 403):
        labels = f'{{status="{status}",tenant="chat"}}'
        wanted = before.get(labels, 0.0) + 1
        # A request is counted a moment after its client has the answer.
        wait_for(lambda labels=labels, wanted=wanted: counted().get(labels) == wanted)


# --- what the client gets -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "answered"),
    [(None, None), ("auto", "default"), ("default", "default"), ("priority", "priority")],
)
def test_the_tier_is_answered_if_it_was_asked_for(
    client: OpenAI, asked: Any, answered: str | None
) -> None:
    tier = {} if asked is None else {"service_tier": asked}
    whole = client.completions.create(**PROMPT, max_tokens=1, extra_body=tier)
    assert getattr(whole, "service_tier", None) == answered
    events = client.completions.create(
        **PROMPT,
        max_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=tier,
    )
    assert {getattr(one, "service_tier", None) for one in events} == {answered}


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "field", "value", "allowed"),
    [
        ("sk-chat", "priority", -1, 0),
        ("sk-chat", "service_tier", "priority", 0),
        ("sk-bare", "priority", -1, 0),
        ("sk-slow", "service_tier", "default", 2),
        ("sk-ops", "priority", -6, -5),
    ],
)
def test_a_priority_that_the_key_does_not_allow(
    alone_with_keys: TestClient, key: str, field: str, value: Any, allowed: int
) -> None:
    body = {**PROMPT, field: value}
    answer = alone_with_keys.post("/v1/completions", json=body, headers=bearer(key))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        403, "priority_not_allowed", field,
    )  # fmt: skip
    assert f"{field}: got priority" in error["message"]
    assert f"allows {allowed} and more" in error["message"]


@pytest.mark.parametrize(
    ("most_urgent", "key", "priority", "is_allowed"),
    [(-3, "sk-chat", -3, True), (-3, "sk-chat", -4, False), (2, "sk-chat", 1, False)],
)
def test_the_flag_counts_for_keys_without_a_priority_of_their_own(
    key_file: Path, most_urgent: int, key: str, priority: int, is_allowed: bool
) -> None:
    keys = ApiKeys(read_key_file(key_file), most_urgent)
    with TestClient(create_app(replace(settings(), keys=keys)), base_url="http://llm") as client:
        body = {**PROMPT, "priority": priority}
        status = client.post("/v1/completions", json=body, headers=bearer(key)).status_code
    assert status == (503 if is_allowed else 403)  # there is no server


def test_a_client_with_a_key_cannot_name_its_tenant(alone_with_keys: TestClient) -> None:
    body = {**PROMPT, "tenant": "ops"}
    answer = alone_with_keys.post("/v1/completions", json=body, headers=bearer("sk-bare"))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tenant")
    assert "the API key says who the tenant is" in error["message"]


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-llm-d-slo-ttft-ms"])
@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "1e999", "fast", "1, 2", "9" * 500])
def test_an_objective_that_is_no_time(alone: TestClient, name: str, value: str) -> None:
    answer = alone.post("/v1/completions", json=PROMPT, headers={name: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"].startswith(f"{name}: got ")
    assert error["message"].endswith("; must be milliseconds above 0")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": "0"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"service_tier": 1}, "service_tier"),
        ({"service_tier": "default", "priority": 1}, "service_tier"),
        ({"service_tier": "flex", "priority": 0}, "service_tier"),
        ({"tenant": 5}, "tenant"),
        ({"tenant": "a" * 129}, "tenant"),
        ({"session_id": "a" * 129}, "session_id"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
    ],
)
def test_fields_that_are_wrong(alone: TestClient, fields: dict[str, Any], param: str) -> None:
    answer = alone.post("/v1/completions", json=PROMPT | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_session_in_a_header_is_no_longer_than_in_a_body(alone: TestClient) -> None:
    """The gateway would remember it, though the server refuses it."""
    answer = alone.post("/v1/completions", json=PROMPT, headers={"x-session-id": "a" * 129})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "session_id")


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"priority": 2**40}, {}, "priority"),
        ({}, {"x-slo-ttft-ms": "1e10"}, "x-slo-ttft-ms"),
        ({"tenant": "a\nb"}, {}, "tenant"),
        ({}, {"x-session-id": "a" * 129}, "session_id"),
    ],
)
def test_what_the_server_refuses_has_the_name_that_the_client_knows(
    client: OpenAI, fields: dict[str, Any], headers: dict[str, str], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**PROMPT, extra_body=fields, extra_headers=headers)
    assert refused.value.param == param
    assert f" - {param}: got " in str(refused.value)


def test_a_tenant_at_its_limit_is_told_when_to_come_back() -> None:
    message = "the tenant 'b' has used its 100 tokens a minute; try again in 2.2 s"
    refused = from_client_error(error_from_message(message), {})
    assert (refused.status, refused.headers["Retry-After"]) == (429, "3")
    assert refused.body["error"]["code"] == "rate_limit_exceeded"
    assert refused.body["error"]["type"] == "rate_limit_error"


@pytest.fixture(scope="module")
def limited(
    tiny_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    """A gateway whose server knows the tenants and limits them."""
    folder = tmp_path_factory.mktemp("limited")
    file = folder / "keys"
    file.write_text("chat:3:sk-chat\nops:sk-ops\n", encoding="utf-8")
    config = tiny_config.with_keys(tenants_file=str(file), tenant_tokens_per_minute=60)
    with (
        running_server(config, folder / "server.log") as server,
        running_gateway(
            server.endpoints.grpc_url, folder / "gateway.log", "--api-keys-file", str(file)
        ) as running,
    ):
        yield running


def test_one_tenants_limit_is_not_anothers(limited: RunningGateway) -> None:
    with limited.client("sk-chat") as chat, limited.client("sk-ops") as ops:
        chat.completions.create(**PROMPT, max_tokens=100, extra_body={"ignore_eos": True})
        with pytest.raises(openai.RateLimitError) as refused:
            chat.completions.create(**PROMPT, max_tokens=1)
        assert ops.completions.create(**PROMPT, max_tokens=1).choices
    assert refused.value.code == "rate_limit_exceeded"
    assert "tenant 'chat' has used its 60 tokens a minute" in str(refused.value)
    assert 10 < int(refused.value.response.headers["retry-after"]) <= 60


# --- metrics ------------------------------------------------------------------------------------


def test_no_client_can_make_up_labels_without_end(alone: TestClient) -> None:
    for number in range(110):
        body = {**PROMPT, "tenant": f"t{number}"}
        assert alone.post("/v1/completions", json=body, headers={"x-slo-ttft-ms": "0"}).is_error
    lines = [
        line
        for line in alone.get("/metrics").text.splitlines()
        if line.startswith("fastserve_gateway_tenant_requests_total{")
    ]
    assert len(lines) == 101
    assert 'fastserve_gateway_tenant_requests_total{status="400",tenant="other"} 10.0' in lines
