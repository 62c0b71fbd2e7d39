"""What the OpenAI-compatible gateway costs: tokens/s over plain gRPC and through the gateway.

    python -m benchmarks.gateway_overhead

A real tritonserver and a real ``fastserve gateway`` on this machine, OPT-125M with dummy weights by
default. The same streams run over each side in turn. The first round of both warms up and does not
count. Server, gateway and clients share the machine's cores. It also prints the gateway's CPU time
per token, which unlike the ratio hardly depends on the model and on other load.
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
from pathlib import Path

import aiohttp
import psutil
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import AsyncFastServeClient
from fastserve_client.protocol import MODEL_NAME

PROMPT_TOKENS = 32

Stream = Callable[[int], Awaitable[None]]


def prompt(number: int) -> list[int]:
    return [4 + number] * PROMPT_TOKENS


async def over_grpc(client: AsyncFastServeClient, number: int, length: int) -> None:
    tokens = 0
    async for chunk in client.stream(
        prompt(number), max_tokens=length, temperature=0, ignore_eos=True
    ):
        tokens += len(chunk.token_ids)
    assert tokens == length


async def over_gateway(session: aiohttp.ClientSession, number: int, length: int) -> None:
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
    grpc_url: str, gateway_url: str, num_streams: int, length: int, rounds: int
) -> dict[str, list[float]]:
    """Tokens per second of each round, by side."""
    rates: dict[str, list[float]] = {"gRPC": [], "gateway": []}
    async with (
        AsyncFastServeClient(grpc_url) as client,
        aiohttp.ClientSession(gateway_url, connector=aiohttp.TCPConnector(limit=0)) as session,
    ):
        sides: dict[str, Stream] = {
            "gRPC": lambda number: over_grpc(client, number, length),
            "gateway": lambda number: over_gateway(session, number, length),
        }
        for turn in range(rounds + 1):
            # Which side goes first changes, so that a drift of the machine favours none.
            for name in sorted(sides, reverse=bool(turn % 2)):
                rate = await tokens_per_s(sides[name], num_streams, length)
                if turn:
                    rates[name].append(rate)
    return rates


def start_gateway(*grpc_urls: str) -> tuple[subprocess.Popen[str], str]:
    servers = [flag for url in grpc_urls for flag in ("--url", url)]
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
        process, gateway_url = start_gateway(server.endpoints.grpc_url)
        started_s = cpu_s(process.pid)
        try:
            rates = asyncio.run(
                measure(
                    server.endpoints.grpc_url,
                    gateway_url,
                    arguments.streams,
                    arguments.length,
                    arguments.rounds,
                )
            )
            used_s = cpu_s(process.pid) - started_s
        finally:
            process.terminate()
            process.wait()
    for name, values in rates.items():
        print(
            f"{name:8} median {statistics.median(values):7.1f} tokens/s "
            f"({min(values):.1f} to {max(values):.1f})"
        )
    tokens = arguments.streams * arguments.length * (arguments.rounds + 1)
    print(f"gateway: {used_s / tokens * 1e6:.0f} µs of CPU a token")
    ratios = [gateway / grpc for grpc, gateway in zip(rates["gRPC"], rates["gateway"], strict=True)]
    print(
        f"gateway / gRPC, median of {len(ratios)} rounds: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
