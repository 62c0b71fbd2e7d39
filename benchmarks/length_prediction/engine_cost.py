"""What predicting lengths costs the jobs: an engine with the predictor beside one without.

    python benchmarks/length_prediction/engine_cost.py --instructions FILE

Both engines serve the embedded model with the policy skip_join_mlfq, which ignores predictions, so
that they do the same work; an engine without jobs uses no core. They take turns, in each pair in
another order, with the same new prompts of FILE (JSON lines with ``instruction`` and ``input``):
as many jobs as a batch holds, each with the same number of tokens. What they are given to do ends
by itself, so the predictor also learns from each. Printed: the time of an iteration with the
predictor by that without, the CPU time of the predictor's process for each job, and how long jobs
waited for their predictions while the ranks used all cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.checkpoints.embedded import EMBEDDED_MODEL
from fastserve_backend.length_prediction.job_predictions import JobPredictions
from instructions import Instruction, read_instructions
from rich.console import Console
from rich.table import Table

LOAD_TIMEOUT_S = 180.0


def iteration_s(llm: LLM, some: list[Instruction], num_tokens: int) -> float:
    """Mean of the iterations that answer these, seconds."""
    counters = llm.engine.counters
    before = counters.iterations
    started_s = time.perf_counter()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    llm.chat([one.messages for one in some], params, progress=False)
    return (time.perf_counter() - started_s) / (counters.iterations - before)


def predictor_cpu_s() -> float:
    """CPU time so far of the predictor's process, seconds."""
    (process,) = [
        child
        for child in psutil.Process().children()
        if "fastserve_backend.length_prediction" in child.cmdline()
    ]
    times = process.cpu_times()
    return float(times.user + times.system)


def wait_for_entries(predictions: JobPredictions, number: int) -> None:
    deadline = time.monotonic() + LOAD_TIMEOUT_S
    while predictions.num_entries < number:
        if time.monotonic() > deadline:
            raise SystemExit("the predictor did not learn in time")
        threading.Event().wait(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--instructions", type=Path, required=True, metavar="FILE")
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="(the embedded model)")
    parser.add_argument("--batch", type=int, default=16, help="jobs in an iteration (16)")
    parser.add_argument("--tokens", type=int, default=48, help="of each job's answer (48)")
    parser.add_argument("--pairs", type=int, default=10, help="of measurements (10)")
    args = parser.parse_args()
    instructions = read_instructions(args.instructions)
    options = {
        "max_model_len": 1024,
        "max_num_seqs": args.batch,
        "swap_space_gib": 0.1,
        "prefix_caching": False,
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        LLM(args.model, **options) as without,
        LLM(
            args.model, length_prediction="on", length_prediction_dir=directory, **options
        ) as predicting,
    ):
        predictions = predicting.engine.predictions
        assert predictions is not None
        for llm in (without, predicting):  # warm up; the predictor loads meanwhile
            iteration_s(llm, instructions[: args.batch], args.tokens)
        wait_for_entries(predictions, 1)
        predictions.counters.latency.take()
        cpu_before_s = predictor_cpu_s()
        times: dict[LLM, list[float]] = {without: [], predicting: []}
        for pair in range(args.pairs):
            begin = (pair + 1) * args.batch
            for llm in (without, predicting) if pair % 2 else (predicting, without):
                batch = instructions[begin : begin + args.batch]
                times[llm].append(iteration_s(llm, batch, args.tokens))
        num_jobs = args.pairs * args.batch
        cpu_s = (predictor_cpu_s() - cpu_before_s) / num_jobs
        latency = predictions.counters.latency.take()
        counters = predictions.counters
    ratios = [on / off for on, off in zip(times[predicting], times[without], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    table = Table("", "")
    table.add_row("jobs, tokens each", f"{num_jobs}, {args.tokens}")
    table.add_row("iteration without, median", f"{statistics.median(times[without]) * 1e3:.1f} ms")
    table.add_row("with the predictor", f"{statistics.median(times[predicting]) * 1e3:.1f} ms")
    table.add_row("with by without, median of pairs", f"{statistics.median(ratios):.3f}")
    table.add_row("… their quartiles", f"{quartiles[0]:.3f} to {quartiles[2]:.3f}")
    table.add_row("predictor's CPU time a job", f"{cpu_s * 1e3:.1f} ms")
    mean_s = sum(latency.sums) / max(1, sum(latency.counts))
    table.add_row("mean time to a prediction", f"{mean_s * 1e3:.0f} ms")
    table.add_row("jobs predicted, not", f"{counters.predictions}, {counters.fallbacks}")
    console = Console(width=100)
    console.print(table)
    console.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
