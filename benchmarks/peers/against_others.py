"""This engine, llama.cpp and OpenVINO GenAI in turn, with one GGUF file, on the same cores.

    benchmarks/peers/llama_cpp.sh setup                     # once
    benchmarks/peers/openvino.sh setup                      # once
    python -m benchmarks.peers.against_others               # all parts
    python -m benchmarks.peers.against_others decode        # only one of decode, prefill, load
    python -m benchmarks.peers.against_others --quantization as_stored int8

Each engine is a process of its own, which all parts keep. One computes at a time: each gets the
same prompts of random tokens, new ones in each repeat, and answers of the same lengths. "decode" is
the speed while all jobs of a batch decode. "prefill" is the time to the first token of one prompt.
"load" is the load test of `fastserve bench` with ShareGPT-like lengths at rising rates; there ours
is measured through Triton too. Tables are Markdown: medians with the least and the most, and how
many times as fast ours is. An engine that is not set up is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pydoc_data.topics
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from fastserve_backend.checkpoints.embedded import embedded_file
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import FastServeError
from fastserve_backend.serving.launch import TritonServer
from fastserve_backend.system.cores import num_cores
from fastserve_bench.connection import Connection, Request
from fastserve_bench.requests import exact_requests
from fastserve_bench.results_file import cpu_name
from fastserve_bench.session import Load, Plan, Run, Session
from fastserve_bench.triton_connection import TritonConnection
from fastserve_bench.workload import LengthLimits, TraceJob, Workload
from fastserve_client.errors import ClientError
from tokenizers import Tokenizer

from benchmarks.peers.compare import ROOT, SWEEP, ClosedLoop, say
from benchmarks.peers.comparison_tables import Figure, markdown, pick, spread, times_as_fast
from benchmarks.peers.fairness import CHECKED_TOKENS, fairness_table, idle_cpu
from benchmarks.peers.fastserve_worker import engine_keys
from benchmarks.peers.worker import Limits
from benchmarks.peers.worker_process import WorkerProcess

PEERS = {"llama.cpp": "llama_cpp", "OpenVINO GenAI": "openvino"}
"""Label -> name of the peer's script, and of its worker before "_worker"."""

MAX_NUM_SEQS = 64
MAX_NUM_BATCHED_TOKENS = 2048
MAX_MODEL_LEN = 2112
KV_TOKENS = 2**16
"""More than all jobs of a load have at a time."""

DECODES = tuple(ClosedLoop(batch, batch, 32, 96) for batch in (1, 4, 16, 64))
PREFILLS = tuple(ClosedLoop(1, 1, tokens, 1) for tokens in (128, 512, 2048))
PARTS = ("decode", "prefill", "load")
_WARM_UP = ClosedLoop(1, 1, 16, 8)
_CHECKED_CHARACTERS, _CHECKED_PROMPTS, _CHECKED_LENGTH = 50_000, 16, 64
_PAUSE_S = 1.0
_TIMEOUT_S = 600.0

FIGURES: tuple[Figure, ...] = (
    ("mean, ms a token", "normalized_latency_s", "mean", 1e3),
    ("P95", "normalized_latency_s", "p95", 1e3),
    ("first token: mean, ms", "ttft_s", "mean", 1e3),
    ("P95", "ttft_s", "p95", 1e3),
)

Speeds = Mapping[str, Mapping[str, Sequence[float]]]
"""Name of a measurement -> label -> tokens/s of each repeat."""


@dataclass(frozen=True, slots=True)
class Sides:
    """The engines that are up, by label."""

    ours: Mapping[str, WorkerProcess]
    peers: Mapping[str, WorkerProcess]
    servers: Mapping[str, TritonServer]
    """Ours again, through Triton."""

    @property
    def engines(self) -> dict[str, WorkerProcess]:
        return {**self.ours, **self.peers}

    @property
    def urls(self) -> dict[str, str]:
        """Of the servers, each by gRPC and by HTTP."""
        found = {}
        for label, server in self.servers.items():
            found[f"{label} gRPC"] = f"grpc://{server.endpoints.grpc_url}"
            found[f"{label} HTTP"] = server.endpoints.http_url
        return found


