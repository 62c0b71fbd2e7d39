"""How soon first tokens come from a fleet of simulated servers, by how servers are chosen.

    python -m benchmarks.fleet                               # 4 servers, all sides, minutes
    python -m benchmarks.fleet --servers 256 --span 60 --sides "round robin;ours" --seeds 1
    python -m benchmarks.fleet --capacity 0.1,0.15,0.2       # where round robin's queue grows

Llama 3 8B on one V100-32G a server, the engine's own step loop with its default policy and prefix
caching. Chats of several turns share 16 system prompts. The load is the rate of new chats over
that at which the queue of round robin begins to grow for ever. docs/replicas.md has the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.conversations import make_conversations
from benchmarks.fleet.sides import BASE, SIDES
from benchmarks.fleet.simulated_server import SimulatedServer
from benchmarks.fleet.simulation import FleetSimulation, Outcome
from benchmarks.race_cells import System

SYSTEM = System("llama-3-8b v100-32g", "llama-3-8b", "v100-32g", 8192)
# New chats a second and server. With four servers and round robin, the number of unfinished jobs
# stays where it is at 0.22, and grows at 0.25. Larger fleets under round robin bear a little less.
CAPACITY = 0.24
SLOWNESS = 3.0
# Share of chats with a document, and how many fewer chats come then.
DOCUMENTS, DOCUMENTS_RATE = 0.2, 0.8
console = Console(width=140)


@dataclass(frozen=True, slots=True)
class Measures:
    """Of the jobs of one run that arrived after its first third."""

    servers: int
    load: float
    trouble: str
    side: str
    seed: int
    jobs: int
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    latency_s: float
    cached: float
    """Share of prompt tokens that were not computed."""
    retried: int
    lost: int


@dataclass(frozen=True, slots=True)
class Cell:
    """What all sides run."""

    num_servers: int
    load: float
    trouble: str
    span_s: float

    def run(self, side: str, seed: int) -> Measures:
        outcome = self.simulate(side, seed)
        ttft_s = sorted(outcome.ttft_s)
        if not ttft_s:
            sys.exit(f"no job counts within {self.span_s:g} s; choose a longer --span")
        p50, p95, p99 = (ttft_s[int(share * len(ttft_s))] for share in (0.5, 0.95, 0.99))
        return Measures(
            servers=self.num_servers,
            load=self.load,
            trouble=self.trouble,
            side=side,
            seed=seed,
            jobs=outcome.num_ended,
            ttft_p50_s=p50,
            ttft_p95_s=p95,
            ttft_p99_s=p99,
            latency_s=statistics.mean(outcome.latency_s),
            cached=outcome.cached_tokens / outcome.prompt_tokens,
            retried=outcome.num_retried,
            lost=outcome.num_lost,
        )

    def simulate(self, side: str, seed: int) -> Outcome:
        is_slow, dies = self.trouble == "slow", self.trouble == "dies"
        num_servers = self.num_servers
        # What is left when one server has a third of its speed.
        power = num_servers - (1 - 1 / SLOWNESS) * is_slow
        has_documents = self.trouble == "documents"
        rate = self.load * CAPACITY * power * (DOCUMENTS_RATE if has_documents else 1)
        servers = [
            SimulatedServer(SYSTEM, SLOWNESS if is_slow and number == 0 else 1.0)
            for number in range(num_servers)
        ]
        names = [
            f"http://10.0.{number // 256}.{number % 256}:8001" for number in range(num_servers)
        ]
        routers = [SIDES[side].make(names) for _ in range(SIDES[side].num_gateways)]
        simulation = FleetSimulation(
            servers,
            routers,
            make_conversations(rate, self.span_s, seed, DOCUMENTS if has_documents else 0.0),
            warm_up_s=self.span_s / 3,
            span_s=self.span_s,
            seed=seed,
            dies_s=self.span_s / 2 if dies else None,
        )
        return simulation.run()


def show(cell: Cell, runs: Sequence[Measures]) -> None:
    """Medians over the seeds."""
    trouble = f", {cell.trouble}" if cell.trouble else ""
    table = Table(title=f"{cell.num_servers} servers, load {cell.load:g}{trouble}")
    for column in ("", "jobs", "first token P50 s", "P95", "P99", "P95 / round robin's", "cached"):
        table.add_column(column)
    table.add_column("latency s")
    by_seed = {run.seed: run.ttft_p95_s for run in runs if run.side == BASE}
    for side in dict.fromkeys(run.side for run in runs):
        of_side = [run for run in runs if run.side == side]
        ratios = [run.ttft_p95_s / by_seed[run.seed] for run in of_side if run.seed in by_seed]
        table.add_row(
            side,
            str(sum(run.jobs for run in of_side)),
            f"{statistics.median(run.ttft_p50_s for run in of_side):.3f}",
            f"{statistics.median(run.ttft_p95_s for run in of_side):.3f}",
            f"{statistics.median(run.ttft_p99_s for run in of_side):.3f}",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{statistics.median(run.cached for run in of_side):.0%}",
            f"{statistics.median(run.latency_s for run in of_side):.2f}",
        )
    console.print(table)


def show_backlogs(num_servers: int, span_s: float, rates: Sequence[float]) -> None:
    """Unfinished jobs a server under round robin, in each quarter of the time."""
    for rate in rates:
        cell = Cell(num_servers, rate / CAPACITY, "", span_s)
        backlog = cell.simulate(BASE, 0).backlog
        quarter = len(backlog) // 4
        means = [
            statistics.mean(backlog[at * quarter : (at + 1) * quarter]) / num_servers
            for at in range(4)
        ]
        console.print(f"{rate:g} chats/s a server:", *(f"{mean:.1f}" for mean in means))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--servers", default="4")
    parser.add_argument("--loads", default="0.8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--span", type=float, default=150.0, help="seconds of virtual time")
    parser.add_argument("--sides", help="names, separated by semicolons; default: all")
    parser.add_argument(
        "--trouble",
        choices=("", "slow", "dies", "documents"),
        default="",
        help="slow: one server takes three times as long; dies: one dies half-way; documents: a "
        "fifth of the chats begin with a document of 4000 tokens",
    )
    parser.add_argument("--capacity", help="rates to try, instead of a race")
    parser.add_argument("--output", type=Path, help="a file that gets a line of JSON for each run")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.servers.split(",")]
    if arguments.capacity:
        show_backlogs(sizes[0], arguments.span, [float(r) for r in arguments.capacity.split(",")])
        return
    sides = arguments.sides.split(";") if arguments.sides else list(SIDES)
    for num_servers in sizes:
        for load in map(float, arguments.loads.split(",")):
            cell = Cell(num_servers, load, arguments.trouble, arguments.span)
            runs: list[Measures] = []
            for seed in range(arguments.seeds):
                for side in sides:
                    runs.append(cell.run(side, seed))
                    if arguments.output:
                        with arguments.output.open("a") as file:
                            file.write(json.dumps(asdict(runs[-1])) + "\n")
            show(cell, runs)


if __name__ == "__main__":
    main()
