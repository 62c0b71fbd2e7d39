"""How many responses a second reach clients, and how many tokens if responses hold several.

`make endurance` measures it, `make test` only counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest
from fastserve_backend.config import EngineConfig
from fastserve_client import protocol
from fastserve_client.grpc_codec import encode_request
from fastserve_client.request import build_request
from running_server import running_server

STREAMS, CALLS = 64, 2
MANY_TOKENS, FEW_TOKENS = 250, 4
ROUNDS = 7
DEADLINE_S = 120.0


@pytest.mark.parametrize("stream_interval", [1, 8])
def test_responses_of_many_streams(
    tiny_config: EngineConfig,
    tmp_path: Path,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
    stream_interval: int,
) -> None:
    num_tokens = MANY_TOKENS if is_long else FEW_TOKENS
    most_tokens = STREAMS * num_tokens
    config = tiny_config.with_keys(
        max_num_seqs=STREAMS, device_blocks=STREAMS * 20, stream_interval=stream_interval
    )
    options = {"max_tokens": num_tokens, "ignore_eos": True}
    message = encode_request(build_request(protocol.MODEL_NAME, "a", options, stream=True))
    counts: list[int] = []
    rates: list[float] = []
    with (
        running_server(config, tmp_path / "server.log") as server,
        ThreadPoolExecutor(CALLS) as pool,
    ):
        ask = partial(num_responses, server.endpoints.grpc_url, message.SerializeToString())
        for _ in range(ROUNDS if is_long else 1):
            began_s = time.monotonic()
            counts.append(sum(pool.map(ask, [STREAMS // CALLS] * CALLS)))
            rates.append(counts[-1] / (time.monotonic() - began_s))
    assert min(counts) >= STREAMS
    assert max(counts) <= most_tokens
    row(
        {
            "streams": STREAMS,
            "tokens of each": num_tokens,
            "responses/s, median": round(statistics.median(rates)),
            "least": round(min(rates)),
            "most": round(max(rates)),
            "tokens a response": round(most_tokens / statistics.median(counts), 1),
        }
    )


def num_responses(grpc_url: str, message: bytes, num_requests: int) -> int:
    """Responses to ``num_requests`` on one call. They are counted unread, so the client's cost is
    left out."""
    with grpc.insecure_channel(grpc_url, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        return sum(1 for _ in call(iter([message] * num_requests), timeout=DEADLINE_S))
