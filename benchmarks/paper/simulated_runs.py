"""What the figures run: jobs on a system with some policy and memory, on all cores.

Everything is simulated: the engine's own step loop, policies and KV decisions, on the iteration
times of a roofline model.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Any, TypeVar

from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import KVCacheSection, SchedulerSection
from fastserve_backend.engine.loop_setup import KVMemory, MakePolicy
from fastserve_backend.profile.hardware import find_hardware
from fastserve_backend.profile.iteration import IterationLoad
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.simulation.memory import memory_of_roofline
from fastserve_backend.simulation.simulator import Simulation, simulate
from fastserve_bench.report.summary import Summary, summarize
from fastserve_bench.workload import Lengths, poisson_trace

from benchmarks.paper.prediction_errors import PredictionErrors

BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048
BATCH = 16
"""Most jobs in one iteration: FastServe's authors' MaxBatchSize."""
_TYPICAL_CONTEXT = 400  # tokens of a job in the middle of its output

SWAPPING = "KV is swapped to 56 GiB of host memory (strategy proactive)."

Key = TypeVar("Key")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class System:
    """A model in float16 on GPUs of one type."""

    model: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    hardware: str = "a100-40g"
    host_gib: float = 56.0
    """Host memory for KV, shared by the ranks, as in the authors' ShareGPT runs."""

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
        """KV cache with host memory."""
        gib = self.host_gib / (self.tensor_parallel * self.pipeline_parallel)
        return kv_cache(**{"swap_space_gib": gib, **keys})

    @property
    def kv_tokens(self) -> int:
        """Tokens whose K and V the GPUs hold."""
        memory = memory_of_roofline(self.latency, self.config, self.swapping())
        return memory.num_blocks * BLOCK_SIZE

    @property
    def decode_s(self) -> float:
        """One decode iteration of a full batch."""
        return self._decode_s(BATCH)

    def _decode_s(self, num_jobs: int) -> float:
        load = IterationLoad.of([(_TYPICAL_CONTEXT - 1, 1, True)] * num_jobs)
        return self.latency.iteration_s(load)

    def capacity(self, lengths: Lengths, seats: int = BATCH) -> float:
        """Jobs per second that full batches serve, roughly: each prefill runs alone, and decodes
        share iterations."""
        prompt, output = (statistics.fmean(column) for column in zip(*lengths, strict=True))
        fitting = int(self.kv_tokens / (prompt + output / 2))
        num_jobs = min(seats, fitting)
        busy_s = (
            self.latency.prefill_s(round(prompt)) + output * self._decode_s(num_jobs) / num_jobs
        )
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
    """Errors of the predicted output lengths; ``None``: nothing is predicted."""
    policy_of: MakePolicy | None = None
    """A policy that the product does not have, instead of the scheduler's."""
    duration_s: float | None = None
    """Jobs arrive for this long, instead of ``num_jobs``: more of them at a higher rate."""

    @property
    def memory(self) -> KVMemory:
        return memory_of_roofline(self.system.latency, self.system.config, self.kv_cache)

    def simulate(self) -> Simulation:
        num_jobs = self.num_jobs
        if self.duration_s is not None:
            num_jobs = max(1, round(self.rate * self.duration_s))
        trace = poisson_trace(self.lengths, self.rate, num_jobs, self.seed)
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
            policy_of=self.policy_of,
        )

    def summary(self) -> Summary:
        return summarize(self.simulate().records)


def scheduler(policy: str, max_num_seqs: int = BATCH, **keys: Any) -> SchedulerSection:
    """Configuration of the paper's testbed: whole prefills, the objective of its figures, and a
    promotion threshold that suits 16 seats (docs/paper_results.md)."""
    testbed = {
        "prefill_chunk_tokens": "whole",
        "objective": "normalized_latency",
        "starvation_ms": 30e3,
    }
    keys = {"policy": policy, "max_num_seqs": max_num_seqs, **testbed, **keys}
    return EngineConfig().with_keys(**keys).scheduler


def kv_cache(**keys: Any) -> KVCacheSection:
    return EngineConfig().with_keys(**keys).kv_cache


RECOMPUTE = kv_cache(strategy="recompute")
"""KV cache in device memory alone."""


def on_all_cores(
    function: Callable[[Item], Result], items: Mapping[Key, Item]
) -> dict[Key, Result]:
    """The function's results, by the items' keys."""
    return dict(zip(items, _pool().map(function, items.values()), strict=True))


@cache
def _pool() -> ProcessPoolExecutor:
    # Spawned, not forked: this process may have threads, as under pytest.
    return ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn"))


def mean_normalized(summary: Summary) -> float:
    return summary.normalized_latency_s.mean


def p95_normalized(summary: Summary) -> float:
    return summary.normalized_latency_s.p95


def mean_jct(summary: Summary) -> float:
    return summary.latency_s.mean
