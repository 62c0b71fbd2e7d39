"""Runs this server and vLLM's CPU build side by side; started by ``vllm_cpu.sh run``.

All servers start first and stay up. The load test sends each load to one after the other, so only
one computes at a time, and other load of the machine affects all alike. That is fair only if an
idle server takes nothing from its neighbours, which is measured first.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import FastServeError
from fastserve_backend.serving.launch import TritonServer
from fastserve_client import FastServeClient
from fastserve_client.errors import ClientError

from benchmarks.peers.checkpoint import VOCAB_SIZE, existing_checkpoint
from benchmarks.peers.comparison_tables import (
    Report,
    objectives_table,
    speed_table,
    sweep_table,
)
from benchmarks.peers.fairness import (
    CHECKED_TOKENS,
    checked_prompts,
    fairness_table,
    idle_cpu,
)
from benchmarks.peers.vllm_server import ALL_CPUS, MODEL_NAME, VllmServer, VllmSettings

ROOT = Path(__file__).parents[2]

# Limits of both servers.
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 2048
MAX_MODEL_LEN = 2048
KV_CACHE_GIB = 2
"""29,000 tokens in float32: more than all jobs of a sweep have, so no server is short of memory."""
BLOCK_SIZE = 16
KV_ELEMENTS_PER_TOKEN = 2 * 12 * 768

OURS, OURS_BF16, OURS_INT8 = "FastServe float32", "FastServe bfloat16", "FastServe int8"
VLLM, VLLM_AUTO, VLLM_BF16 = "vLLM float32", "vLLM float32 auto", "vLLM bfloat16"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Jobs of equal lengths, of which a fixed number is always under way."""

    concurrency: int
    num_jobs: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        if self.output_tokens == 1:
            return f"prefill of {self.prompt_tokens} tokens"
        return f"batch {self.concurrency}, {self.prompt_tokens} + {self.output_tokens} tokens"

    def quick(self) -> ClosedLoop:
        return replace(self, num_jobs=self.concurrency, output_tokens=min(4, self.output_tokens))


SINGLE, BATCH, PREFILL = (
    ClosedLoop(1, 4, 16, 64),
    ClosedLoop(16, 16, 16, 64),
    ClosedLoop(1, 3, 512, 1),
)

SLO_MS = 300
SWEEP: dict[str, str | float] = {
    "dataset": "sharegpt",
    "scale": 0.2,
    "max-prompt-tokens": 400,
    "max-output-tokens": 200,
    "slo-ms": SLO_MS,
}
BENCH_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is up."""

    url: str
    pid: int

    @property
    def is_vllm(self) -> bool:
        return self.url.startswith("http")

    def greedy(self, prompt: list[int]) -> list[int]:
        """Token ids of the server's greedy answer."""
        if self.is_vllm:
            return self._vllm_greedy(prompt)
        with FastServeClient(self.url) as client:
            answer = client.generate(
                prompt, max_tokens=CHECKED_TOKENS, temperature=0, ignore_eos=True
            )
            return list(answer.token_ids)

    def _vllm_greedy(self, prompt: list[int]) -> list[int]:
        body = {
            "model": MODEL_NAME,
            "prompt": prompt,
            "max_tokens": CHECKED_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.url}/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
            return tokens


