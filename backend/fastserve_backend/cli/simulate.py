"""``fastserve simulate``: what each policy does to latency on a model, a cluster and a workload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastserve_bench.outcome import LoadOutcome
from fastserve_bench.report.output import Output, write_json
from fastserve_bench.report.plot import plot_sweep
from fastserve_bench.report.printing import print_tables
from fastserve_bench.report.summary import summarize
from fastserve_bench.report.sweep import SweepPoint, sweep_to_json
from fastserve_bench.report.table import sweep_table
from fastserve_bench.tables import group_tables
from fastserve_bench.workload import TraceJob, Workload, check_trace_fits, mean_rate
from fastserve_client.terminal import ExitCode
from rich.console import Console
from rich.progress import Progress

from fastserve_backend.checkpoints.load_config import load_model_config
from fastserve_backend.checkpoints.model_config import DType, ModelConfig
from fastserve_backend.config import EngineConfig
from fastserve_backend.config_sections import KVCacheSection, SchedulerSection
from fastserve_backend.engine.loop_setup import KVMemory
from fastserve_backend.errors import ConfigError
from fastserve_backend.profile.hardware import find_hardware
from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.rank_protocol.layer_kinds import BlockNeeds
from fastserve_backend.simulation.memory import memory_of_profile, memory_of_roofline
from fastserve_backend.simulation.predictions import make_predictions
from fastserve_backend.simulation.simulator import longest_job, simulate

# The largest --prediction-error: a prediction that is off by a factor of e¹⁰ says nothing.
_MOST_ERROR = 10.0


@dataclass(frozen=True)
class ModelledHardware:
    """The hardware that is simulated: a measured profile, or GPUs by their data sheets."""

    profile: Path | None
    gpu: str
    """A name that ``find_hardware`` knows; used without a profile."""


def simulate_command(
    config: EngineConfig,
    hardware: ModelledHardware,
    workload: Workload,
    output: Output,
    *,
    policies: Sequence[str],
    rates: Sequence[float],
    prediction_error: float | None,
) -> ExitCode:
    """Simulate every policy at every rate, write JSON and a plot if asked to, and print a table.

    Args:
        rates: jobs per second; empty for a data set with timestamps of its own.
        prediction_error: standard deviation of ``ln(predicted / real)`` of output lengths; None:
            nothing is predicted.

    Returns:
        The exit code for the process.

    Raises:
        ConfigError, ModelError: the configuration, the model or the hardware cannot be used.
        WorkloadError: the workload cannot be used or has a job that is too long for the model, or
            a file cannot be written.
    """
    output.check()
    if prediction_error is not None and not 0 <= prediction_error <= _MOST_ERROR:
        raise ConfigError(
            f"prediction_error: got {prediction_error:g}; must be from 0 to {_MOST_ERROR:g}"
        )
    schedulers = [config.with_keys(policy=policy).scheduler for policy in policies]
    modelled = _Modelled.of(config, hardware)
    model, memory = modelled.model, modelled.memory
    block_size = config.kv_cache.block_size
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(_describe_memory(model, memory, block_size))
    loads = []
    for rate in rates or (None,):
        loads.append(_Load.of(workload, rate, prediction_error))
        check_trace_fits(loads[-1].trace, model.max_model_len)
        check_trace_fits(
            loads[-1].trace,
            longest_job(memory, config.kv_cache, config.scheduler),
            "device_blocks",
        )
    runs = _sweep(modelled, config.kv_cache, schedulers, loads, console)
    points = [SweepPoint(*run[:2], summarize(run[2].records)) for run in runs]
    try:
        if output.json is not None:
            settings = _settings(config, hardware, modelled, workload, prediction_error)
            write_json(output.json, sweep_to_json(points, settings))
        if output.plot is not None:
            plot_sweep(points, output.plot, slo_s=config.scheduler.slo_ms / 1e3, title=model.name)
    finally:  # after the files, which are then written even if the reader of stdout goes away
        by_group = group_tables([(*run[:2], [run[2]]) for run in runs], "rate\njobs/s")
        code = print_tables([sweep_table(points), *by_group])
    return code


def _describe_memory(model: ModelConfig, memory: KVMemory, block_size: int) -> str:
    described = (
        f"{model.name}: {memory.num_blocks} KV blocks of {block_size} tokens and "
        f"{memory.num_host_blocks} on the host"
    )
    needs = BlockNeeds(block_size, memory.kinds)
    if not needs.has_windows:
        return described
    longest = model.max_model_len
    without_windows = needs.num_groups * -(-longest // block_size)
    return (
        f"{described}; each has {model.kv_depth} of the {model.num_layers} layers, and a job of "
        f"{longest} tokens holds {needs.computed(longest)} of them, not {without_windows}, because "
        "of its windows"
    )


@dataclass(frozen=True)
class _Modelled:
    """The model on the simulated hardware."""

    model: ModelConfig
    latency: LatencyModel
    memory: KVMemory

    @classmethod
    def of(cls, config: EngineConfig, hardware: ModelledHardware) -> _Modelled:
        kv, parallel = config.kv_cache, config.parallel
        profile = None if hardware.profile is None else LatencyProfile.load(hardware.profile)
        model = load_model_config(
            config.model.model,
            load_format=config.model.load_format,
            device="cuda",
            dtype=config.model.dtype if profile is None else _measured_dtype(profile, config),
            quantization=config.model.quantization,
            kv_dtype=kv.device_dtype,
            max_model_len=config.model.max_model_len,
        )
        if profile is not None:
            profile.require(model, parallel, kv.block_size)
            return cls(model, profile, memory_of_profile(profile, model, kv))
        roofline = Roofline(
            model,
            find_hardware(hardware.gpu),
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
        )
        step_tokens = config.scheduler.max_num_batched_tokens
        return cls(model, roofline, memory_of_roofline(roofline, model, kv, step_tokens))


def _measured_dtype(profile: LatencyProfile, config: EngineConfig) -> DType:
    """The profile's dtype. Raises ConfigError: the configuration asks for another."""
    measured = profile.identity.dtype
    if config.model.dtype not in ("auto", measured):
        raise ConfigError(
            f"profile: was measured with dtype {measured}, not {config.model.dtype}; set "
            "model.dtype to that, or to auto"
        )
    return measured


