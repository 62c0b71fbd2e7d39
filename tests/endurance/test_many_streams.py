"""64 streams through the gateway: each gets all of its tokens faster than people read, and requests
beyond the full queue are refused at once.

`make endurance` gives each a minute's worth of tokens, `make test` a second's.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx2
import pytest
from fastserve_backend.config import EngineConfig
from raw_http import http_post
from running_gateway import RunningGateway, running_gateway
from running_server import running_server

STREAMS, TOKENS_PER_S = 64, 20
MANY_TOKENS, FEW_TOKENS = 60 * TOKENS_PER_S, TOKENS_PER_S
REFUSED_S = 0.1
PROBES_PER_S = 10
BLOCK_TOKENS = 16
DEADLINE_S = 150.0
BODY = {
    "model": "fastserve", "prompt": "Hello", "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.mark.timeout(2 * DEADLINE_S)
async def test_each_of_many_streams_gets_its_tokens(
    tiny_config: EngineConfig,
    tmp_path: Path,
    is_long: bool,
    row: Callable[[Mapping[str, object]], None],
) -> None:
    num_tokens = MANY_TOKENS if is_long else FEW_TOKENS
    config = tiny_config.with_keys(
        max_num_seqs=STREAMS,
        device_blocks=STREAMS * (MANY_TOKENS // BLOCK_TOKENS + 2),
        max_queued_requests=STREAMS,
    )
    with (
        running_server(config, tmp_path / "server.log") as server,
        running_gateway(server.endpoints.grpc_url, tmp_path / "gateway.log") as gateway,
    ):
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [asyncio.create_task(read(gateway, num_tokens, one)) for one in begun]
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(one.wait() for one in begun))
        refused_s = await refusals(gateway, streams)
        rates = await asyncio.wait_for(asyncio.gather(*streams), DEADLINE_S)
    if not is_long:  # short answers may end before one is refused
        return
    assert min(rates) >= TOKENS_PER_S
    assert statistics.median(refused_s) <= REFUSED_S
    row(
        {
            "streams": STREAMS,
            "tokens of each": num_tokens,
            "the slowest, tokens/s": round(min(rates)),
            "refused meanwhile": len(refused_s),
            "after, median, ms": round(1e3 * statistics.median(refused_s)),
            "P90, ms": round(1e3 * sorted(refused_s)[len(refused_s) * 9 // 10]),
            "the slowest, ms": round(1e3 * max(refused_s)),
        }
    )


async def read(gateway: RunningGateway, num_tokens: int, begun: asyncio.Event) -> float:
    """Reads one answer and returns its tokens/s. Sets ``begun`` at the first token."""
    body = json.dumps({**BODY, "max_tokens": num_tokens}).encode()
    url = httpx2.URL(gateway.url)
    began_s = time.monotonic()
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(http_post("/v1/completions", body, "Connection: close\r\n"))
    end = b""
    while part := await reader.read(1 << 16):
        begun.set()
        end = (end + part)[-1000:]
    seconds = time.monotonic() - began_s
    writer.close()
    assert b"data: [DONE]" in end
    assert re.findall(rb'"completion_tokens":(\d+)', end) == [str(num_tokens).encode()]
    return num_tokens / seconds


async def refusals(gateway: RunningGateway, streams: Sequence[asyncio.Task[float]]) -> list[float]:
    """Seconds that each refusal took while all of the streams ran."""
    taken_s: list[float] = []
    async with httpx2.AsyncClient(timeout=DEADLINE_S) as http:

        async def ask() -> int:
            url = f"{gateway.api_url}/completions"
            return (await http.post(url, json={**BODY, "max_tokens": 1})).status_code

        # A request that is accepted came after the first stream had ended.
        while not any(stream.done() for stream in streams):
            began_s = time.monotonic()
            if await ask() == httpx2.codes.TOO_MANY_REQUESTS:
                taken_s.append(time.monotonic() - began_s)
            await asyncio.sleep(1 / PROBES_PER_S)
    return taken_s
