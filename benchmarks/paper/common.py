"""What the figures share: systems and KV memory, runs on all cores, tables, plots, JSON.

Everything is simulated: the engine's own step loop, policies and KV decisions, on the iteration
times of a roofline model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from fastserve_backend.config import EngineConfig, KVCacheSection, SchedulerSection
from fastserve_backend.models.config import load_model_config
from fastserve_backend.models.model_config import ModelConfig
from fastserve_backend.profile.hardware import find_hardware
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.simulation.memory import KVMemory, memory_of_roofline
from fastserve_backend.simulation.simulator import Simulation, simulate
from fastserve_client.report.summary import Summary, summarize
from fastserve_client.workload import AUTHORS_LIMITS, Lengths, load_lengths, poisson_trace
from matplotlib.figure import Figure
from prediction_errors import PredictionErrors
from rich import box
from rich.console import Console
from rich.table import Table

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
BATCH = 16
"""Most jobs in one iteration: MaxBatchSize of FastServe's authors."""
_HOST_GIB = 56.0  # swap space of the authors' ShareGPT runs
_TYPICAL_CONTEXT = 400  # tokens of a job in the middle of its output
_STEP = 2.0  # factor between rates while a search looks for one that is too high
# With a fixed number of jobs latency stops growing once they all arrive practically at once.
_HIGHEST_LOAD = 20.0

SWAPPING = "KV is swapped to 56 GiB of host memory (strategy proactive)."
DATASETS = {"sharegpt": "ShareGPT", "alpaca": "Alpaca"}
ALPACA_JOBS = 2  # as many as ShareGPT's: they last a sixth as long

console = Console(width=100)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class System:
    """A model in float16 on GPUs of one type."""

    model: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    hardware: str = "a100-40g"

    def __str__(self) -> str:
        name = self.model.upper()
        if self.tensor_parallel > 1:
            name += f" TP{self.tensor_parallel}"
        if self.pipeline_parallel > 1:
            name += f"×PP{self.pipeline_parallel}"
        return name

    @property
    def config(self) -> ModelConfig:
        return load_model_config(self.model, load_format="dummy", dtype="float16", device="cuda")

    @property
    def latency(self) -> Roofline:
        return _latency(self)

    def swapping(self, **keys: Any) -> KVCacheSection:
        """With host memory as the authors', shared by the ranks."""
        gib = _HOST_GIB / (self.tensor_parallel * self.pipeline_parallel)
        return kv_cache(**{"swap_space_gib": gib, **keys})

    @property
    def decode_s(self) -> float:
        """One decode iteration of a full batch."""
        load = IterationLoad.of([(_TYPICAL_CONTEXT - 1, 1, True)] * BATCH)
        return self.latency.iteration_s(load)

    def capacity(self, lengths: Lengths) -> float:
        """Jobs per second that full batches serve, roughly: prefills alone, decodes shared."""
        prompt, output = (statistics.fmean(column) for column in zip(*lengths, strict=True))
        busy_s = self.latency.prefill_s(round(prompt)) + output * self.decode_s / BATCH
        rate: float = self.latency.num_stages / busy_s
        return rate


@cache
def _latency(system: System) -> Roofline:
    return Roofline(
        system.config,
        find_hardware(system.hardware),
        system.tensor_parallel,
        system.pipeline_parallel,
    )


OPT_13B = System("opt-13b")


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation of jobs drawn from ``lengths``."""

    system: System
    lengths: Lengths
    rate: float
    num_jobs: int
    seed: int
    scheduler: SchedulerSection
    kv_cache: KVCacheSection
    evenly: bool = False
    """The same jobs arrive at equal distances instead of as a Poisson process."""
    errors: PredictionErrors | None = None
    """Of the predicted output lengths; ``None``: nothing is predicted."""

    @property
    def memory(self) -> KVMemory:
        return memory_of_roofline(self.system.latency, self.system.config, self.kv_cache)

    def simulate(self) -> Simulation:
        trace = poisson_trace(self.lengths, self.rate, self.num_jobs, self.seed)
        if self.evenly:
            trace = [replace(job, arrival_s=i / self.rate) for i, job in enumerate(trace)]
        predictions = None
        if self.errors is not None:
            predictions = self.errors.predict(trace, self.lengths, self.seed, MAX_MODEL_LEN)
        return simulate(
            trace,
            self.scheduler,
            self.kv_cache,
            self.system.latency,
            self.memory,
            max_model_len=MAX_MODEL_LEN,
            predictions=predictions,
        )

    def summary(self) -> Summary:
        return summarize(self.simulate().records)


def scheduler(policy: str, max_num_seqs: int = BATCH, **keys: Any) -> SchedulerSection:
    keys = {"policy": policy, "max_num_seqs": max_num_seqs, **keys}
    return EngineConfig().with_keys(**keys).scheduler


def kv_cache(**keys: Any) -> KVCacheSection:
    return EngineConfig().with_keys(**keys).kv_cache


RECOMPUTE = kv_cache(strategy="recompute")
"""Device memory alone."""


@dataclass(frozen=True, slots=True)
class Search:
    """The largest rate that meets an objective, and all that was run to find it."""

    rate: float
    """Infinite if no rate breaks the objective with so few jobs."""
    runs: Sequence[tuple[float, Summary]]


def largest_rate(run: Run, meets: Callable[[Summary], bool], tolerance: float) -> Search:
    """Bisects from ``run.rate`` until two rates, one good and one bad, are this factor apart.

    All runs have the same jobs, and arrivals that only scale.
    """
    low, high, rate = 0.0, math.inf, float(f"{run.rate:.3g}")
    runs: list[tuple[float, Summary]] = []
    while low == 0 or high / low > tolerance:
        if rate > _HIGHEST_LOAD * run.rate:
            return Search(math.inf, runs)
        summary = replace(run, rate=rate).summary()
        runs.append((rate, summary))
        if meets(summary):
            low = rate
        else:
            high = rate
        if low == 0:
            rate = high / _STEP
        else:
            rate = low * _STEP if high == math.inf else math.sqrt(low * high)
        rate = float(f"{rate:.3g}")
    return Search(low, runs)


def on_all_cores(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results in the order of the items."""
    return list(_pool().map(function, items))


