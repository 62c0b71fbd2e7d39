"""FastServe Fig. 5: time of an iteration against input length, OPT-2.7B on an A100.

The first iteration computes the whole prompt, every later one a single token. Times are the
roofline model's unless --profile names a latency profile, measured by ``fastserve profile``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.profile.latency import LatencyProfile
from rich.table import Table

from benchmarks.paper.figures import Figure, new_table, save_json, save_plot
from benchmarks.paper.simulated_runs import System

INPUT_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2047)


def draw(args: argparse.Namespace) -> list[Table]:
    latency: LatencyModel = System("opt-2.7b").latency
    source = "OPT-2.7B, A100-40G, roofline model"
    if args.profile is not None:
        latency = profile = LatencyProfile.load(args.profile)
        source = f"{profile.identity.model}, {profile.identity.hardware}, measured"

    table = new_table(
        "Fig. 5: milliseconds of one iteration",
        f"{source}. Paper: the first iteration grows with the input and exceeds the others, which "
        "are nearly constant.",
        "input tokens",
        "first iteration",
        "later iterations",
        "first / later",
    )
    first = [latency.prefill_s(n) * 1e3 for n in INPUT_TOKENS]
    later = [latency.decode_s(n + 1) * 1e3 for n in INPUT_TOKENS]
    for tokens, first_ms, later_ms in zip(INPUT_TOKENS, first, later, strict=True):
        table.add_row(
            str(tokens), f"{first_ms:.1f}", f"{later_ms:.1f}", f"{first_ms / later_ms:.2f}"
        )
    lines = {"first": (INPUT_TOKENS, first), "later": (INPUT_TOKENS, later)}
    save_plot(args, {source: lines}, "Input tokens", "Iteration (ms)")
    save_json(args, {"input_tokens": INPUT_TOKENS, "first_ms": first, "later_ms": later})
    return [table]


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument("--profile", type=Path, metavar="FILE", help="measured latency profile")


FIGURE = Figure("fig05", __doc__, draw, jobs=1, add_options=add_options)
