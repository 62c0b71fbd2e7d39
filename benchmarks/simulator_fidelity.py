"""Is the simulator right? The same trace on the real engine and in the simulator, side by side.

    python -m benchmarks.simulator_fidelity               # `fastserve profile` first
    python -m benchmarks.simulator_fidelity --no-profile  # with the profile of an earlier run

OPT-125M with dummy weights on this machine: Poisson arrivals, log-normal lengths, forced outputs.
Engine and simulator take the profile in the cache, so they begin with the same quanta. "simulated"
takes iteration times from the profile as it was measured. "corrected" multiplies them by the ratio
of the run's iteration times to the profile's, as the engine does while it serves. That removes the
drift of the machine's speed from run to run: the rest of the difference is the simulator's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from dataclasses import dataclass

from fastserve_backend import LLM
from fastserve_backend.profile.correction import CorrectedLatency
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.simulation.memory import memory_of_profile
from fastserve_backend.simulation.simulator import simulate
from fastserve_bench.report.summary import summarize
from fastserve_bench.workload import TraceJob, poisson_trace
from rich.console import Console
from rich.table import Table

from benchmarks.replay import on_the_engine

MODEL, DTYPE = "opt-125m", "bfloat16"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens, at least 1."""

    mu: float
    sigma: float
    most: int

    def draw(self, rng: random.Random) -> int:
        return min(self.most, round(rng.lognormvariate(self.mu, self.sigma)) + 1)


PROMPTS, OUTPUTS = Lengths(3.6, 0.9, 256), Lengths(3.0, 0.9, 96)


def workload(rate: float, num_jobs: int, seed: int) -> list[TraceJob]:
    rng = random.Random(seed)
    lengths = [(PROMPTS.draw(rng), OUTPUTS.draw(rng)) for _ in range(1000)]
    return poisson_trace(lengths, rate, num_jobs, seed)


class RunLatency(LatencyModel):
    """The profile, corrected by the ratio of a run's iteration times to it, with and without
    prefill.

    Args:
        observed: the model that the engine and its policy predict with; it goes on correcting
            itself.
    """

    def __init__(self, observed: CorrectedLatency) -> None:
        self.profile = observed.model
        self._taken_s = {True: 0.0, False: 0.0}  # whether an iteration has prefill -> seconds
        self._predicted_s = {True: 0.0, False: 0.0}
        observe = observed.observe

        def observe_too(load: IterationLoad, elapsed_s: float) -> bool:
            self._taken_s[_has_prefill(load)] += elapsed_s
            self._predicted_s[_has_prefill(load)] += self.profile.iteration_s(load)
            return observe(load, elapsed_s)

        observed.observe = observe_too  # type: ignore[method-assign]

    def ratio(self, has_prefill: bool) -> float:
        return self._taken_s[has_prefill] / self._predicted_s[has_prefill]

    def iteration_s(self, load: IterationLoad) -> float:
        return self.ratio(_has_prefill(load)) * self.profile.iteration_s(load)


def _has_prefill(load: IterationLoad) -> bool:
    return load.num_decodes < load.num_tokens


def measure_profile() -> None:
    """Measures the profile, and saves it where the engine's next start finds it."""
    command = [sys.executable, "-m", "fastserve_backend", "profile", MODEL]
    subprocess.run([*command, "--load-format", "dummy", "--dtype", DTYPE], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--no-profile", action="store_true", help="take what the engine finds in its cache"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="jobs/s")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--policies", default="fcfs,skip_join_mlfq")
    arguments = parser.parse_args()
    if not arguments.no_profile:
        measure_profile()
    trace = workload(arguments.rate, arguments.jobs, seed=0)
    table = Table(
        title=f"{arguments.jobs} jobs at {arguments.rate:g} jobs/s: normalized latency, ms"
    )
    for heading in ("policy", "", "real", "simulated", "off by", "corrected", "off by"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    errors: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.repeats):
        for policy in arguments.policies.split(","):
            with LLM(MODEL, load_format="dummy", dtype=DTYPE, policy=policy) as llm:
                profile = llm.engine.profile.model
                assert isinstance(profile, LatencyProfile)
                run = RunLatency(llm.engine.profile)
                real = summarize(on_the_engine(llm.engine, trace))
                scheduler = llm.engine.config.scheduler
                kv_cache = llm.engine.config.kv_cache
                memory = memory_of_profile(profile, llm.engine.model_config, kv_cache)

            plain, corrected = (
                summarize(
                    simulate(
                        trace, scheduler, kv_cache, latency, memory, max_model_len=2048
                    ).records
                )
                for latency in (profile, run)
            )
            for name in ("mean", "p95"):
                values = [
                    getattr(one.normalized_latency_s, name) for one in (real, plain, corrected)
                ]
                off = [value / values[0] - 1 for value in values[1:]]
                for column, error in zip(("simulated", "corrected"), off, strict=True):
                    errors.setdefault((name, column), []).append(abs(error))
                table.add_row(
                    policy, name, f"{values[0] * 1e3:.1f}",
                    f"{values[1] * 1e3:.1f}", f"{off[0]:+.0%}",
                    f"{values[2] * 1e3:.1f}", f"{off[1]:+.0%}",
                )  # fmt: skip
            Console().print(
                f"{policy}: iterations took {run.ratio(False):.2f} (decode) and "
                f"{run.ratio(True):.2f} (with prefill) times the profile's prediction"
            )
    console = Console()
    console.print(table)
    for (name, column), values in errors.items():
        console.print(f"{column}, {name}: median error {statistics.median(values):.0%}")


if __name__ == "__main__":
    main()