class Comparison:
    """The servers by label, and the directory for everything that is written."""

    def __init__(self, checkpoint: Path, vllm: Path, output: Path, stack: ExitStack) -> None:
        self._checkpoint = checkpoint
        self._vllm = vllm
        self._output = output
        self._stack = stack
        self.servers: dict[str, Running] = {}

    def start_ours(self, label: str, dtype: str, **keys: Any) -> None:
        """
        Args:
            keys: settings that add to those of all servers, or replace them.
        """
        element_bytes = {"float32": 4, "bfloat16": 2}[dtype]
        block_bytes = BLOCK_SIZE * KV_ELEMENTS_PER_TOKEN * element_bytes
        common: dict[str, Any] = {
            "model": str(self._checkpoint),
            "dtype": dtype,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "device_blocks": KV_CACHE_GIB * 2**30 // block_bytes,
            "slo_ms": SLO_MS,
            "prefix_caching": False,
        }
        config = EngineConfig().with_keys(**(common | keys))
        say(f"starting {label}")
        server = self._stack.enter_context(
            TritonServer(config, http_port=0, grpc_port=0, metrics_port=0, log_path=self.log(label))
        )
        self.servers[label] = Running(f"grpc://{server.endpoints.grpc_url}", server.pid)

    def start_vllm(
        self, label: str, dtype: str, threads_bind: str, max_num_seqs: int = MAX_NUM_SEQS
    ) -> None:
        settings = VllmSettings(
            self._checkpoint,
            dtype,
            max_num_seqs,
            MAX_NUM_BATCHED_TOKENS,
            MAX_MODEL_LEN,
            KV_CACHE_GIB,
            threads_bind,
        )
        say(f"starting {label} (minutes where it has to compile)")
        server = self._stack.enter_context(VllmServer(self._vllm, settings, self.log(label)))
        self.servers[label] = Running(server.url, server.pid)

    def check(self) -> str:
        """Measures what makes the comparison fair; returns Markdown.

        Raises:
            RuntimeError: an idle server takes processor time.
        """
        prompts = checked_prompts(VOCAB_SIZE)
        answers = {
            label: [server.greedy(prompt) for prompt in prompts]
            for label, server in self.servers.items()
        }
        idle = idle_cpu({label: server.pid for label, server in self.servers.items()})
        return fairness_table(answers, idle)

    def log(self, label: str) -> Path:
        """Log of the server with this label."""
        return self._output / f"{label.replace(' ', '-')}.log"

    def bench(self, name: str, labels: Sequence[str], flags: Mapping[str, str | float]) -> Report:
        """Runs `fastserve bench` on these servers.

        Raises:
            RuntimeError: it failed.
        """
        file = self._output / f"{name}.json"
        command = [str(ROOT / ".venv" / "bin" / "fastserve"), "bench"]
        command += [f"--url={label}={self.servers[label].url}" for label in labels]
        command += [f"--{flag}={value}" for flag, value in flags.items()]
        command += [f"--vocab-size={VOCAB_SIZE}", f"--output={file}"]
        say(shlex.join(command))
        try:
            subprocess.run(command, stdout=sys.stderr, timeout=BENCH_TIMEOUT_S, check=True)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"fastserve bench did not finish: {error}") from None
        report: Report = json.loads(file.read_text(encoding="utf-8"))
        return report

    def equal_lengths(self, prompt_tokens: int, output_tokens: int) -> str:
        """Writes a data set of equal jobs; returns its path."""
        file = self._output / f"{prompt_tokens}-{output_tokens}.csv"
        file.write_text(f"prompt_tokens,output_tokens\n{prompt_tokens},{output_tokens}\n")
        return str(file)


def say(text: str) -> None:
    print(f"# {text}", file=sys.stderr, flush=True)


def measure_speeds(
    comparison: Comparison,
    name: str,
    labels: Sequence[str],
    loops: Sequence[ClosedLoop],
    repeats: int,
) -> dict[str, Report]:
    """Reports by the loop that was run."""
    return {
        str(loop): comparison.bench(
            f"{name}-{loop.concurrency}-{loop.prompt_tokens}",
            labels,
            {
                "concurrency": loop.concurrency,
                "dataset": comparison.equal_lengths(loop.prompt_tokens, loop.output_tokens),
                "num-jobs": loop.num_jobs,
                "repeats": repeats,
                "warmup": 1,
            },
        )
        for loop in loops
    }