@dataclass(frozen=True)
class _Load:
    """The jobs at one rate."""

    rate: float
    trace: list[TraceJob]
    predictions: list[int] | None

    @classmethod
    def of(cls, workload: Workload, rate: float | None, prediction_error: float | None) -> _Load:
        trace = workload.trace(rate)
        predictions = None
        if prediction_error is not None:
            outputs = [job.output_tokens for job in trace]
            predictions = make_predictions(outputs, prediction_error, workload.seed)
        return cls(mean_rate(trace) if rate is None else rate, trace, predictions)


def _sweep(
    modelled: _Modelled,
    kv_cache: KVCacheSection,
    schedulers: Sequence[SchedulerSection],
    loads: Sequence[_Load],
    console: Console,
) -> list[tuple[str, float, LoadOutcome]]:
    """Simulate every policy under every load, and show the progress.

    Returns:
        (policy, rate, its jobs) of each simulation.
    """
    runs = []
    num_iterations = 0
    started_s = time.monotonic()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(loads) * len(schedulers))
        for scheduler in schedulers:
            for load in loads:
                simulation = simulate(
                    load.trace,
                    scheduler,
                    kv_cache,
                    modelled.latency,
                    modelled.memory,
                    max_model_len=modelled.model.max_model_len,
                    rotary_switch=modelled.model.rotary_switch,
                    predictions=load.predictions,
                )
                num_iterations += simulation.counters.iterations
                runs.append((scheduler.policy, load.rate, LoadOutcome(simulation.records)))
                bar.advance(task)
            console.print(simulation.policy)
    per_minute = num_iterations / (time.monotonic() - started_s) * 60
    console.print(f"{num_iterations} iterations simulated, {per_minute:.0f} a minute")
    return runs


def _settings(
    config: EngineConfig,
    hardware: ModelledHardware,
    modelled: _Modelled,
    workload: Workload,
    prediction_error: float | None,
) -> dict[str, Any]:
    return {
        "model": modelled.model.name,
        "config": config.model_dump(mode="json"),
        "cluster": {
            "profile": None if hardware.profile is None else str(hardware.profile),
            "hardware": hardware.gpu if hardware.profile is None else None,
            "num_blocks": modelled.memory.num_blocks,
            "num_host_blocks": modelled.memory.num_host_blocks,
        },
        "workload": asdict(workload),
        "prediction_error": prediction_error,
    }
