"""Two servers behind one gateway: its choices against sending to each in turn.

    python -m benchmarks.replicas               # some minutes

Two real tritonservers with the embedded model, each on a core of its own, which gateways and
clients share. Conversations of several turns arrive at random. Those of a group begin with the same
instructions, and each turn's prompt is all that was said before. One side sends them through a
gateway to both servers. The other side sends each request to the next of two gateways with one
server each. The sides take turns, with the same arrivals and lengths but other words, so that
neither finds KV of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client.protocol import MODEL_NAME
from rich.console import Console
from rich.table import Table

from benchmarks.gateway_overhead import start_gateway

GROUPS = 4
INSTRUCTIONS, QUESTION = 200, 30  # words
ANSWERS = (8, 16, 24, 48)  # tokens
THINK_S = 1.0
WORDS = [f"{first}{last}" for first in "bdfklmnprstv" for last in ("a", "e", "o")]
console = Console(width=120)


@dataclass(frozen=True)
class Turn:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@contextmanager
def running_servers(config: EngineConfig, logs: Path) -> Iterator[list[TritonServer]]:
    """Two servers, each on a core of its own."""
    servers = [
        TritonServer(
            config, http_port=0, grpc_port=0, metrics_port=0, log_path=logs / f"server{number}.log"
        )
        for number in range(2)
    ]
    cores = sorted(os.sched_getaffinity(0))

    def start(number: int) -> None:
        os.sched_setaffinity(0, {cores[number % len(cores)]})  # of this thread and its children
        servers[number].start()

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for server in servers:
            stack.callback(server.stop)
        list(pool.map(start, range(2)))
        yield servers


def sentence(dice: random.Random, num_words: int) -> str:
    return " ".join(dice.choices(WORDS, k=num_words)) + "."


async def converse(
    urls: Iterator[str], instructions: str, words: random.Random, answers: Sequence[int]
) -> list[Turn]:
    """One conversation: each turn goes to the next URL."""
    messages = [{"role": "system", "content": instructions}]
    turns = []
    async with aiohttp.ClientSession() as session:
        for max_tokens in answers:
            messages.append({"role": "user", "content": sentence(words, QUESTION)})
            text, turn = await ask(session, next(urls), messages, max_tokens)
            messages.append({"role": "assistant", "content": text})
            turns.append(turn)
            await asyncio.sleep(THINK_S)
    return turns


async def ask(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], max_tokens: int
) -> tuple[str, Turn]:
    """The answer's text, and what it took."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent_s, ttft_s, text, usage = time.perf_counter(), 0.0, "", None
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                ttft_s = ttft_s or time.perf_counter() - sent_s
                event = json.loads(line[6:])
                usage = event["usage"]
                for choice in event["choices"]:
                    text += choice["delta"].get("content", "")
    assert usage is not None
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return text, Turn(ttft_s, usage["prompt_tokens"], cached)


async def run_side(urls: Sequence[str], seed: int, name: str, options: Any) -> list[Turn]:
    """All conversations. Only the words depend on the side."""
    dice, words = random.Random(seed), random.Random(f"{seed} {name}")
    instructions = [sentence(words, INSTRUCTIONS) for _ in range(GROUPS)]
    following = cycle(urls)
    running = []
    for _ in range(options.conversations):
        answers = dice.choices(ANSWERS, k=options.turns)
        conversation = converse(following, dice.choice(instructions), words, answers)
        running.append(asyncio.create_task(conversation))
        await asyncio.sleep(dice.expovariate(options.rate))
    return [turn for turns in await asyncio.gather(*running) for turn in turns]


def p(turns: Sequence[Turn], percent: int) -> float:
    """A percentile of the time to the first token, in seconds."""
    return statistics.quantiles((turn.ttft_s for turn in turns), n=100)[percent - 1]


def cached_share(turns: Sequence[Turn]) -> float:
    return sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)


def report(rounds: Sequence[dict[str, list[Turn]]]) -> None:
    table = Table("side", "P50 first token, s", "P95 first token, s", "cached share", "rounds")
    for name in rounds[0]:
        sides = [one[name] for one in rounds]
        values = [
            statistics.median(measure(turns) for turns in sides)
            for measure in (lambda turns: p(turns, 50), lambda turns: p(turns, 95), cached_share)
        ]
        table.add_row(name, *(f"{value:.3f}" for value in values), str(len(rounds)))
    console.print(table)
    for percent in (50, 95):
        ratios = [p(one["gateway"], percent) / p(one["in turn"], percent) for one in rounds]
        console.print(
            f"P{percent}, gateway / in turn: median {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=float, default=0.4, help="conversations a second")
    parser.add_argument("--conversations", type=int, default=24, help="of each round and side")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--rounds", type=int, default=3, help="of each side")
    options = parser.parse_args()
    config = EngineConfig().with_keys(
        model=EMBEDDED_MODEL,
        dtype="float32",
        max_model_len=2048,
        swap_space_gib=0.1,
        device_blocks=512,
    )
    with tempfile.TemporaryDirectory() as logs, running_servers(config, Path(logs)) as servers:
        urls = [f"grpc://{server.endpoints.grpc_url}" for server in servers]
        with ExitStack() as stack:

            def gateway(*urls: str) -> str:
                process, url = start_gateway(*urls)
                stack.callback(process.wait)
                stack.callback(process.terminate)
                return url

            sides = {"in turn": [gateway(url) for url in urls], "gateway": [gateway(*urls)]}
            rounds = []
            for seed in range(options.rounds):
                order = sorted(sides, reverse=bool(seed % 2))
                rounds.append(
                    {
                        name: asyncio.run(run_side(sides[name], seed, name, options))
                        for name in order
                    }
                )
                report(rounds[-1:])
    report(rounds)


if __name__ == "__main__":
    main()
