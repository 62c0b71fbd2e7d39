"""Phase "step": whole decode steps of a rank over their floor, each sent while the one before it
runs, as in serving; beside a hand-written loop; the gap between two of them; the host's work on a
step with a prompt; and the choice of tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial

import torch
from fastserve_backend.checkpoints.model_config import ModelConfig, Quantization
from fastserve_backend.engine.engine import Engine
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.models.loader import torch_dtype
from fastserve_backend.rank_protocol.messages import CopyResult, Step, StepResult
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.worker.model_runner import ModelRunner

from benchmarks.gpu import sampling_speed
from benchmarks.gpu.ceilings import read_rate
from benchmarks.gpu.decode_steps import (
    FIRST_TOKEN,
    blocks_of,
    decode_step,
    load,
    mixed_step,
    steps_ahead,
)
from benchmarks.gpu.phase_context import Context
from benchmarks.gpu.random_models import MODELS, engine_config, largest_model
from benchmarks.gpu.static_loop import StaticLoop, StaticModel
from benchmarks.replay import run_jobs

CONTEXT = 512
BATCHES = (1, 16, 64)
MIXED_BATCH, MIXED_PROMPT = 32, 224
REPEATS = 40
GAP_BATCH, GAP_PROMPT, GAP_TOKENS = 64, 256, 128


def run(context: Context) -> None:
    _gap(context)  # first, because its ranks take all free memory
    rate, _ = read_rate(context.device)
    for name in MODELS[:1] if context.tiny else reversed(MODELS):  # the one with a goal first
        _steps_if_it_fits(context, name, rate)
    _steps_if_it_fits(context, largest_model(context), rate, "int4")
    sampling_speed.run(context)


def _steps_if_it_fits(
    context: Context, name: str, read_bytes_s: float, quantization: Quantization | None = None
) -> None:
    context.device.free()
    try:
        config, seconds = _steps(context, name, read_bytes_s, quantization)
        if quantization is None:
            context.device.free()  # both models together may not fit
            _hand_written(context, name, config, seconds)
    except torch.OutOfMemoryError:
        print(f"  {name}: does not fit into the device's memory")


def _steps(
    context: Context, name: str, read_bytes_s: float, quantization: Quantization | None
) -> tuple[ModelConfig, dict[int, float]]:
    """Returns the model's configuration, and the seconds of a step of each batch size."""
    tokens, batches = (32, (1, 2)) if context.tiny else (CONTEXT, BATCHES)
    seconds: dict[int, float] = {}
    mixed_batch, prompt = (1, 20) if context.tiny else (MIXED_BATCH, MIXED_PROMPT)
    num_blocks = max(batches) * blocks_of(tokens)
    model = load(
        context, name, num_blocks, max(batches), quantization, max_tokens=mixed_batch + prompt
    )
    label = name if quantization is None else f"{name}, {quantization}"
    for number, batch in enumerate(batches):
        step = decode_step(number, batch, tokens)
        alone = context.device.wall_time(partial(model.runner.run, step), REPEATS)
        with steps_ahead(model.runner, step) as run_one:
            timing = context.device.wall_time(run_one, REPEATS)
        # The floor: weights, keys and values are each read once.
        num_bytes = model.bytes_of_weights + batch * model.bytes_of_context(tokens)
        floor_s = num_bytes / read_bytes_s
        context.recorder.row(
            "decode step",
            {"model": label, "batch": batch, "context": tokens},
            {
                "ms": timing.seconds * 1e3,
                "spread": timing.spread,
                "floor, ms": floor_s * 1e3,
                "× floor": timing.seconds / floor_s,
                "tokens/s": batch / timing.seconds,
                "ms, not sent ahead": alone.seconds * 1e3,
            },
        )
        seconds[batch] = timing.seconds
    _mixed(context, label, model.runner, mixed_step(len(batches), mixed_batch, tokens, prompt))
    return model.config, seconds


