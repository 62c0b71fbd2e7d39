"""Speed of OPT-125M on a CPU: through the engine, through the Triton server, and inside a step.

    python -m benchmarks.cpu_decode            # all parts, several minutes
    python -m benchmarks.cpu_decode serving    # only one of machine, step, beginnings, serving
    python -m benchmarks.cpu_decode serving --model smollm2-135m-instruct

Random weights, bfloat16, greedy, prompts of 64 tokens, 64 tokens generated. Prefill is the time of
32 prompts at once until every job has its first token; decode is the time after that. Figures are
medians of the repeats, with the least and the most in brackets. "machine" measures the best that
this processor can do, and computes the best of each figure from it: a decode step reads all weights
once and multiplies each with every job's vector. "beginnings" has decode steps of jobs that begin
with the same blocks, which are read once or by each job. "serving" also measures the CPU time that
each process takes for a token; through Triton this process is the client, the one for asyncio.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import psutil
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.load_config import builtin_names
from fastserve_backend.config import EngineConfig
from fastserve_backend.rank_protocol.messages import Step, StepResult
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import AsyncFastServeClient
from rich.console import Console
from rich.table import Table

MODEL, VOCAB_SIZE = "opt-125m", 50272
PROMPT_IDS = range(300, 49152)
"""Ordinary tokens of all models."""
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
BATCHES = (1, 16, 32)
PREFILL_BATCH = 32
BEHIND_COMMON, COMMON_TOKENS, OWN_BLOCKS = (24, 8, 4, 2, 1), 1600, 2
"""Batches of jobs that begin with the same tokens, and the blocks of a job's own tokens."""
CPU_TIME_BATCH = 16
GROUP = 4
"""Tokens in a response of the second server."""
ENGINE = "through the engine"
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 32,
    "prefix_caching": False,  # the prompts are the same in each run
}
CONTEXT = PROMPT_TOKENS + OUTPUT_TOKENS // 2  # of the average decode step

console = Console(width=120)


def options(model: str) -> dict[str, Any]:
    """Built-in names have no weights."""
    load_format = "dummy" if model in builtin_names() else "auto"
    return {"load_format": load_format, **OPTIONS}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [rng.choices(PROMPT_IDS, k=PROMPT_TOKENS) for _ in range(count)]


def summary(values: list[float], digits: int = 0) -> str:
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def rates(first_s: list[float], last_s: list[float], start_s: float) -> tuple[float, float]:
    """(prefill tokens/s, decode tokens/s) of one run from each job's first and last token."""
    all_first = max(first_s)
    prefill = len(first_s) * PROMPT_TOKENS / (all_first - start_s)
    decode = len(first_s) * (OUTPUT_TOKENS - 1) / (max(last_s) - all_first)
    return prefill, decode


Run = Callable[[int], tuple[float, float]]
"""(prefill, decode) tokens/s of one run with this many prompts at once."""


