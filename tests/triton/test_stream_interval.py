"""Streams whose responses hold several tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import FastServeClient
from fastserve_client.results import Completion
from running_server import running_server
from tiny_model import engine_options

INTERVAL = 4


@pytest.fixture(scope="module")
def grouping(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    config = EngineConfig().with_keys(**engine_options(tiny_model), stream_interval=INTERVAL)
    log_path = tmp_path_factory.mktemp("grouping") / "server.log"
    with running_server(config, log_path) as triton:
        yield triton.endpoints


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 19])
@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_first_token_comes_alone_and_the_others_in_groups(
    grouping: Endpoints, endpoints: Endpoints, scheme: str, num_tokens: int
) -> None:
    def chunks(server: Endpoints) -> list[Completion]:
        url = server.http_url if scheme == "http" else f"grpc://{server.grpc_url}"
        options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        with FastServeClient(url) as client:
            return list(client.stream("Hello", **options))

    grouped = chunks(grouping)
    assert Completion.from_chunks(grouped) == Completion.from_chunks(chunks(endpoints))
    sizes = [len(chunk.token_ids) for chunk in grouped]
    assert sum(sizes) == num_tokens
    # More where the server was busy when they were due, never fewer but at the end.
    assert all(size >= INTERVAL for size in sizes[1:-1])
    assert grouped[-1].finish_reason == "length"
