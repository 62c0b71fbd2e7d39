"""How the autoscaler of deploy/kubernetes/autoscaled follows the load, beside others. Simulated.

    python -m benchmarks.autoscaling

One to four servers take jobs from one queue, in their order. Arrivals rise and fall over 3.5 hours.
The autoscaler acts as Kubernetes' own does, with the targets and the limits of ``keda.yaml``.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KEDA = Path(__file__).parents[1] / "deploy" / "kubernetes" / "autoscaled" / "keda.yaml"
STEP_S = 0.25
# Jobs that a server runs at once: max_num_seqs, or fewer where prompts fill the KV cache.
SEATS = {"short prompts": 16, "long prompts": 10}
JOB_S = 10.0  # mean, exponentially distributed
SERVER_START_S = 90.0
# Until a second, the jobs that arrive in the time of a job, as a multiple of a server's seats.
ARRIVALS = ((1800, 0.6), (5400, 2.8), (9000, 1.4), (12600, 0.3))
SEEDS = range(5)
LATE_S = 5.0
# Kubernetes' autoscaler does nothing for smaller deviations.
TOLERANCE = 0.1


@dataclass
class Fleet:
    """The queue, the servers, and what Prometheus knows of them."""

    seats: int
    """Of each server."""
    rng: random.Random
    ready_s: list[float] = field(default_factory=lambda: [0.0])
    """When each server is ready."""
    queue: deque[float] = field(default_factory=deque)
    """Arrival times."""
    running: list[tuple[float, float]] = field(default_factory=list)
    """Heap of (end, wait) in seconds."""
    ended: list[tuple[float, float]] = field(default_factory=list)
    """(end, wait), in the order of ends."""
    recent_jobs: deque[tuple[int, int]] = field(
        default_factory=lambda: deque(maxlen=int(30 / STEP_S))
    )
    """Waiting and running jobs at each step of 30 s."""

    def step(self, now: float, arrivals: float) -> None:
        """Args: arrivals: jobs a second."""
        if self.rng.random() < arrivals * STEP_S:
            self.queue.append(now)
        while self.running and self.running[0][0] <= now:
            self.ended.append(heapq.heappop(self.running))
        num_ready = sum(ready_s <= now for ready_s in self.ready_s)
        while self.queue and len(self.running) < self.seats * num_ready:
            end = now + self.rng.expovariate(1 / JOB_S)
            heapq.heappush(self.running, (end, now - self.queue.popleft()))
        self.recent_jobs.append((len(self.queue), len(self.running)))

    def waits_of_ended(self, start: float) -> list[float]:
        """Of the jobs that ended after ``start``."""
        return [wait for end, wait in self.ended[-2000:] if end > start]


# Each says how far a metric is above its target: 1 wants the number of servers that there is.
Metric = Callable[[Fleet, float, Mapping[str, float]], float]


def queue_seconds(fleet: Fleet, now: float, targets: Mapping[str, float]) -> float:
    waiting = statistics.fmean(jobs[0] for jobs in fleet.recent_jobs)
    seconds = waiting / max(0.02, len(fleet.waits_of_ended(now - 120)) / 120)
    return seconds / targets["queue-seconds"]


def past_queue_seconds(fleet: Fleet, now: float, targets: Mapping[str, float]) -> float:
    """The mean of ``fastserve_queue_seconds`` over a minute."""
    waits = fleet.waits_of_ended(now - 60)
    return statistics.fmean(waits or [0.0]) / targets["queue-seconds"]


def running_jobs(fleet: Fleet, _: float, targets: Mapping[str, float]) -> float:
    running = statistics.fmean(jobs[1] for jobs in fleet.recent_jobs)
    return running / len(fleet.ready_s) / targets["running-jobs"]


def kv_use(fleet: Fleet, _: float, targets: Mapping[str, float]) -> float:
    running = statistics.fmean(jobs[1] for jobs in fleet.recent_jobs)
    use = running / SEATS["long prompts"] if fleet.seats == SEATS["long prompts"] else 0.0
    return use / len(fleet.ready_s) / targets["kv-use"]


SIDES: dict[str, tuple[Metric, ...]] = {
    "as deployed": (queue_seconds, running_jobs, kv_use),
    "queue seconds alone": (queue_seconds,),
    "`fastserve_queue_seconds` alone": (past_queue_seconds,),
    "running jobs alone": (running_jobs,),
}


def wanted_servers(metrics: Sequence[Metric], fleet: Fleet, now: float, spec: Any) -> int:
    """What Kubernetes' autoscaler makes of the values: the largest of all proposals."""
    targets = {one["name"]: float(one["metadata"]["threshold"]) for one in spec["triggers"]}
    wanted = spec["minReplicaCount"]
    for metric in metrics:
        ratio = metric(fleet, now, targets)
        factor = 1.0 if abs(ratio - 1) <= TOLERANCE else ratio
        wanted = max(wanted, math.ceil(round(len(fleet.ready_s) * factor, 9)))
    return int(min(spec["maxReplicaCount"], wanted))


def simulate(metrics: Sequence[Metric], seats: int, seed: int, spec: Any) -> tuple[float, ...]:
    """Returns how often the number of servers changed, the mean number, and the share of jobs that
    waited for more than ``LATE_S``."""
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    up_s, down_s = (
        behavior[way]["policies"][0]["periodSeconds"] for way in ("scaleUp", "scaleDown")
    )
    window_s = behavior["scaleDown"]["stabilizationWindowSeconds"]
    fleet = Fleet(seats, random.Random(seed))
    wanted: list[tuple[float, int]] = []
    last_up_s = last_down_s = -math.inf
    num_changes = 0
    num_servers = []
    for step in range(int(ARRIVALS[-1][0] / STEP_S)):
        now = step * STEP_S
        load = next(load for end, load in ARRIVALS if now < end)
        fleet.step(now, load * seats / JOB_S)
        current = len(fleet.ready_s)
        num_servers.append(current)
        if now == 0 or now % spec["pollingInterval"]:
            continue
        wanted.append((now, wanted_servers(metrics, fleet, now, spec)))
        if wanted[-1][1] > current and now - last_up_s >= up_s:
            fleet.ready_s.append(now + SERVER_START_S)
            last_up_s = now
        elif now - last_down_s >= down_s and current > max(
            number for when, number in wanted if when > now - window_s
        ):
            fleet.ready_s.pop()
            last_down_s = now
        num_changes += len(fleet.ready_s) != current
    late = sum(wait > LATE_S for _, wait in fleet.ended) / len(fleet.ended)
    return num_changes, statistics.fmean(num_servers), late


def main() -> None:
    spec = yaml.safe_load(KEDA.read_text(encoding="utf-8"))["spec"]
    print("| | changes | servers, mean | jobs that waited for more than 5 s |\n|---|---|---|---|")
    for kind, seats in SEATS.items():
        for side, metrics in SIDES.items():
            runs = [simulate(metrics, seats, seed, spec) for seed in SEEDS]
            changes, servers, late = map(statistics.median, zip(*runs, strict=True))
            print(f"| {kind}: {side} | {changes:.0f} | {servers:.1f} | {late:.1%} |")


if __name__ == "__main__":
    main()