def serving(repeats: int, model: str) -> None:
    """The engine in this process and two Triton servers take turns, so that noise hits all."""
    with (
        engine(model) as (llm, run_engine),
        triton(model, 1) as server,
        triton(model, GROUP) as grouping,
        client_of(f"grpc://{server.endpoints.grpc_url}") as run_grpc,
        client_of(server.endpoints.http_url) as run_http,
        client_of(f"grpc://{grouping.endpoints.grpc_url}") as run_group,
    ):
        sides = {
            ENGINE: run_engine,
            "through Triton, gRPC": run_grpc,
            "through Triton, HTTP": run_http,
            f"{GROUP} tokens a response": run_group,
        }
        decode: dict[tuple[str, int], list[float]] = defaultdict(list)
        prefill: dict[str, list[float]] = defaultdict(list)
        stub = server.runtime.stub_pid()
        assert stub is not None
        served = {"client": os.getpid(), "tritonserver": server.pid, "stub": stub}
        cpu_of = {
            ENGINE: CpuTime({"engine": os.getpid()}),
            "through Triton, gRPC": CpuTime(served),
            "through Triton, HTTP": CpuTime(served),
        }
        for run in sides.values():
            run(1)  # warm
        for _ in range(repeats):
            for batch in BATCHES:
                for name, run in sides.items():
                    is_counted = name in cpu_of and batch == CPU_TIME_BATCH
                    with cpu_of[name].counted() if is_counted else nullcontext():
                        prefill_rate, decode_rate = run(batch)
                    decode[name, batch].append(decode_rate)
                    if batch == PREFILL_BATCH:
                        prefill[name].append(prefill_rate)
        table = Table(
            title="Tokens/s, median \\[least, most], and times the engine's", title_justify="left"
        )
        for heading in ("", *sides):
            table.add_column(heading, justify="right" if heading else "left")
        rows = {f"decode, batch {b}": {n: decode[n, b] for n in sides} for b in BATCHES}
        rows[f"prefill, {PREFILL_BATCH} × {PROMPT_TOKENS} tokens"] = dict(prefill)
        for label, rates_of in rows.items():
            direct = rates_of[ENGINE]
            entries = [
                f"{summary(values)} {statistics.median(map(truediv, values, direct)):.2f}"
                for name, values in rates_of.items()
                if name != ENGINE
            ]
            table.add_row(label, summary(direct), *entries)
        console.print(table)
        for name, cpu in cpu_of.items():
            tokens = repeats * CPU_TIME_BATCH * OUTPUT_TOKENS
            times = (f"{role} {s / tokens * 1e6:.0f} µs" for role, s in cpu.seconds.items())
            console.print(
                f"CPU time of a token, batch {CPU_TIME_BATCH}, {name}: {', '.join(times)}"
            )
        counters = llm.engine.counters
        steps = counters.iterations
        console.print(
            f"engine, mean of {steps} steps: rank {counters.compute_s / steps * 1e3:.2f} ms, "
            "messages and inputs "
            f"{(counters.iteration_s - counters.compute_s) / steps * 1e3:.2f} ms, "
            f"scheduling between steps {counters.between_s / steps * 1e3:.2f} ms; of steps that "
            "were sent ahead little or nothing counts"
        )
        console.print(f"idle server, stub and rank: {idle_percent(server.pid):.2f}% of a core")