async def start_sides(arguments: argparse.Namespace, stack: AsyncExitStack) -> Sides:
    """Starts all engines. They end with the stack."""
    limits = Limits(
        str(arguments.model),
        num_cores(),
        MAX_NUM_SEQS,
        MAX_NUM_BATCHED_TOKENS,
        MAX_MODEL_LEN,
        KV_TOKENS,
    )

    async def start(label: str, python: str, worker: str, *more: str) -> WorkerProcess:
        say(f"starting {label}")
        command = [python, "-m", f"benchmarks.peers.{worker}", json.dumps(asdict(limits)), *more]
        log_path = arguments.output / f"{label.replace(' ', '-')}.log"
        process = await WorkerProcess.start(command, log_path)
        stack.push_async_callback(process.close)
        return process

    ours, servers = {}, {}
    for quantization in arguments.quantization:
        keys = {"quantization": quantization}
        label = f"FastServe {quantization}"
        ours[label] = await start(label, sys.executable, "fastserve_worker", json.dumps(keys))
        if "load" in arguments.parts:
            label += ", Triton"
            say(f"starting {label}")
            servers[label] = stack.enter_context(
                TritonServer(
                    EngineConfig().with_keys(**engine_keys(limits), **keys),
                    http_port=0,
                    grpc_port=0,
                    metrics_port=0,
                    log_path=arguments.output / f"{label.replace(', ', '-')}.log",
                )
            )
    peers = {}
    for label, name in PEERS.items():
        python = interpreter_of(name)
        if python is not None:
            peers[label] = await start(label, python, f"{name}_worker")
    return Sides(ours, peers, servers)


