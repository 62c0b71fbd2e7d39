"""What ALISE's figures compare, all on this engine: ORCA, vLLM, ALISE and an oracle."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastserve_backend.profile.hardware import HARDWARE

from benchmarks.paper.figures import add_dataset, fcfs_run, jobs_of
from benchmarks.paper.prediction_errors import MEASURED, PredictionErrors
from benchmarks.paper.simulated_runs import BATCH, Run, System, scheduler

ALISE, ORACLE = "ALISE", "oracle"


def add_options(options: argparse.ArgumentParser) -> None:
    """Adds the testbed; by default two V100-32G, 1 TB of host memory, traces of 30 minutes."""
    add_dataset(options)
    options.add_argument(
        "--prediction-errors",
        type=Path,
        default=MEASURED,
        metavar="FILE",
        help="CSV of real_tokens,predicted_tokens (this project's predictor on held-out answers)",
    )
    options.add_argument(
        "--hardware", choices=list(HARDWARE), default="v100-32g", help="the GPUs (v100-32g)"
    )
    options.add_argument("--tensor-parallel-size", type=int, default=2, help="GPUs (2)")
    options.add_argument("--host-memory-gib", type=float, default=1024.0, help="for KV (1024)")
    options.add_argument("--max-num-seqs", type=int, default=BATCH, help=f"batch ({BATCH})")
    options.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="how long jobs arrive (30); 0: until --jobs have, Alpaca twice as many",
    )


def system_of(args: argparse.Namespace, model: str) -> System:
    """The model on the testbed that the options give."""
    return System(
        model, args.tensor_parallel_size, hardware=args.hardware, host_gib=args.host_memory_gib
    )


def testbed_run(args: argparse.Namespace, system: System, dataset: str) -> Run:
    """A run of FCFS with host memory, at the rate that full batches serve."""
    run = fcfs_run(args, system, dataset, args.max_num_seqs)
    return replace(run, duration_s=60 * args.minutes if _is_timed(args) else None)


def testbed(args: argparse.Namespace) -> str:
    """The testbed in words, for captions."""
    trace = f"{args.jobs} jobs (Alpaca {jobs_of(args, 'alpaca')})"
    if _is_timed(args):
        trace = f"traces of {args.minutes:g} minutes"
    return (
        f"{args.tensor_parallel_size} × {args.hardware}, {args.host_memory_gib:g} GiB of host "
        f"memory, batch {args.max_num_seqs}, {trace}"
    )


def _is_timed(args: argparse.Namespace) -> bool:
    return args.minutes > 0 and not args.quick


def measured(args: argparse.Namespace) -> PredictionErrors:
    return PredictionErrors.read(args.prediction_errors)


def alise(
    run: Run, errors: PredictionErrors | None, policy: str = "speculative", **kv_cache: Any
) -> Run:
    """The policy with ALISE's host memory, in INT8."""
    seats = run.scheduler.max_num_seqs
    assert seats != "auto"
    return replace(
        run,
        scheduler=scheduler(policy, seats),
        kv_cache=run.system.swapping(**{"host_dtype": "int8", **kv_cache}),
        errors=errors,
    )


def beside(value: str, paper: str | None) -> str:
    """Our figure with the paper's in brackets."""
    return value if paper is None else f"{value} ({paper})"
