"""A day of virtual time, in which ranks are lost, copies fail, clients leave, and jobs come in
bursts.

`make endurance` has the whole day, `make test` an hour of it.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Callable
from functools import cache

import pytest
from collector import Collector
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import Job
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits
from fastserve_backend.scheduler.gittins import Gittins
from fastserve_backend.scheduler.mlfq import MLFQ
from jobs import make_job
from mortal_ranks import DOWN_S, RecoveringRig
from policies import POLICIES, make_policy

HOUR_S = 3600.0
SHORT_S, DAY_S = HOUR_S, 24 * HOUR_S
STARVATION_S = 300.0
LIMITS = BatchLimits(max_seqs=8, max_tokens=40, prefill_chunk_tokens=8)
LONGEST_PROMPT, LONGEST_OUTPUT = 16, 12
# A load of three times the capacity for ten minutes, then twenty minutes without jobs.
BURST_S, PAUSE_S, JOBS_PER_S = 600.0, 1200.0, 0.3
NUM_BLOCKS, NUM_HOST_BLOCKS = 20, 60  # five jobs and fifteen
CALLS_TO_LIVE = (30, 300)
CANCELLED, COPIES_THAT_FAIL = 0.1, 0.02


class DayRig(RecoveringRig):
    """A rig that knows how long each job has not run."""

    most_cycles = 10**8

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.longest_wait_s = 0.0
        self.most_starving = 0
        self.num_losses = 0
        self._runs: dict[int, tuple[int, float]] = {}  # job → (tokens and computed ones, since)

    def run_cycle(self, count: int = 1) -> float:
        now = super().run_cycle(count)
        jobs, runs = self.loop.jobs, {}
        num_starving = 0
        for job in jobs:
            done = job.num_outputs + job.num_computed
            before, since_s = self._runs.get(job.number, (done, job.arrival_s))
            runs[job.number] = (done, now if done > before else since_s)
            waited_s = now - runs[job.number][1]
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
            num_starving += waited_s >= STARVATION_S
        self._runs = runs
        self.most_starving = max(self.most_starving, num_starving)
        return now

    def resume(self) -> None:
        self.num_losses += 1
        # Without ranks no job waits for others.
        self._runs = {number: (0, since_s + DOWN_S) for number, (_, since_s) in self._runs.items()}
        super().resume()

    def bound_s(self) -> float:
        """The bound in ``Promotion``, with one turn at a time."""
        # The whole job is recomputed, 1 s a token, after the running step.
        token_s = LONGEST_PROMPT + LONGEST_OUTPUT + float(LIMITS.prefill_chunk_tokens or 0)
        starving = self.most_starving
        return (1 + starving) * STARVATION_S + 11 * (starving + 1) * token_s


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_no_job_is_lost_and_none_waits_beyond_the_bound(
    name: str, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    is_day = request.config.getoption("--endurance")
    rng = random.Random(f"{name} {is_day}")
    jobs = random_jobs(DAY_S if is_day else SHORT_S)
    cancellations = {
        job.number: job.arrival_s + rng.expovariate(1 / 300)
        for job in jobs
        if rng.random() < CANCELLED
    }
    rig = DayRig(
        make_policy(name, LIMITS, starvation_s=STARVATION_S, longest=64.0),
        [rng.randint(*CALLS_TO_LIVE) for _ in range(len(jobs) // 20)],
        NUM_BLOCKS,
        NUM_HOST_BLOCKS,
        KVCacheSection(strategy="proactive", prefix_caching=True),
        num_stages=1,
        ahead=True,
        copy_fails=lambda: rng.random() < COPIES_THAT_FAIL,
    )
    rig.run(jobs, cancellations)

    assert Counter(number for number, _ in rig.ends) == Counter(job.number for job in jobs)
    for job, expected in zip(jobs, undisturbed(DAY_S if is_day else SHORT_S), strict=True):
        tokens = job.sink.token_ids  # type: ignore[union-attr]
        if job.number in cancellations:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    assert (rig.pool.num_used, rig.host.num_used) == (0, 0)
    assert not rig.executor.blocks_in_use
    assert rig.num_losses > 0
    # fcfs begins a job only if there is memory for all of it.
    assert rig.counters.recomputed_jobs > 0 or name == "fcfs"
    is_bounded = isinstance(rig.loop.policy, MLFQ | Gittins)
    assert rig.longest_wait_s <= (rig.bound_s() if is_bounded else math.inf)
    for key, value in (
        ("jobs", len(jobs)),
        ("cancelled", len(cancellations)),
        ("losses of ranks", rig.num_losses),
        ("computed again", rig.counters.recomputed_jobs),
        ("most starving", rig.most_starving),
        ("longest wait, s", round(rig.longest_wait_s)),
        ("its bound, s", round(rig.bound_s()) if is_bounded else "none"),
    ):
        record_property(key, value)


@cache
def undisturbed(duration_s: float) -> list[list[int]]:
    """The tokens of each job without failures and with memory for all."""
    jobs = random_jobs(duration_s)
    kv_cache = KVCacheSection(strategy="defer", prefix_caching=False)
    rig = DayRig(make_policy("fcfs", LIMITS), [], 2000, 0, kv_cache, num_stages=1)
    rig.run(jobs)
    return [job.sink.token_ids for job in jobs]  # type: ignore[union-attr]


def random_jobs(duration_s: float) -> list[Job]:
    rng = random.Random(0)
    jobs: list[Job] = []
    now = 0.0
    while (now := now + rng.expovariate(JOBS_PER_S)) < duration_s * BURST_S / (BURST_S + PAUSE_S):
        bursts, within_s = divmod(now, BURST_S)
        arrival_s = bursts * (BURST_S + PAUSE_S) + within_s
        job = make_job(len(jobs), rng.randint(1, LONGEST_PROMPT), arrival_s=arrival_s)
        same = rng.randint(0, len(job.prompt_ids))
        job.prompt_ids[same:] = array("i", (rng.randint(0, 99) for _ in job.prompt_ids[same:]))
        job.params = SamplingParams(max_tokens=rng.randint(1, LONGEST_OUTPUT))
        job.sink = Collector()
        jobs.append(job)
    return jobs