def fastest(report: Report, labels: Sequence[str]) -> str:
    """The fastest of these servers by output tokens per second. A server of which no job ended is
    the slowest."""
    summaries = {point["label"]: point["summary"] for point in report["points"]}
    return max(
        labels,
        key=lambda label: summaries[label]["output_tokens_per_s"] if summaries[label] else 0.0,
    )


def compare(comparison: Comparison, arguments: argparse.Namespace) -> str:
    """Makes all measurements; returns Markdown.

    Raises:
        RuntimeError: a server takes processor time while idle, or a run failed.
    """
    comparison.start_ours(OURS, "float32")
    comparison.start_ours(OURS_BF16, "bfloat16")
    bindings = {VLLM: ALL_CPUS, VLLM_AUTO: "auto"}
    for label, threads_bind in bindings.items():
        comparison.start_vllm(label, "float32", threads_bind)
    checks = comparison.check()
    loops = [SINGLE, BATCH, PREFILL]
    if arguments.quick:
        loops = [loop.quick() for loop in loops]
    labels = list(comparison.servers)
    speeds = measure_speeds(comparison, "speed", labels, loops, arguments.repeats)
    # vLLM gets the threads with which it is faster here.
    vllm = fastest(speeds[str(loops[1])], list(bindings))
    sweep_flags = {
        **SWEEP,
        "rates": arguments.rates,
        "num-jobs": arguments.num_jobs,
        "repeats": arguments.repeats,
    }
    sweep = comparison.bench("sweep", [OURS, OURS_BF16, vllm], sweep_flags)
    parts = [checks, speed_table(speeds), sweep_table(sweep), objectives_table(sweep)]
    if not arguments.quick:
        comparison.start_ours(OURS_INT8, "bfloat16", quantization="int8")
        comparison.start_vllm(VLLM_BF16, "bfloat16", bindings[vllm])
        labels = [OURS_BF16, OURS_INT8, VLLM_BF16]
        # This takes minutes where the processor has no AVX-512.
        repeats = arguments.repeats if _has_bfloat16() else 1
        parts.append(speed_table(measure_speeds(comparison, "bfloat16", labels, loops, repeats)))
        if _has_bfloat16():
            parts.append(sweep_table(comparison.bench("sweep-bfloat16", labels, sweep_flags)))
    return "\n".join(parts)


def _has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, in which vLLM may then be faster."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "avx512_bf16" in flags or "amx_bf16" in flags


def add_common_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Arguments of all comparisons.

    Args:
        repeats: default of ``--repeats``.
    """
    parser.add_argument("--vllm-environment", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument(
        "--quick", action="store_true", help="few jobs, once: shows that all works, measures little"
    )
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "build" / "peers",
        help="directory for JSON, logs and tables",
    )


def run_comparison(
    arguments: argparse.Namespace, measure: Callable[[Comparison, argparse.Namespace], str]
) -> None:
    """Prints what ``measure`` returns, writes it to ``tables.md``, and ends all that it started."""
    if arguments.quick:
        arguments.repeats = 1
    # As with Ctrl-C, the servers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        arguments.output.mkdir(parents=True, exist_ok=True)
        checkpoint = existing_checkpoint(arguments.cache)
        with ExitStack() as stack:
            tables = measure(
                Comparison(checkpoint, arguments.vllm_environment, arguments.output, stack),
                arguments,
            )
        (arguments.output / "tables.md").write_text(tables, encoding="utf-8")
    except (RuntimeError, FastServeError, ClientError, OSError) as error:
        sys.exit(f"vllm_cpu.sh: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    print(tables)


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm_cpu.sh run", description=__doc__)
    add_common_arguments(parser, repeats=2)
    parser.add_argument("--rates", default="1,2,3,4", help="of the sweep, jobs per second")
    parser.add_argument("--num-jobs", type=int, default=50, help="at each rate")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rates, arguments.num_jobs = "1,4", 4
    run_comparison(arguments, compare)


if __name__ == "__main__":
    main()
