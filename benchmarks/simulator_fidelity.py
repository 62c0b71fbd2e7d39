"""Is the simulator right? The same trace on the real engine and in the simulator, side by side.

    python benchmarks/simulator_fidelity.py                 # profile first, about three minutes
    python benchmarks/simulator_fidelity.py --profile FILE  # of `fastserve profile`

OPT-125M with dummy weights on this machine: Poisson arrivals, log-normal lengths, forced outputs.
"simulated" takes iteration times from the profile as it was measured. "corrected" multiplies them
with what all iterations of the run took over what the profile said, as the engine does online for
the latest ones: the rest of the difference is the simulator's, not the machine's, whose speed
drifts between one run and the next.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from fastserve_backend import LLM
from fastserve_backend.profile.correction import CorrectedLatency
from fastserve_backend.profile.iteration import IterationLoad, LatencyModel
from fastserve_backend.profile.latency import LatencyProfile
from fastserve_backend.simulation.memory import memory_of_profile
from fastserve_backend.simulation.simulator import simulate
from fastserve_client.report import summarize
from replay import DTYPE, MODEL, Lengths, on_the_engine, workload
from rich.console import Console
from rich.table import Table

PROMPTS, OUTPUTS = Lengths(3.6, 0.9, 256), Lengths(3.0, 0.9, 96)


class RunLatency(CorrectedLatency):
    """Corrected by the whole run, with prefill and without, not by its last iterations."""

    def __init__(self, model: LatencyModel) -> None:
        super().__init__(model)
        self._taken_s = {True: 0.0, False: 0.0}  # whether an iteration has prefill -> seconds
        self._predicted_s = {True: 0.0, False: 0.0}

    def observe(self, load: IterationLoad, elapsed_s: float) -> bool:
        has_prefill = load.num_decodes < load.num_tokens
        self._taken_s[has_prefill] += elapsed_s
        self._predicted_s[has_prefill] += self.model.iteration_s(load)
        return super().observe(load, elapsed_s)

    def ratio(self, has_prefill: bool) -> float:
        return self._taken_s[has_prefill] / self._predicted_s[has_prefill]


class AtRatio(LatencyModel):
    """The profile times the ratios of a run."""

    def __init__(self, run: RunLatency) -> None:
        self._run = run

    def iteration_s(self, load: IterationLoad) -> float:
        has_prefill = load.num_decodes < load.num_tokens
        return self._run.ratio(has_prefill) * self._run.model.iteration_s(load)


def measured_profile(directory: Path) -> Path:
    path = directory / "profile.json"
    command = [sys.executable, "-m", "fastserve_backend.cli", "profile", MODEL]
    command += ["--load-format", "dummy", "--dtype", DTYPE, "--output", str(path)]
    subprocess.run(command, check=True)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", type=Path, help="default: measure one first")
    parser.add_argument("--rate", type=float, default=2.0, help="jobs/s")
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--policies", default="fcfs,skip_join_mlfq")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        profile = LatencyProfile.load(arguments.profile or measured_profile(Path(directory)))
    trace = workload(arguments.rate, arguments.jobs, 0, PROMPTS, OUTPUTS)
    table = Table(
        title=f"{arguments.jobs} jobs at {arguments.rate:g} jobs/s: normalized latency, ms"
    )
    for heading in ("policy", "", "real", "simulated", "off by", "corrected", "off by"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    errors: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.repeats):
        for policy in arguments.policies.split(","):
            with LLM(MODEL, load_format="dummy", dtype=DTYPE, policy=policy) as llm:
                run = llm.engine.profile = RunLatency(profile)
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
                for latency in (profile, AtRatio(run))
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
