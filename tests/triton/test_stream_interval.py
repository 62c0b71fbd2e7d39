"""Streams whose responses hold several tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_client import Chunk, FastServeClient, TokenStream
from fastserve_client.results import Completion
from running_server import job_held, running_server
from serving_client import metric, settle
from tiny_model import engine_options
from waiting import wait_for

INTERVAL = 4


@pytest.fixture(scope="module")
def grouping(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    config = EngineConfig().with_keys(**engine_options(tiny_model), stream_interval=INTERVAL)
    log_path = tmp_path_factory.mktemp("grouping") / "server.log"
    with running_server(config, log_path) as triton:
        yield triton.endpoints


@pytest.mark.parametrize("scheme", ["grpc", "http"])
def test_the_first_token_comes_alone_and_the_others_in_groups(
    grouping: Endpoints, endpoints: Endpoints, scheme: str
) -> None:
    def chunks(server: Endpoints) -> list[Chunk]:
        url = server.http_url if scheme == "http" else f"grpc://{server.grpc_url}"
        options: Any = {"max_tokens": 19, "temperature": 0.0, "ignore_eos": True}
        with FastServeClient(url) as client:
            return list(client.stream("Hello", **options))

    expected = Completion.from_chunks(chunks(endpoints))

    def are_grouped() -> bool:
        grouped = chunks(grouping)
        assert Completion.from_chunks(grouped) == expected
        return [len(chunk.token_ids) for chunk in grouped] == [1, 4, 4, 4, 4, 2]

    # A busy server sends more at once, one that stands still what it has.
    wait_for(are_grouped)


def test_no_token_is_kept_for_long(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens that were made come without later ones, for which they could wait."""
    config = EngineConfig().with_keys(**engine_options(tiny_model), stream_interval=1_000_000)
    log_path = tmp_path_factory.mktemp("keeping") / "server.log"
    with (
        running_server(config, log_path) as triton,
        FastServeClient(f"grpc://{triton.endpoints.grpc_url}") as client,
    ):

        def num_generated() -> int:
            return int(metric(triton.endpoints.metrics_url, "fastserve_generation_tokens_total"))

        def start() -> tuple[TokenStream, int, int]:
            settle(triton.endpoints)
            before = num_generated()
            chunks = client.stream("Hello", max_tokens=1900, ignore_eos=True)
            num_tokens = len(next(chunks).token_ids)
            wait_for(lambda: num_generated() > before + num_tokens)
            return chunks, num_tokens, before

        with job_held(triton, start) as (chunks, num_tokens, before):
            expected = num_generated() - before
            assert num_tokens < expected < 1900
            while num_tokens < expected:
                num_tokens += len(next(chunks).token_ids)
            assert num_tokens == expected
        assert num_tokens + sum(len(chunk.token_ids) for chunk in chunks) == 1900
