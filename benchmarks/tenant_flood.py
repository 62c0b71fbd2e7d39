"""What a flood of one tenant costs another: its latency alone, and beside the flood.

    python -m benchmarks.tenant_flood

The real engine with its ranks on this machine's CPU. A tenant sends one request after the other, as
a person does. Meanwhile another tenant always has 100 unfinished requests. Each case has an
engine of its own. The table shows the 95th percentile over the requests of the first tenant, and
the tokens that the other one gets meanwhile.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastserve_backend import LLM, SamplingParams
from fastserve_backend.job import FinishReason, JobOutput, JobStats, ServiceLevel
from rich.console import Console
from rich.table import Table

PERSON, FLOOD = ServiceLevel(tenant="person"), ServiceLevel(tenant="flood")
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
FLOOD_REQUESTS, FLOOD_PROMPT_TOKENS, FLOOD_OUTPUT_TOKENS = 100, 32, 64
WARM_UP_REQUESTS = 3
DEADLINE_S = 300.0


@dataclass(frozen=True)
class Latencies:
    """The 95th percentiles of one case, in seconds, and the flood's tokens per second."""

    first_token_s: float
    whole_s: float
    flood_tokens_s: float


def measure(arguments: argparse.Namespace, *, flood: bool, fair_shares: bool) -> Latencies:
    options = {"load_format": "dummy", "max_num_seqs": arguments.max_num_seqs, "device": "cpu"}
    with LLM(arguments.model, fair_shares=fair_shares, policy=arguments.policy, **options) as llm:
        other = Flood(llm, FLOOD_REQUESTS if flood else 0)
        for _ in range(WARM_UP_REQUESTS):
            one_request(llm)
        began_s, before = time.monotonic(), other.num_tokens
        stats = [one_request(llm) for _ in range(arguments.requests)]
        flood_tokens_s = (other.num_tokens - before) / (time.monotonic() - began_s)
    return Latencies(
        p95(stats, lambda one: one.first_token_s),
        p95(stats, lambda one: one.last_token_s),
        flood_tokens_s,
    )


class Flood:
    """A tenant that always has so many unfinished requests."""

    def __init__(self, llm: LLM, num_requests: int) -> None:
        self.num_tokens = 0
        """That it has had."""
        self._llm = llm
        for _ in range(num_requests):
            self._submit()

    def _submit(self) -> None:
        params = SamplingParams(max_tokens=FLOOD_OUTPUT_TOKENS, ignore_eos=True)
        prompt = [5] * FLOOD_PROMPT_TOKENS
        self._llm.engine.submit("flood", prompt, params, self._on_output, service=FLOOD)

    def _on_output(self, output: JobOutput) -> None:
        self.num_tokens += len(output.token_ids)
        if output.finish_reason is FinishReason.LENGTH:  # not when the engine is closed
            self._submit()


def one_request(llm: LLM) -> JobStats:
    ends: queue.SimpleQueue[JobStats] = queue.SimpleQueue()

    def on_output(output: JobOutput) -> None:
        if output.stats is not None:
            ends.put(output.stats)

    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    llm.engine.submit("person", [6] * PROMPT_TOKENS, params, on_output, service=PERSON)
    return ends.get(timeout=DEADLINE_S)


def p95(stats: list[JobStats], end_s: Callable[[JobStats], float | None]) -> float:
    latencies = [(end_s(one) or 0.0) - one.arrival_s for one in stats]
    return statistics.quantiles(latencies, n=20)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="opt-125m", help="a built-in name (opt-125m)")
    parser.add_argument("--policy", default="gittins")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="seats of a batch (4)")
    parser.add_argument("--requests", type=int, default=20, help="timed for each case (20)")
    parser.add_argument(
        "--unfair", action="store_true", help="also beside a flood without fair shares: minutes"
    )
    arguments = parser.parse_args()
    alone = measure(arguments, flood=False, fair_shares=True)
    table = Table(title="P95 over the requests of one tenant")
    headings = ("case", "first token, ms", "times alone", "whole answer, ms", "times alone")
    for heading in (*headings, "the flood's tokens/s"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    cases = {"alone": alone, "beside a flood": measure(arguments, flood=True, fair_shares=True)}
    if arguments.unfair:
        unfair = measure(arguments, flood=True, fair_shares=False)
        cases["beside a flood, without fair shares"] = unfair
    for case, found in cases.items():
        table.add_row(
            case,
            f"{found.first_token_s * 1e3:.0f}",
            f"{found.first_token_s / alone.first_token_s:.2f}",
            f"{found.whole_s * 1e3:.0f}",
            f"{found.whole_s / alone.whole_s:.2f}",
            f"{found.flood_tokens_s:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
