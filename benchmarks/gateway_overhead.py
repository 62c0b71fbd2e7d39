"""What the OpenAI-compatible gateway costs: tokens/s over plain gRPC and through gateways.

    python -m benchmarks.gateway_overhead

A real tritonserver and two real ``fastserve gateway`` on this machine, OPT-125M with dummy weights
by default. One gateway reaches the server over gRPC, the other one over HTTP. The same streams run
over each side in turn. The first round of all warms up and does not count. Server, gateways and
clients share the machine's cores. It also prints the CPU time of each gateway per token, which
unlike the ratio hardly depends on the model and on other load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import aiohttp
import psutil
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.endpoints import Endpoints
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import AsyncFastServeClient
from fastserve_client.protocol import MODEL_NAME

PROMPT_TOKENS = 32
GRPC, GATEWAY_OVER_GRPC, GATEWAY_OVER_HTTP = "gRPC", "gateway, over gRPC", "gateway, over HTTP"

Stream = Callable[[int], Awaitable[None]]


def prompt(number: int) -> list[int]:
    return [4 + number] * PROMPT_TOKENS


async def over_grpc(client: AsyncFastServeClient, length: int, number: int) -> None:
    tokens = 0
    async for chunk in client.stream(
        prompt(number), max_tokens=length, temperature=0, ignore_eos=True
    ):
        tokens += len(chunk.token_ids)
    assert tokens == length


async def over_gateway(session: aiohttp.ClientSession, length: int, number: int) -> None:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt(number),
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, int] | None = None  # the last chunk alone has it
    async with session.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:])["usage"]
    assert usage is not None
    assert usage["completion_tokens"] == length


async def tokens_per_s(stream: Stream, num_streams: int, length: int) -> float:
    started = time.perf_counter()
    await asyncio.gather(*(stream(number) for number in range(num_streams)))
    return num_streams * length / (time.perf_counter() - started)


async def measure(
    sides: dict[str, Stream], gateways: dict[str, int], num_streams: int, length: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Tokens per second of each round, by side, and CPU seconds of the gateways.

    Args:
        gateways: process ids of those sides that are gateways.
    """
    rates: dict[str, list[float]] = {name: [] for name in sides}
    used_s = dict.fromkeys(gateways, 0.0)
    for turn in range(rounds + 1):
        # Which side goes first changes, so that a drift of the machine favours none.
        for name in sorted(sides, reverse=bool(turn % 2)):
            before_s = cpu_s(gateways[name]) if name in gateways else 0.0
            rate = await tokens_per_s(sides[name], num_streams, length)
            if turn:
                rates[name].append(rate)
                if name in gateways:
                    used_s[name] += cpu_s(gateways[name]) - before_s
    return rates, used_s


async def compare(
    endpoints: Endpoints, num_streams: int, length: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    started = {
        GATEWAY_OVER_GRPC: start_gateway(endpoints.grpc_url),
        GATEWAY_OVER_HTTP: start_gateway(endpoints.http_url),
    }
    try:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(AsyncFastServeClient(endpoints.grpc_url))
            sides: dict[str, Stream] = {GRPC: partial(over_grpc, client, length)}
            for name, (_, url) in started.items():
                connector = aiohttp.TCPConnector(limit=0)
                session = aiohttp.ClientSession(url, connector=connector)
                await stack.enter_async_context(session)
                sides[name] = partial(over_gateway, session, length)
            gateways = {name: process.pid for name, (process, _) in started.items()}
            return await measure(sides, gateways, num_streams, length, rounds)
    finally:
        for process, _ in started.values():
            process.terminate()
            process.wait()


def start_gateway(*server_urls: str) -> tuple[subprocess.Popen[str], str]:
    servers = [flag for url in server_urls for flag in ("--url", url)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fastserve_backend", "gateway", "--port", "0", *servers],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found = re.search(r"http://[\d.:]+", process.stderr.readline())
    assert found is not None, "the gateway did not start"
    return process, found.group()


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-125m", help="built-in name; weights are random")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=5, help="of each side")
    arguments = parser.parse_args()
    config = EngineConfig().with_keys(
        model=arguments.model,
        load_format="dummy",
        dtype="float32",
        device_blocks=512,
        max_num_seqs=arguments.streams,
        prefix_caching=False,
    )
    with (
        tempfile.TemporaryDirectory() as logs,
        TritonServer(
            config, http_port=0, grpc_port=0, metrics_port=0, log_path=Path(logs) / "server.log"
        ) as server,
    ):
        rates, used_s = asyncio.run(
            compare(server.endpoints, arguments.streams, arguments.length, arguments.rounds)
        )
    tokens = arguments.streams * arguments.length * arguments.rounds
    for name, values in rates.items():
        ratios = [rate / grpc for grpc, rate in zip(rates[GRPC], values, strict=True)]
        print(
            f"{name:18} median {statistics.median(values):7.1f} tokens/s "
            f"({min(values):.1f} to {max(values):.1f}), times plain gRPC's: "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    for name, seconds in used_s.items():
        print(f"{name}: {seconds / tokens * 1e6:.0f} µs of CPU a token")


if __name__ == "__main__":
    main()
