"""What races: systems, workloads and policies; and the measures of one run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.profile.hardware import find_hardware
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.simulation.memory import memory_of_roofline
from fastserve_backend.simulation.predictions import make_predictions
from fastserve_backend.simulation.simulator import Simulation, simulate
from fastserve_bench.report.summary import summarize
from fastserve_bench.workload import LengthLimits, TraceJob, Workload

# Host memory for swapped KV, for all ranks together, as FastServe's authors have.
HOST_GIB = 48.0
# Standard deviation of ln(predicted / real) of predicted lengths.
PREDICTION_ERROR = 0.5
# A job is good if its first token comes within this, and later ones within this on average.
FIRST_TOKEN_S, TOKEN_S = 3.0, 0.1


@dataclass(frozen=True, slots=True)
class System:
    """A model on simulated GPUs. ``max_model_len`` may exceed the model's own positions."""

    name: str
    model: str
    hardware: str
    max_model_len: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def config(self) -> ModelConfig:
        config = load_model_config(self.model, load_format="dummy", dtype="float16", device="cuda")
        return replace(config, max_model_len=self.max_model_len)

    @property
    def latency(self) -> Roofline:
        return _latency(self)


@cache
def _latency(system: System) -> Roofline:
    return Roofline(
        system.config,
        find_hardware(system.hardware),
        system.tensor_parallel,
        system.pipeline_parallel,
    )


SYSTEMS = {
    system.name: system
    for system in (
        System("opt-13b a100-40g", "opt-13b", "a100-40g", 2048),
        System("llama-3-8b a100-40g", "llama-3-8b", "a100-40g", 32768),
        System("llama-3-8b a100-80g", "llama-3-8b", "a100-80g", 32768),
        System("llama-3-8b h100", "llama-3-8b", "h100", 32768),
        System("opt-175b 16 x a100-40g", "opt-175b", "a100-40g", 2048, 8, 2),
    )
}


@dataclass(frozen=True, slots=True)
class Course:
    """A workload on a system."""

    system: str
    workload: str
    num_jobs: int
    arrivals: str | None = None
    host_gib: float = HOST_GIB
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{Path(self.workload).name}, {self.system}"

    def trace(self, rate: float | None) -> list[TraceJob]:
        """The workload's jobs, without those that are too long for the model."""
        limits = LengthLimits(max_total_tokens=SYSTEMS[self.system].max_model_len - 1)
        arrivals = self.arrivals
        workload = Workload(self.workload, self.num_jobs, self.seed, limits, arrivals=arrivals)
        return workload.trace(rate)


