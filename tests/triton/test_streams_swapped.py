"""Streams that need more KV than the device holds, through the real server."""

from __future__ import annotations

import random

from fastserve_backend.serving.launch import TritonServer
from running_server import rank_stopped
from serving_client import (
    GrpcStream,
    generate,
    metric,
    unfinished_jobs,
    used_blocks,
    wait_until_idle,
)
from waiting import wait_for

NUM_STREAMS, ANSWER_TOKENS = 10, 240
GREEDY = {
    "stream": True,
    "max_tokens": ANSWER_TOKENS,
    "temperature": 0.0,
    "ignore_eos": True,
}


def used_host_blocks(metrics_url: str) -> float:
    return metric(metrics_url, "fastserve_kv_blocks", tier="host", state="used")


def test_streams_are_unbroken_while_their_kv_goes_to_the_host_and_back(
    server: TritonServer,
) -> None:
    endpoints, url = server.endpoints, server.endpoints.metrics_url
    rng = random.Random(4)
    # Each stream needs 47 blocks in the end; the device has 240.
    prompts = [[rng.randrange(3, 1024) for _ in range(500)] for _ in range(NUM_STREAMS)]
    alone = {n: generate(endpoints.grpc_url, input_ids=prompts[n], **GREEDY) for n in (0, 9)}
    wait_until_idle(endpoints)
    out_before = metric(url, "fastserve_swap_bytes_total", direction="out")
    with rank_stopped(server.runtime):  # until all have arrived
        streams = [
            GrpcStream(endpoints.grpc_url, input_ids=ids, return_perf_metrics=True, **GREEDY)
            for ids in prompts
        ]
        wait_for(lambda: unfinished_jobs(url) == len(streams))
    answers = [stream.finish() for stream in streams]
    assert [len(answer.token_ids) for answer in answers] == [ANSWER_TOKENS] * NUM_STREAMS
    for number, answer in alone.items():
        assert answers[number].token_ids == answer.token_ids
    assert sum(answer.outputs["num_swaps"] for answer in answers) > 0
    wait_for(lambda: used_blocks(url) == 0 and used_host_blocks(url) == 0)
    wait_for(lambda: metric(url, "fastserve_swap_bytes_total", direction="out") > out_before)
    assert metric(url, "fastserve_swap_bytes_total", direction="in") > 0
    assert metric(url, "fastserve_jobs", state="swapped") == 0
    assert metric(url, "fastserve_swap_bytes_avoided_total") >= 0
    assert metric(url, "fastserve_swap_stall_seconds_total") >= 0