@cache
def _pool() -> ProcessPoolExecutor:
    # Spawned, not forked: the process that asks may have threads, as under pytest.
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))


def parser(description: str | None, jobs: int) -> argparse.ArgumentParser:
    """The options of every figure."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--jobs", type=int, default=jobs, help=f"jobs of a trace ({jobs})")
    options.add_argument("--seed", type=int, default=0, help="of jobs and arrivals (0)")
    for name in ("sharegpt", "alpaca"):
        options.add_argument(
            f"--{name}",
            metavar="FILE",
            default=name,
            help="real lengths (CSV or JSON) instead of the packaged synthetic ones",
        )
    options.add_argument("--quick", action="store_true", help="few points and few jobs, to try it")
    options.add_argument(
        "--plot-dir",
        type=Path,
        default=Path(__file__).parent / "plots",
        help="where plots (PNG) and numbers (JSON) go (beside this script)",
    )
    return options


def parse(
    options: argparse.ArgumentParser, argv: Sequence[str] | None, quick_jobs: int = 40
) -> argparse.Namespace:
    args = options.parse_args(argv)
    if args.quick:
        args.jobs = min(args.jobs, quick_jobs)
    args.plot_dir.mkdir(parents=True, exist_ok=True)
    return args


def lengths_of(args: argparse.Namespace, name: str) -> Lengths:
    """Lengths of ``sharegpt`` or ``alpaca``, from a file if one was named."""
    return load_lengths(getattr(args, name), AUTHORS_LIMITS)


def jobs_of(args: argparse.Namespace, dataset: str) -> int:
    jobs: int = args.jobs * (ALPACA_JOBS if dataset == "alpaca" else 1)
    return jobs


def fcfs_run(args: argparse.Namespace, system: System, dataset: str) -> Run:
    """At the rate that full batches serve, with host memory."""
    lengths = lengths_of(args, dataset)
    return Run(
        system,
        lengths,
        system.capacity(lengths),
        jobs_of(args, dataset),
        args.seed,
        scheduler("fcfs"),
        system.swapping(),
    )


def mean_normalized(summary: Summary) -> float:
    return summary.normalized_latency_s.mean


def mean_jct(summary: Summary) -> float:
    return summary.latency_s.mean


def add_dataset(options: argparse.ArgumentParser) -> None:
    """Of figures that show all of ``DATASETS``."""
    options.add_argument("--dataset", choices=list(DATASETS), help="only this one (both)")


def datasets_of(args: argparse.Namespace) -> Sequence[str]:
    if args.quick:
        return ("alpaca",)
    return tuple(DATASETS) if args.dataset is None else (args.dataset,)


def new_table(title: str, caption: str, *headers: str) -> Table:
    table = Table(
        title=title, caption=caption, caption_justify="left", title_justify="left", box=box.SIMPLE
    )
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return "–"
    if math.isinf(value):
        return "none"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def save_json(args: argparse.Namespace, name: str, values: Any) -> None:
    settings = {"jobs": args.jobs, "seed": args.seed, "quick": args.quick}
    document = {"settings": settings, "values": values}
    (args.plot_dir / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def save_plot(
    args: argparse.Namespace,
    name: str,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    xlabel: str,
    ylabel: str,
    *,
    log: bool = False,
) -> None:
    """Panels beside each other: title → line's label → (x values, y values)."""
    figure = Figure(figsize=(4.5 * len(panels), 3.8), dpi=150, layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for label, (xs, ys) in lines.items():
            axes.plot(xs, ys, marker="o", label=label)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        if log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(args.plot_dir / f"{name}.png")
