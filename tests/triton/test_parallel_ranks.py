"""Four ranks, two stages of two, behind the real server."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from running_server import running_server
from serving_client import GrpcStream, unfinished_jobs, used_blocks
from tiny_model import engine_options
from waiting import wait_for

GREEDY = {"stream": True, "max_tokens": 20, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def parallel(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    config = EngineConfig().with_keys(
        **engine_options(tiny_model), tensor_parallel_size=2, pipeline_parallel_size=2
    )
    log_path = tmp_path_factory.mktemp("parallel") / "server.log"
    with running_server(config, log_path) as triton:
        yield triton.endpoints


def test_streams_are_those_of_one_rank(parallel: Endpoints, endpoints: Endpoints) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(3, 1024) for _ in range(rng.randint(1, 400))] for _ in range(12)]
    answers = []
    for server in (parallel, endpoints):
        streams = [GrpcStream(server.grpc_url, input_ids=ids, **GREEDY) for ids in prompts]
        answers.append([stream.finish().token_ids for stream in streams])
    assert [len(answer) for answer in answers[0]] == [20] * 12
    assert answers[0] == answers[1]
    url = parallel.metrics_url
    wait_for(lambda: used_blocks(url) == 0 and unfinished_jobs(url) == 0)
