"""Tenants with keys learn nothing of each other, and operators see all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client.engine_state import EngineState, ListedJob
from fastserve_client.errors import InvalidRequest
from fastserve_client.key_file import NamedKey
from fastserve_gateway.app import create_app
from fastserve_gateway.auth import ApiKeys, Caller
from fastserve_gateway.schemas import RequestBody
from fastserve_gateway.service import service_options
from fastserve_gateway.tenant_view import TenantView
from lone_gateway import settings
from running_gateway import REQUEST_TIMEOUT_S, RunningGateway, running_gateway
from serving_client import server_sent_events
from starlette.datastructures import Headers
from starlette.testclient import TestClient
from waiting import wait_for

CHAT, OPS, OPERATOR = "sk-chat", "sk-ops", "sk-operator"
NAMES = ("chat", "ops")
FORCED = {"ignore_eos": True}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"chat:{CHAT}\nops:{OPS}\n", encoding="utf-8")
    (folder / "operator_keys").write_text(f"prometheus:{OPERATOR}\n", encoding="utf-8")
    return [
        *("--api-keys-file", str(folder / "keys")),
        *("--operator-keys-file", str(folder / "operator_keys")),
    ]


@pytest.fixture(scope="module")
def apart(
    endpoints: Endpoints, flags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningGateway]:
    log_path = tmp_path_factory.mktemp("apart") / "gateway.log"
    with running_gateway(endpoints.grpc_url, log_path, *flags) as running:
        yield running


def cached_tokens(gateway: RunningGateway, key: str, prompt: range, **fields: Any) -> int | None:
    """How much of the prompt's KV was there, by the usage of the answer."""
    with gateway.client(key) as client:
        answer = client.completions.create(
            model="fastserve", prompt=list(prompt), max_tokens=1, extra_body=FORCED | fields
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens


# --- KV -----------------------------------------------------------------------------------------


def test_a_tenant_does_not_find_what_another_has_sent(apart: RunningGateway) -> None:
    prompt = range(300, 370)
    assert cached_tokens(apart, CHAT, prompt) == 0
    # A request that comes at once may find that the job before it still has its blocks.
    wait_for(lambda: cached_tokens(apart, CHAT, prompt) == 64)
    for salt in ({}, {"cache_salt": "chat/"}, {"cache_salt": "/"}):
        assert cached_tokens(apart, OPS, prompt, **salt) == 0
    assert cached_tokens(apart, CHAT, prompt, cache_salt="mine") == 0
    wait_for(lambda: cached_tokens(apart, CHAT, prompt, cache_salt="mine") == 64)


def test_tenants_share_kv_where_the_operator_wants_it(
    endpoints: Endpoints, flags: list[str], tmp_path: Path
) -> None:
    prompt = range(400, 470)
    log_path = tmp_path / "gateway.log"
    with running_gateway(endpoints.grpc_url, log_path, *flags, "--share-kv") as sharing:
        assert cached_tokens(sharing, CHAT, prompt) == 0
        wait_for(lambda: cached_tokens(sharing, OPS, prompt) == 64)
        assert cached_tokens(sharing, OPS, prompt, cache_salt="mine") == 0


@pytest.mark.parametrize("share_kv", [False, True])
@pytest.mark.parametrize("tenant", [None, "", "mallory"])
@pytest.mark.parametrize("salt", [None, "alice", "alice/", "/alice/", "/"])
def test_no_salt_of_a_request_makes_it_another_tenants(
    share_kv: bool, tenant: str | None, salt: str | None
) -> None:
    def given(tenant: str | None, salt: str | None, share_kv: bool = False) -> str | None:
        body = RequestBody(model="fastserve", cache_salt=salt)
        caller = Caller(tenant, None, sees_all=False)
        return service_options(body, Headers(), caller, share_kv=share_kv)["cache_salt"]

    alices = {given("alice", own) for own in (None, "alice", "alice/", "/alice/", "/")}
    assert len(alices) == 5
    assert given(tenant, salt, share_kv) not in alices
    if salt is None and not (tenant and not share_kv):
        assert given(tenant, salt, share_kv) is None


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
def test_every_api_knows_the_salt(alone: TestClient, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "fastserve", "cache_salt": "", **fields}
    answer = alone.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("cache_salt: ")


# --- Live view ----------------------------------------------------------------------------------


@contextmanager
def jobs_of_both(gateway: RunningGateway) -> Iterator[None]:
    """Both tenants have jobs again and again."""
    is_over = threading.Event()

    def send(key: str) -> None:
        with gateway.client(key) as client, suppress(openai.APIError):
            while not is_over.is_set():
                client.completions.create(
                    model="fastserve", prompt="Hello", max_tokens=1000, extra_body=FORCED
                )

    threads = [threading.Thread(target=send, args=(key,)) for key in (CHAT, OPS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@contextmanager
def pictures(gateway: RunningGateway, key: str) -> Iterator[Iterator[dict[str, Any]]]:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{gateway.url}/live/events"
    with httpx2.stream("GET", url, headers=headers, timeout=REQUEST_TIMEOUT_S) as response:
        assert response.status_code == 200
        yield server_sent_events(response.iter_lines())


def test_a_tenant_sees_its_own_jobs_and_an_operator_all(apart: RunningGateway) -> None:
    with ExitStack() as stack:
        seen = stack.enter_context(pictures(apart, OPERATOR))
        own = stack.enter_context(pictures(apart, OPS))
        stack.enter_context(jobs_of_both(apart))
        names = {"chat", "ops"}
        picture = next(one for one in seen if {job["tenant"] for job in one["jobs"]} >= names)
        assert picture["totals"]["iterations"] > 0
        for picture in own:
            assert {job["tenant"] for job in picture["jobs"]} <= {"ops"}
            assert picture["running"] + picture["waiting"] == len(picture["jobs"])
            assert picture["totals"] is None
            if picture["jobs"]:
                break


def state_of(*jobs: ListedJob) -> EngineState:
    text = """{"time_s": 1, "policy": "p", "policy_description": "d", "block_size": 16,
        "levels": [{"quantum_s": 1, "num_jobs": 5}, {"quantum_s": 2, "num_jobs": 6}], "jobs": [],
        "running": 5, "waiting": 6, "swapped": 3, "prefill_tokens_per_s": 99.5,
        "device": {"used_blocks": 70, "num_blocks": 100},
        "host": {"used_blocks": 71, "num_blocks": 200},
        "totals": {"prompt_tokens": 81, "generation_tokens": 82, "iterations": 83,
            "preemptions": 84, "demotions": 85, "promotions": 86, "swap_out_bytes": 87,
            "swap_in_bytes": 88, "worker_restarts": 89},
        "priorities": [{"priority": -7, "num_jobs": 11}], "waiting_prompt_tokens": 4321}"""
    return replace(EngineState.from_json(text), jobs=jobs)


def listed(number: int, tenant: str) -> ListedJob:
    return ListedJob(number, "running", 1, 30, 0, 2, 1, 0.5, 0, 3, tenant)


def test_a_tenants_picture_has_no_number_of_others() -> None:
    view = TenantView("a")
    jobs = [
        listed(90, "a"),
        listed(91, "b"),
        listed(95, "a"),
        replace(listed(93, "a"), state="swapped"),
    ]
    picture = view.part_of(state_of(*jobs))
    assert [(job["number"], job["tenant"]) for job in picture["jobs"]] == [
        (0, "a"), (2, "a"), (1, "a"),
    ]  # fmt: skip
    assert (picture["running"], picture["waiting"], picture["swapped"]) == (2, 1, 1)
    assert [level["num_jobs"] for level in picture["levels"]] == [0, 3]
    assert (picture["device"]["used_blocks"], picture["host"]["used_blocks"]) == (6, 3)
    assert picture["priorities"] == ({"priority": 3, "num_jobs": 3},)
    assert picture["waiting_prompt_tokens"] == 90
    assert (picture["totals"], picture["prefill_tokens_per_s"]) == (None, None)
    later = view.part_of(state_of(listed(95, "a"), listed(99, "a"), listed(98, "b")))
    assert [job["number"] for job in later["jobs"]] == [2, 3]
    assert TenantView("c").part_of(state_of(*jobs))["jobs"] == ()


# --- Metrics, and what an operator may do -------------------------------------------------------


def test_metrics_are_for_operators(apart: RunningGateway) -> None:
    for key in (CHAT, OPS):
        cached_tokens(apart, key, range(3))
        refused = apart.get("/metrics", key=key)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operator_key_required"
        assert "--operator-keys-file" in refused.json()["error"]["message"]
        assert not any(f'"{name}"' in refused.text for name in NAMES)
    assert apart.get("/metrics").status_code == 401
    series = [
        f'fastserve_gateway_tenant_requests_total{{status="200",tenant="{n}"}}' for n in NAMES
    ]
    # A request is counted a moment after its client has the answer.
    wait_for(lambda: all(one in apart.get("/metrics", key=OPERATOR).text for one in series))


@pytest.fixture
def with_operator() -> Iterator[TestClient]:
    keys = ApiKeys([NamedKey("", 1.0, "sk-key", None)], None, [NamedKey("", 1.0, OPERATOR, None)])
    app = create_app(replace(settings(), keys=keys))
    with TestClient(app, base_url="http://llm.example.com") as client:
        yield client


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    ],
)
def test_an_operator_asks_for_nothing(with_operator: TestClient, method: str, path: str) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    body = {"model": "fastserve", "prompt": "Hi"} if method == "POST" else None
    answer = with_operator.request(method, path, headers=headers, json=body)
    assert answer.status_code == 403
    assert "this key is an operator's" in answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["sk-key", OPERATOR])
@pytest.mark.parametrize("path", ["/metrics", "/live/servers", "/v1/models"])
def test_without_names_every_key_may_look(with_operator: TestClient, key: str, path: str) -> None:
    assert with_operator.get(path, headers={"x-api-key": key}).status_code == 200
    assert with_operator.get(path).status_code == 401


def test_a_key_is_a_tenants_or_an_operators() -> None:
    key = NamedKey("a", 1.0, "sk-secret", None)
    with pytest.raises(InvalidRequest, match="operator_keys_file: got a key that api_keys_") as one:
        ApiKeys([key], None, [replace(key, name="")])
    assert "secret" not in str(one.value)
    with pytest.raises(InvalidRequest, match="operator_keys_file: got it without api_keys_file"):
        ApiKeys([], None, [key])