# So many jobs that the end of a trace, with ever fewer of them, counts for little; so few that the
# race takes a quarter of an hour.
COURSES = (
    Course("opt-13b a100-40g", "sharegpt", 750),
    Course("opt-13b a100-40g", "alpaca", 2400),
    Course("llama-3-8b a100-40g", "code", 1800, "bursts"),
    Course("llama-3-8b a100-80g", "sharegpt", 1800),
    Course("llama-3-8b a100-80g", "chat", 2100),
    Course("llama-3-8b a100-80g", "code", 1800, "bursts"),
    Course("llama-3-8b a100-80g", "long-context", 450),
    Course("llama-3-8b a100-80g", "agents", 1800, "bursts"),
    Course("llama-3-8b a100-80g", "batch-beside-chat", 1800),
    Course("llama-3-8b h100", "chat", 2700),
    Course("llama-3-8b h100", "code", 1800, "bursts"),
    Course("opt-175b 16 x a100-40g", "sharegpt", 750),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, with the settings that differ from the shipped ones."""

    name: str
    policy: str
    keys: dict[str, Any] = field(default_factory=dict)
    is_predicted: bool = False


FCFS = (
    Variant("fcfs", "fcfs"),
    Variant("fcfs, chunks of 512", "fcfs", {"prefill_chunk_tokens": 512}),
    Variant("fcfs, whole prompts", "fcfs", {"prefill_chunk_tokens": "whole"}),
)
DEFAULT = EngineConfig().scheduler.policy
OURS = (Variant(DEFAULT, DEFAULT), Variant(f"{DEFAULT}, predicted", DEFAULT, is_predicted=True))
ORACLE = Variant("srpt (oracle)", "srpt")
OTHERS = (
    Variant("gittins, normalized latency", "gittins", {"objective": "normalized_latency"}),
    Variant("gittins, jct", "gittins", {"objective": "jct"}),
    Variant("skip_join_mlfq", "skip_join_mlfq"),
    Variant("speculative, predicted", "speculative", is_predicted=True),
    Variant("mlfq", "mlfq"),
    Variant("fixed_priority", "fixed_priority"),
    Variant("sarathi_edf", "sarathi_edf"),
    Variant("uniboost", "uniboost"),
    ORACLE,
)
VARIANTS = (*FCFS, *OURS, *OTHERS)


@dataclass(frozen=True, slots=True)
class Cell:
    """A course at a load."""

    course: Course
    load: float | None
    """Rate over ``capacity``; None: the trace's own gaps."""
    capacity: float
    """Jobs per second that FCFS serves when all are there at once."""

    @property
    def name(self) -> str:
        return f"{self.course.name}, " + (
            "own gaps" if self.load is None else f"load {self.load:g}"
        )


@dataclass(frozen=True, slots=True)
class Result:
    """Measures of one variant in one cell. Times are in seconds."""

    cell: str
    variant: str
    idle: float
    """Mean normalized latency of jobs that have the system to themselves."""
    mean: float
    p95: float
    p99: float
    """Normalized latency, as ``mean`` and ``p95``."""
    first_p95: float
    first_p99: float
    """Time to the first token."""
    gap_p95: float
    gap_p99: float
    """Time between tokens."""
    jct: float
    jct_p95: float
    jct_p99: float
    """Completion time: to the last token."""
    slowdown: float
    """Completion time over that on an idle system, for the longest tenth of jobs."""
    tokens_per_s: float
    violations: float
    """Share of jobs that miss an objective: ``FIRST_TOKEN_S``, or ``TOKEN_S`` for later tokens."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def capacity(course: Course) -> float:
    """Jobs per second of the course that FCFS serves when all are there at once."""
    # Any rate will do: it decides when jobs arrive, not which jobs.
    trace = [replace(job, arrival_s=0.0) for job in course.trace(1.0)]
    return len(trace) / simulate_course(course, FCFS[0], trace).ended_s


def run(cell: Cell, variant: Variant) -> Result:
    course = cell.course
    trace = course.trace(None if cell.load is None else cell.load * cell.capacity)
    simulation = simulate_course(course, variant, trace)
    records, summary = simulation.records, summarize(simulation.records)
    assert summary.longest_tenth_slowdown is not None
    gap_p95, gap_p99 = np.percentile(simulation.token_gaps_s, (95, 99)).tolist()
    misses = sum(
        record.ttft_s > FIRST_TOKEN_S or (record.tpot_s or 0.0) > TOKEN_S for record in records
    )
    return Result(
        cell=cell.name,
        variant=variant.name,
        idle=float(np.mean([(record.alone_s or 0) / record.output_tokens for record in records])),
        mean=summary.normalized_latency_s.mean,
        p95=summary.normalized_latency_s.p95,
        p99=summary.normalized_latency_s.p99,
        first_p95=summary.ttft_s.p95,
        first_p99=summary.ttft_s.p99,
        gap_p95=gap_p95,
        gap_p99=gap_p99,
        jct=summary.latency_s.mean,
        jct_p95=summary.latency_s.p95,
        jct_p99=summary.latency_s.p99,
        slowdown=summary.longest_tenth_slowdown,
        tokens_per_s=summary.output_tokens_per_s,
        violations=misses / len(records),
    )


def simulate_course(course: Course, variant: Variant, trace: list[TraceJob]) -> Simulation:
    """Serve ``trace`` on the course's system."""
    system = SYSTEMS[course.system]
    num_ranks = system.tensor_parallel * system.pipeline_parallel
    config = EngineConfig().with_keys(
        policy=variant.policy, swap_space_gib=course.host_gib / num_ranks, **variant.keys
    )
    predictions = None
    if variant.is_predicted:
        predictions = make_predictions([job.output_tokens for job in trace], PREDICTION_ERROR, 0)
    return simulate(
        trace,
        config.scheduler,
        config.kv_cache,
        system.latency,
        memory_of_roofline(system.latency, system.config, config.kv_cache),
        max_model_len=system.max_model_len,
        predictions=predictions,
    )
