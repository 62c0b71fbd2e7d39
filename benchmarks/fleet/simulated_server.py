"""One server of the fleet: the engine's step loop on modelled ranks, with a clock of its own."""

from __future__ import annotations

from dataclasses import dataclass

from fastserve_backend.config import EngineConfig
from fastserve_backend.engine.delivery import NewToken, OnJobEnd
from fastserve_backend.engine.loop_setup import LoopSetup
from fastserve_backend.engine.picture import take_picture
from fastserve_backend.job import FinishReason, Job
from fastserve_backend.metrics.counters import EngineCounters
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.simulation.memory import memory_of_roofline
from fastserve_backend.simulation.simulated_executor import SimulatedExecutor
from fastserve_backend.system.clock import VirtualClock
from fastserve_client.engine_state import EngineState

from benchmarks.race_cells import System


class SlowedModel(LatencyModel):
    """Iterations take so many times as long as with ``model``."""

    def __init__(self, model: LatencyModel, factor: float) -> None:
        self._model, self._factor = model, factor

    def iteration_s(self, load: IterationLoad) -> float:
        return self._factor * self._model.iteration_s(load)


@dataclass(slots=True)
class Progress:
    """What a cycle has brought its clients."""

    first_tokens: list[Job]
    ends: list[Job]


class _Delivery:
    """A ``Delivery`` without clients: notes first and last tokens."""

    is_empty = True

    def __init__(self) -> None:
        self.progress = Progress([], [])

    def open_stream(self, job: Job) -> None: ...

    def add_token(self, job: Job, token: NewToken, reason: FinishReason | None) -> None:
        if len(job.output_ids) == 1:
            self.progress.first_tokens.append(job)
        if reason is not None:
            self.progress.ends.append(job)

    def flush_tokens(self, on_job_end: OnJobEnd) -> None: ...

    def end_stream(self, job: Job, reason: FinishReason, error: str | None = None) -> None: ...

    def end_all_streams(self, reason: FinishReason, error: str) -> list[Job]:
        return []


class SimulatedServer:
    """A server of ``system``.

    Args:
        slowness: its iterations take so many times as long.
    """

    def __init__(self, system: System, slowness: float = 1.0) -> None:
        config = EngineConfig()
        self.latency = SlowedModel(system.latency, slowness) if slowness != 1 else system.latency
        self.clock = VirtualClock()
        self._delivery = _Delivery()
        self._policy = config.scheduler.policy
        memory = memory_of_roofline(system.latency, system.config, config.kv_cache)
        self.counters = EngineCounters(LatencyHistograms(config.scheduler.slo_ms / 1e3))
        setup = LoopSetup(
            config.scheduler, config.kv_cache, self.latency, self.counters, system.max_model_len
        )
        self.loop = setup.make_loop(
            memory,
            SimulatedExecutor(self.latency, self.clock, memory.link),
            self._delivery,
            self.clock,
            eos_token_ids=(),
            on_job_end=lambda job, reason: None,
            on_step_finished=lambda step, elapsed_s: None,
        )

    def add(self, job: Job, now_s: float) -> None:
        """A job has come. If a step runs now, it waits for its end."""
        self.clock.advance_to(max(now_s, self.clock.now()))
        self.loop.jobs.add(job)

    def run_cycle(self) -> Progress:
        """Returns what has come by ``clock.now()``, when the cycle ends."""
        self._delivery.progress = Progress([], [])
        self.loop.run_cycle()
        return self._delivery.progress

    def picture(self) -> EngineState:
        return take_picture(self.clock.now(), self._policy, self.loop, self.counters, self.latency)