def interpreter_of(peer: str) -> str | None:
    """Python of the environment into which a peer's script has installed it. If it has not, says
    how to do so and returns None."""
    script = [f"{ROOT}/benchmarks/peers/{peer}.sh", "python"]
    found = subprocess.run(script, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        say(f"left out: {found.stderr.strip()}")
        return None
    return found.stdout.strip()


def prompts_of_text(directory: Path) -> list[list[int]]:
    """Short passages of pydoc's topics. After random tokens many next tokens are about as likely,
    so rounding decides which comes.

    Args:
        directory: has the tokenizer.
    """
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "\n".join(pydoc_data.topics.topics.values())
    tokens = tokenizer.encode(text[:_CHECKED_CHARACTERS]).ids
    stride = len(tokens) // _CHECKED_PROMPTS
    return [tokens[number * stride :][:_CHECKED_LENGTH] for number in range(_CHECKED_PROMPTS)]


async def checks(sides: Sides, prompts: Sequence[list[int]]) -> str:
    """Measures what makes the race fair; returns Markdown.

    Raises:
        RuntimeError: an idle engine takes processor time.
    """
    answers = {
        label: [
            (await engine.answer(Request(prompt, CHECKED_TOKENS, exact=True))).token_ids
            for prompt in prompts
        ]
        for label, engine in sides.engines.items()
    }
    pids = {label: engine.pid for label, engine in sides.engines.items()}
    idle = idle_cpu(pids | {label: server.pid for label, server in sides.servers.items()})
    return fairness_table(answers, idle)


async def measure_speeds(
    engines: Mapping[str, WorkerProcess],
    loops: Sequence[ClosedLoop],
    repeats: int,
    vocab_size: int,
) -> Speeds:
    speeds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for repeat in range(repeats):
        for loop in loops:
            for label, engine in engines.items():
                await asyncio.sleep(_PAUSE_S)
                await answer_all(engine, _WARM_UP, vocab_size, (repeat, 0))
                seed = (repeat, loop.concurrency, loop.prompt_tokens)
                speed = await answer_all(engine, loop, vocab_size, seed)
                say(f"{loop}, {label}: {speed:.0f} tokens/s")
                speeds[str(loop)][label].append(speed)
    return speeds


async def answer_all(
    engine: WorkerProcess, loop: ClosedLoop, vocab_size: int, seed: Sequence[int]
) -> float:
    """Tokens/s of a batch whose jobs all start at once: of its decoding, or of its prefill if
    answers are one token.

    Args:
        seed: of the prompts.
    """
    jobs = [TraceJob(0.0, loop.prompt_tokens, loop.output_tokens)] * loop.concurrency
    requests = exact_requests(jobs, vocab_size, seed)
    started_s = time.monotonic()
    answers = await asyncio.gather(*(engine.answer(request) for request in requests))
    times_s = [answer.times_s for answer in answers]
    if loop.output_tokens == 1:
        return loop.concurrency * loop.prompt_tokens / (max(times_s)[0] - started_s)
    return decoding_speed(times_s)


def decoding_speed(times_s: Sequence[Sequence[float]]) -> float:
    """Tokens/s while all jobs decode: from the last job's first token to the first job's last one.

    Args:
        times_s: of each job's tokens.
    """
    begin_s, end_s = max(one[0] for one in times_s), min(one[-1] for one in times_s)
    num_tokens = sum(begin_s < time_s <= end_s for one in times_s for time_s in one)
    return num_tokens / (end_s - begin_s)


def speed_table(speeds: Speeds, ours: Sequence[str], peers: Sequence[str]) -> str:
    """Tokens per second, and how many times as fast each of ours is as each peer."""
    pairs = [(one, other) for one in ours for other in peers]
    rows = [
        [
            name,
            *(spread(of[label]) for label in (*ours, *peers)),
            *(times_as_fast(of[one], of[other]) for one, other in pairs),
        ]
        for name, of in speeds.items()
    ]
    header = ["tokens/s", *ours, *peers, *(f"{one} ÷ {other}" for one, other in pairs)]
    return markdown(header, rows)


async def measure_load(
    sides: Sides, arguments: argparse.Namespace, vocab_size: int
) -> Sequence[Run]:
    """Runs the load test on all engines."""
    limits = LengthLimits(
        max_prompt_tokens=int(SWEEP["max-prompt-tokens"]),
        max_output_tokens=int(SWEEP["max-output-tokens"]),
    )
    dataset, scale = str(SWEEP["dataset"]), float(SWEEP["scale"])
    plan = Plan(
        Workload(dataset, arguments.num_jobs, limits=limits, scale=scale),
        [Load(rate) for rate in arguments.rates],
        arguments.load_repeats,
        _TIMEOUT_S,
        warmup=1,
        vocab_size=vocab_size,
        pause_s=_PAUSE_S,
    )
    connections: dict[str, Connection] = dict(sides.ours)
    for label, url in sides.urls.items():
        connections[label] = TritonConnection(url, None)
    connections |= sides.peers
    session = Session(plan, lambda label, load, _: say(f"{load}, {label}"))
    try:
        await session.alternate(connections)
    finally:
        for label in sides.urls:
            await connections[label].close()
    return session.runs


def load_table(runs: Sequence[Run], ours: Sequence[str], peers: Sequence[str]) -> str:
    """Latencies at each rate, and below how many times as fast each of ours is as each peer."""
    found: dict[Load, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run.load][run.label].append(run)
    rows = []
    for load, by_label in found.items():
        figures = {}
        for label in (*ours, *peers):
            failed = sum(len(run.outcome.failures) for run in by_label[label])
            if failed:
                rows.append([f"{load.rate:g}", label, f"{failed} jobs failed", "", "", ""])
                continue
            summaries = [asdict(run.summary) for run in by_label[label] if run.summary]
            figures[label] = [[pick(one, figure) for one in summaries] for figure in FIGURES]
            rows.append([f"{load.rate:g}", label, *map(spread, figures[label])])
        for one in ours:
            for other in peers:
                if one in figures and other in figures:
                    pairs = zip(figures[other], figures[one], strict=True)
                    ratios = [times_as_fast(theirs, own) for theirs, own in pairs]
                    rows.append([f"{load.rate:g}", f"{one} ÷ {other}", *ratios])
    return markdown(["jobs/s", "", *(heading for heading, *_ in FIGURES)], rows)


async def race(arguments: argparse.Namespace) -> str:
    """Makes all measurements; returns Markdown."""
    model = load_model_config(str(arguments.model), load_format="auto")
    assert model.directory is not None
    async with AsyncExitStack() as stack:
        sides = await start_sides(arguments, stack)
        ours, peers = list(sides.ours), list(sides.peers)
        names = "; ".join(f"{label}: {one.name}" for label, one in sides.engines.items())
        parts = [
            f"{arguments.model.name} on {num_cores()} cores of {cpu_name()}. {names}.\n",
            await checks(sides, prompts_of_text(Path(model.directory))),
        ]
        loops = [loop for part, loop in arguments.loops if part in arguments.parts]
        if loops:
            speeds = await measure_speeds(sides.engines, loops, arguments.repeats, model.vocab_size)
            (arguments.output / "speeds.json").write_text(json.dumps(speeds, indent=1))
            parts.append(speed_table(speeds, ours, peers))
        if "load" in arguments.parts:
            runs = await measure_load(sides, arguments, model.vocab_size)
            parts.append(load_table(runs, [*ours, *sides.urls], peers))
    return "\n".join(parts)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the embedded model's")
    parser.add_argument(
        "--quantization",
        nargs="+",
        default=["as_stored"],
        help="ours once with each of these values of its configuration",
    )
    parser.add_argument("--repeats", type=int, default=5, help="of decode and prefill")
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4, 8, 16], help="jobs/s")
    parser.add_argument("--num-jobs", type=int, default=100, help="at each rate")
    parser.add_argument("--load-repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="little, once: shows that all works, measures little"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "peers",
        help="directory for JSON, logs and tables",
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"got {unknown.pop()!r}; parts are {', '.join(PARTS)}")
    arguments.parts = arguments.parts or PARTS
    arguments.model = arguments.model or embedded_file()
    arguments.loops = [("decode", loop) for loop in DECODES]
    arguments.loops += [("prefill", loop) for loop in PREFILLS]
    if arguments.quick:
        arguments.loops = [("decode", DECODES[1].quick()), ("prefill", PREFILLS[0])]
        arguments.repeats = arguments.load_repeats = 1
        arguments.rates, arguments.num_jobs = [4.0], 4
    return arguments


def main() -> None:
    arguments = parse()
    # As with Ctrl-C, the engines are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        tables = asyncio.run(race(arguments))
        (arguments.output / "tables.md").write_text(tables, encoding="utf-8")
    except (RuntimeError, FastServeError, ClientError, OSError) as error:
        sys.exit(f"against_others: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(tables)


if __name__ == "__main__":
    main()
