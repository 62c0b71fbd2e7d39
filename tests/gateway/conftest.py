from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from fastserve_gateway.app import create_app
from gateway_thread import gateway_thread
from lone_gateway import settings
from openai import OpenAI
from replicas import Front, Replicas
from running_gateway import RunningGateway
from starlette.testclient import TestClient


@pytest.fixture
def client(gateway: RunningGateway) -> Iterator[OpenAI]:
    with gateway.client() as client:
        yield client


@pytest.fixture
def alone() -> Iterator[TestClient]:
    """A gateway without keys and without a server."""
    with TestClient(create_app(settings()), base_url="http://127.0.0.1:9000") as client:
        yield client


@pytest.fixture
def guarded() -> Iterator[TestClient]:
    """A gateway with a key, at another name than loopback's."""
    with TestClient(create_app(settings("sk-key")), base_url="http://llm.example.com") as client:
        yield client


@pytest.fixture(scope="module")
def front(replicas: Replicas) -> Iterator[Front]:
    """A gateway to the module's replicas."""
    urls = [replicas.url(number) for number in range(len(replicas))]
    with gateway_thread(replace(settings(), urls=urls)) as gateway:
        yield Front(gateway.url, replicas)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers may be held for long, and are not taken for lost. Answers wait for slow starts."""
    monkeypatch.setattr("fastserve_gateway.fleet.watched_server.SILENT_S", 600.0)
    monkeypatch.setattr("fastserve_gateway.fleet.kept_answer.MOVE_DEADLINE_S", 600.0)