class CpuTime:
    """Sums the CPU time of processes, in seconds, while it is ``counted``."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {role: psutil.Process(pid) for role, pid in pids.items()}
        self.seconds = dict.fromkeys(pids, 0.0)

    @contextmanager
    def counted(self) -> Iterator[None]:
        self._add(-1)
        yield
        self._add(1)

    def _add(self, sign: int) -> None:
        for role, process in self._processes.items():
            self.seconds[role] += sign * sum(process.cpu_times()[:2])


@contextmanager
def engine(model: str) -> Iterator[tuple[LLM, Run]]:
    started = time.monotonic()
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    with LLM(model, **options(model)) as llm:
        console.print(f"engine ready after {time.monotonic() - started:.1f} s")

        def run(batch: int) -> tuple[float, float]:
            done = llm.generate(prompts(batch), params, progress=False)
            stats = [completion.stats for completion in done if completion.stats is not None]
            return rates(
                [s.first_token_s or 0.0 for s in stats],
                [s.last_token_s or 0.0 for s in stats],
                min(s.arrival_s for s in stats),
            )

        yield llm, run


@contextmanager
def triton(model: str, stream_interval: int) -> Iterator[TritonServer]:
    started = time.monotonic()
    config = EngineConfig().with_keys(
        model=model, stream_interval=stream_interval, **options(model)
    )
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        TritonServer(
            config, http_port=0, grpc_port=0, metrics_port=0, log_path=Path(log.name)
        ) as server,
    ):
        console.print(f"server ready after {time.monotonic() - started:.1f} s")
        yield server


@contextmanager
def client_of(url: str) -> Iterator[Run]:
    """The asyncio client, which times runs as it receives tokens."""

    async def run(batch: int) -> tuple[float, float]:
        start_s = time.monotonic()
        times = await asyncio.gather(*map(read, prompts(batch)))
        return rates([first for first, _ in times], [last for _, last in times], start_s)

    async def read(prompt: list[int]) -> tuple[float, float]:
        first = last = 0.0
        options: Any = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
        async with client.stream(prompt, ignore_eos=True, **options) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    last = time.monotonic()
                    first = first or last
        return first, last

    async def connect() -> AsyncFastServeClient:
        return AsyncFastServeClient(url)

    with asyncio.Runner() as runner:
        client = runner.run(connect())
        yield lambda batch: runner.run(run(batch))
        runner.run(client.close())


def idle_percent(server_pid: int) -> float:
    """CPU time of the server and its children over ten seconds without a request."""
    server = psutil.Process(server_pid)
    processes = [server, *server.children(recursive=True)]

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = cpu_s()
    time.sleep(10.0)
    return (cpu_s() - before) * 10.0


def machine(repeats: int) -> None:
    import torch
    from fastserve_backend.checkpoints.load_config import load_model_config

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    data = torch.ones(2**28, dtype=torch.uint8).view(torch.int64)
    bandwidth = data.nbytes / shortest_s(data.sum, repeats)
    matrices = [torch.ones(2048, 2048, dtype=t) for t in (torch.float32, torch.bfloat16)]
    flops = 2 * 2048**3 / min(shortest_s(partial(torch.mm, m, m), repeats) for m in matrices)
    console.print(
        f"this processor reads {bandwidth / 1e9:.0f} GB/s and multiplies {flops / 1e9:.0f} GFLOP/s"
    )
    table = Table()
    table.add_column("")
    table.add_column("best possible tokens/s", justify="right")
    parameters = load_model_config(MODEL, load_format="dummy").num_parameters
    for batch in BATCHES:
        floor_s = max(parameters * 2 / bandwidth, parameters * 2 * batch / flops)
        table.add_row(f"decode, batch {batch}", f"{batch / floor_s:.0f}")
    head = VOCAB_SIZE * 768  # a prompt needs the LM head for its last token alone
    per_token = 2 * (parameters - head * (1 - 1 / PROMPT_TOKENS))
    table.add_row("prefill", f"{flops / per_token:.0f}")
    console.print(table)


def shortest_s(call: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 2):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def step(repeats: int) -> None:
    """Where a rank's time goes: one decode step in this process, recorded as in serving, and as
    Python code, with every kernel call timed."""
    import torch
    from fastserve_backend.checkpoints.load_config import load_model_config
    from fastserve_backend.models.loader import load_model
    from fastserve_backend.worker.kv_store import allocate_kv
    from fastserve_backend.worker.model_runner import ModelRunner
    from fastserve_backend.worker.step_inputs import StepLimits

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cpu")
    config = load_model_config(MODEL, load_format="dummy", dtype="bfloat16")
    kv = allocate_kv(config, device, 16, max(BATCHES) * 8, 0.9)
    kv.zero_()
    limits = StepLimits(max(BATCHES), max(BATCHES), config.max_model_len)
    model = load_model(config, device)
    recorded, python = (
        ModelRunner(model, config, kv, device, limits, may_record=may_record)
        for may_record in (True, False)
    )
    table = Table(title=f"One decode step in the rank, context {CONTEXT}, ms", title_justify="left")
    table.add_column("")
    columns = []
    for batch in BATCHES:
        message = decode_step(batch)
        runs = repeats * 10

        def mean_s(runner: ModelRunner, message: Step = message, runs: int = runs) -> float:
            return statistics.mean(compute_s(runner.run(message)) for _ in range(runs))

        mean_s(recorded)
        in_one_call_s = mean_s(recorded)
        with timed_kernels() as spent:
            mean_s(python)
            spent.clear()
            total = mean_s(python)
            parts = {name: seconds / runs for name, seconds in spent.items()}
        rest = {"the rest": total - sum(parts.values())}
        columns.append(
            {"whole step": in_one_call_s, "whole step, as Python code": total, **parts, **rest}
        )
        table.add_column(f"batch {batch}", justify="right")
    for name in columns[0]:
        table.add_row(name, *(f"{column.get(name, 0.0) * 1e3:.2f}" for column in columns))
    console.print(table)


def beginnings(repeats: int, model: str) -> None:
    """Decode steps of jobs that begin alike, in this process. Both forms take turns."""
    import torch
    from fastserve_backend.checkpoints.load_config import load_model_config
    from fastserve_backend.models.loader import load_model
    from fastserve_backend.worker.kv_store import allocate_kv
    from fastserve_backend.worker.model_runner import ModelRunner
    from fastserve_backend.worker.step_inputs import StepLimits

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = torch.device("cpu")
    load_format = options(model)["load_format"]
    table = Table(
        title=f"One decode step of {model} behind {COMMON_TOKENS} common tokens, ms",
        title_justify="left",
    )
    for heading in ("KV", "jobs", "read once", "read by each job", "ratio"):
        table.add_column(heading, justify="right")
    for kv_dtype in ("same", "int8"):
        config = load_model_config(
            model, load_format=load_format, dtype="bfloat16", kv_dtype=kv_dtype
        )
        jobs_blocks = max(BEHIND_COMMON) * OWN_BLOCKS
        kv = allocate_kv(config, device, 16, COMMON_TOKENS // 16 + jobs_blocks, 0.9)
        kv.zero_()
        limits = StepLimits(max(BEHIND_COMMON), max(BEHIND_COMMON), config.max_model_len)
        runner = ModelRunner(load_model(config, device), config, kv, device, limits)
        for batch in BEHIND_COMMON:
            message = step_behind_common(batch)
            times: dict[bool, list[float]] = {True: [], False: []}
            for turn in range(2 * repeats + 2):
                is_once = turn % 2 == 0
                with nullcontext() if is_once else nothing_in_common():
                    spent = compute_s(runner.run(message))
                if turn >= 2:
                    times[is_once].append(spent * 1e3)
            ratio = statistics.median(map(truediv, times[False], times[True]))
            texts = [summary(times[is_once], 1) for is_once in (True, False)]
            table.add_row(
                config.dtype if kv_dtype == "same" else kv_dtype, str(batch), *texts, f"{ratio:.2f}"
            )
    console.print(table)


def step_behind_common(batch: int) -> Step:
    """Each job's last token follows COMMON_TOKENS of all and some of its own."""
    first_own = COMMON_TOKENS // 16
    jobs = []
    for job in range(batch):
        own = range(first_own + job * OWN_BLOCKS, first_own + (job + 1) * OWN_BLOCKS)
        table = [*range(first_own), *own]
        jobs.append((len(table) * 16 - 1, [1000 + job], table))
    return Step.of(0, jobs)


