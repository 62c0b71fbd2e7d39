"""The race for latency objectives: its two classes of jobs, its measures, and the search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fastserve_bench.workload.service_class import NO_CLASS

from benchmarks import slo_race
from benchmarks.slo_race import ENTRANTS, Outcome

COURSE = replace(slo_race.COURSES[0], num_jobs=60)
CAPACITY = 2.45  # jobs/s


def test_batch_jobs_are_the_same_whatever_the_load() -> None:
    batches = []
    for load in (0.3, 0.6):
        trace = slo_race.two_classes(COURSE, CAPACITY, load, NO_CLASS)
        arrivals = [job.arrival_s for job in trace]
        assert arrivals == sorted(arrivals)
        assert arrivals[-1] < COURSE.num_jobs / CAPACITY
        batches.append([job for job in trace if job.service is NO_CLASS])
        assert len(trace) - len(batches[-1]) == pytest.approx(load * COURSE.num_jobs, rel=0.5)
    assert batches[0] == batches[1]


@pytest.mark.slow
def test_the_policy_keeps_objectives_that_fcfs_misses() -> None:
    fcfs, slo = (
        slo_race.run_at(COURSE, ENTRANTS[name], CAPACITY, load=1.3) for name in ("fcfs", "slo")
    )
    assert slo.violations <= slo_race.MOST_VIOLATIONS < fcfs.violations
    assert slo.first_p99 < 1 < fcfs.first_p99
    assert slo.tpot_p99 < 0.1
    assert slo.tokens_per_s > 0.9 * fcfs.tokens_per_s
    assert slo.batch_tokens_per_s > 0


def test_the_search_ends_near_the_highest_good_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(course: object, entrant: object, capacity: float, load: float) -> Outcome:
        return Outcome(load, 0.009 if load < 0.77 else 0.02, 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(slo_race, "run_at", outcome)
    found = slo_race.goodput(COURSE, ENTRANTS["slo"], CAPACITY)
    assert 0.77 / slo_race.RATIO <= found.load < 0.77
    assert found.to_json()["goodput"] == found.load * CAPACITY
    assert [one.load for one in found.outcomes] == sorted(one.load for one in found.outcomes)
    assert slo_race.summary(found).startswith(f"{slo_race.course_name(COURSE)}; slo: load 0.7")
