"""``fastserve simulate``: what each policy does to latency on a model, a cluster and a workload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastserve_client.report import (
    SweepPoint,
    plot_sweep,
    summarize,
    sweep_table,
    sweep_to_json,
)
from fastserve_client.report.output import Output
from fastserve_client.workload import Workload, check_trace_fits, mean_rate
from rich.console import Console
from rich.progress import Progress

from fastserve_backend.config import EngineConfig
from fastserve_backend.errors import ConfigError
from fastserve_backend.models.config import ModelConfig, load_model_config
from fastserve_backend.profile.hardware import find_hardware
from fastserve_backend.profile.iteration import LatencyModel
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.profile.roofline import Roofline
from fastserve_backend.simulation.memory import KVMemory, memory_of_profile, memory_of_roofline
from fastserve_backend.simulation.predictions import make_predictions
from fastserve_backend.simulation.simulator import simulate

# Of --prediction-error: a prediction off by a factor of e¹⁰ is none.
_MOST_ERROR = 10.0


@dataclass(frozen=True)
class Cluster:
    """Where the model runs: a measured profile, or GPUs that are not here."""

    profile: Path | None
    hardware: str


def simulate_command(
    config: EngineConfig,
    cluster: Cluster,
    workload: Workload,
    *,
    policies: Sequence[str],
    rates: Sequence[float],
    prediction_error: float | None,
    output: Path | None,
    plot: Path | None,
) -> None:
    """Simulate every policy at every rate; print a table, write JSON and plot where asked to.

    Args:
        rates: jobs per second; empty for a data set with timestamps of its own.
        prediction_error: standard deviation of ``ln(predicted / real)`` of output lengths; None:
            nothing is predicted.

    Raises:
        ConfigError, ModelError: the configuration, the model or the cluster cannot be used.
        WorkloadError: the workload cannot be used, or has a job too long for the model; a file
            cannot be written.
    """
    Output(output, plot).check()
    if prediction_error is not None and not 0 <= prediction_error <= _MOST_ERROR:
        raise ConfigError(
            f"prediction_error: got {prediction_error:g}; must be from 0 to {_MOST_ERROR:g}"
        )
    schedulers = [config.with_keys(policy=policy).scheduler for policy in policies]
    profile = None if cluster.profile is None else LatencyProfile.load(cluster.profile)
    model = load_model_config(
        config.model.model,
        load_format=config.model.load_format,
        device="cuda",
        dtype=config.model.dtype if profile is None else _measured_dtype(profile, config),
        max_model_len=config.model.max_model_len,
    )
    latency, memory = _latency(config, cluster.hardware, profile, model)
    block_size = config.kv_cache.block_size
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(
        f"{model.name}: {memory.num_blocks} KV blocks of {block_size} tokens and "
        f"{memory.num_host_blocks} on the host"
    )
    points = []
    num_iterations = 0
    started_s = time.monotonic()
    traces = []
    for rate in rates or (None,):
        trace = workload.trace(rate)
        predictions = None
        if prediction_error is not None:
            outputs = [job.output_tokens for job in trace]
            predictions = make_predictions(outputs, prediction_error, workload.seed)
        traces.append((rate, trace, predictions))
        check_trace_fits(trace, min(model.max_model_len, memory.num_blocks * block_size))
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(traces) * len(schedulers))
        for scheduler in schedulers:
            for rate, trace, predictions in traces:
                simulation = simulate(
                    trace,
                    scheduler,
                    config.kv_cache,
                    latency,
                    memory,
                    max_model_len=model.max_model_len,
                    predictions=predictions,
                )
                num_iterations += simulation.counters.iterations
                points.append(
                    SweepPoint(
                        scheduler.policy,
                        mean_rate(trace) if rate is None else rate,
                        summarize(simulation.records),
                    )
                )
                bar.advance(task)
            console.print(simulation.policy)
    per_minute = num_iterations / (time.monotonic() - started_s) * 60
    console.print(f"{num_iterations} iterations simulated, {per_minute:.0f} a minute")
    Console().print(sweep_table(points))
    settings = {
        "model": model.name,
        "config": config.model_dump(mode="json"),
        "cluster": {
            "profile": None if cluster.profile is None else str(cluster.profile),
            "hardware": None if cluster.profile else cluster.hardware,
            "num_blocks": memory.num_blocks,
            "num_host_blocks": memory.num_host_blocks,
        },
        "workload": {
            "dataset": workload.dataset,
            "num_jobs": workload.num_jobs,
            "seed": workload.seed,
            "scale": workload.scale,
            "length_ratio": workload.length_ratio,
        },
        "prediction_error": prediction_error,
    }
    try:
        if output is not None:
            output.write_text(sweep_to_json(points, settings), encoding="utf-8")
        if plot is not None:
            plot_sweep(points, plot, slo_s=config.scheduler.slo_ms / 1e3, title=model.name)
    except OSError as error:
        raise ConfigError(f"output: cannot write {error.filename}: {error.strerror}") from None


def _measured_dtype(profile: LatencyProfile, config: EngineConfig) -> str:
    """Raises ConfigError: another is asked for."""
    measured = profile.identity.dtype
    if config.model.dtype not in ("auto", measured):
        raise ConfigError(
            f"profile: was measured with dtype {measured}, not {config.model.dtype}; set "
            "model.dtype to that, or to auto"
        )
    return measured


def _latency(
    config: EngineConfig, hardware: str, profile: LatencyProfile | None, model: ModelConfig
) -> tuple[LatencyModel, KVMemory]:
    """Iteration times, and the KV blocks."""
    kv = config.kv_cache
    parallel = config.parallel
    if profile is not None:
        profile.require(model, parallel, kv.block_size)
        return profile, memory_of_profile(profile, model, kv)
    roofline = Roofline(
        model,
        find_hardware(hardware),
        parallel.tensor_parallel_size,
        parallel.pipeline_parallel_size,
    )
    return roofline, memory_of_roofline(roofline, model, kv)