@contextmanager
def nothing_in_common() -> Iterator[None]:
    """Rows of steps that are made meanwhile seem to begin with blocks of their own."""
    from fastserve_backend.worker import step_inputs

    inputs: Any = step_inputs
    find = inputs.common_beginnings
    # With a window of 0 nobody sees all of its context.
    inputs.common_beginnings = lambda *arrays, window: find(*arrays, window=0)
    try:
        yield
    finally:
        inputs.common_beginnings = find


def compute_s(answer: object) -> float:
    assert isinstance(answer, StepResult)
    return answer.compute_s


def decode_step(batch: int) -> Step:
    blocks = -(-CONTEXT // 16)
    return Step.of(
        0, [(CONTEXT - 1, [1000 + job], range(job * 8, job * 8 + blocks)) for job in range(batch)]
    )


@contextmanager
def timed_kernels() -> Iterator[dict[str, float]]:
    """Seconds spent in each kind of kernel call while the context is open."""
    from fastserve_kernels import ops

    spent: dict[str, float] = defaultdict(float)
    linear = ops.PackedLinear
    originals: list[tuple[Any, str, Any]] = [
        (ops, name, getattr(ops, name))
        for name in ("kv_write", "paged_decode", "add_layer_norm", "greedy_tokens")
    ]
    originals.append((linear, "__call__", linear.__call__))

    def wrap(function: Any, label: Callable[[Any], str]) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            result = function(*args, **keywords)
            spent[label(args[0])] += time.perf_counter() - begin
            return result

        return call

    def linear_label(layer: Any) -> str:
        return "LM head" if layer.out_features == VOCAB_SIZE else "linears of the layers"

    for owner, name, function in originals:
        constant = name.replace("_", " ")
        label = linear_label if name == "__call__" else lambda _, constant=constant: constant
        setattr(owner, name, wrap(function, label))
    try:
        yield spent
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="*", help="of machine, step, beginnings, serving (default: all)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--model", default=MODEL, help=f"of beginnings and serving (default: {MODEL})"
    )
    arguments = parser.parse_args()
    parts: dict[str, Callable[[int], None]] = {
        "machine": machine,
        "step": step,
        "beginnings": partial(beginnings, model=arguments.model),
        "serving": partial(serving, model=arguments.model),
    }
    if unknown := set(arguments.part) - set(parts):
        parser.error(f"part: got {unknown.pop()!r}; choose from {', '.join(parts)}")
    for name, part in parts.items():
        if not arguments.part or name in arguments.part:
            part(arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