def _mixed(context: Context, label: str, runner: ModelRunner, step: Step) -> None:
    """How long the host takes to launch a step with a prompt, and the device to compute it. If the
    host takes longer, it is the bound."""
    hosts, devices = [], []
    for _ in range(3 + REPEATS):
        started_s = time.perf_counter()
        launched = runner.launch(step)
        hosts.append(time.perf_counter() - started_s)
        assert launched is not None, "a rank alone answers"
        devices.append(launched.watch.seconds())
    host_s, device_s = statistics.median(hosts[3:]), statistics.median(devices[3:])
    context.recorder.row(
        "step with a prompt",
        {"model": label, "decodes": step.num_decodes, "tokens": len(step.token_ids) // 4},
        {"host, ms": host_s * 1e3, "GPU, ms": device_s * 1e3, "host over GPU": host_s / device_s},
    )


@torch.inference_mode()
def _hand_written(
    context: Context, name: str, config: ModelConfig, ours_s: Mapping[int, float]
) -> None:
    """One graph of a step in plain torch, replayed without a pause.

    Args:
        ours_s: our seconds by batch size.
    """
    tokens = 32 if context.tiny else CONTEXT
    model = StaticModel(config, torch_dtype(config), context.device.torch_device)
    for batch, seconds in ours_s.items():
        timing = context.device.time([StaticLoop(model, batch, tokens).step], calls_in_a_graph=1)
        context.recorder.row(
            "hand-written loop in one CUDA graph",
            {"model": name, "batch": batch, "context": tokens},
            {
                "ms": timing.seconds * 1e3,
                "spread": timing.spread,
                "its time over ours": timing.seconds / seconds,
            },
        )


class _TimedExecutor(DistributedExecutor):
    """Notes the time between two steps' results, and what the rank computed."""

    def __init__(self) -> None:
        super().__init__()
        self.periods: list[tuple[float, float]] = []
        """(seconds since the previous result, seconds computed) of each full-batch decode."""
        self._last_s = 0.0
        self._full: set[int] = set()  # unfinished decodes of the full batch

    def submit(self, step: Step) -> None:
        if step.num_decodes == GAP_BATCH and len(step.query_lens) == 4 * GAP_BATCH:
            self._full.add(step.step_id)
        super().submit(step)

    def collect(self, timeout_s: float | None = None) -> StepResult | CopyResult | None:
        result = super().collect(timeout_s)
        if isinstance(result, StepResult):
            now = time.perf_counter()
            if result.step_id in self._full:
                self._full.remove(result.step_id)
                self.periods.append((now - self._last_s, result.compute_s))
            self._last_s = now
        return result


def _gap(context: Context) -> None:
    """From one step's tokens to the start of the next, through the engine with real ranks."""
    name = largest_model(context)
    config = engine_config(
        context,
        name,
        max_num_seqs=GAP_BATCH,
        max_num_batched_tokens=GAP_BATCH * GAP_PROMPT,
        strategy="recompute",
        policy="fcfs",
    )
    prompt_tokens, output_tokens = (4, 12) if context.tiny else (GAP_PROMPT, GAP_TOKENS)
    executors: list[_TimedExecutor] = []

    def make() -> _TimedExecutor:
        executors.append(_TimedExecutor())
        return executors[-1]

    engine = Engine(config, make_executor=make, start_timeout_s=context.left_s())
    try:
        executors[-1].periods.clear()  # drops the steps that the engine measured its profile with
        params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
        prompts = [
            [FIRST_TOKEN + job + place for place in range(prompt_tokens)]
            for job in range(GAP_BATCH)
        ]
        run_jobs(engine, [(prompt, params) for prompt in prompts], context.left_s())
    finally:
        engine.close()
    # The first decode's gap contains the handling of the prefill's result.
    periods = executors[-1].periods[1:]
    gaps = sorted(period - computed for period, computed in periods)
    context.recorder.row(
        "host gap",
        {"model": name, "batch": GAP_BATCH},
        {
            "ms": statistics.median(gaps) * 1e3,
            "P95, ms": gaps[int(0.95 * len(gaps))] * 1e3,
            "step, ms": statistics.median(period for period, _ in periods) * 1e3,
            "steps": len(gaps),
        },
    )
