"""Which jobs keep their objectives, and what is counted of them, on a virtual clock."""

from __future__ import annotations

import pytest
from fastserve_backend.engine.picture import take_picture, take_snapshot
from fastserve_backend.job import Job, ServiceLevel
from fastserve_backend.metrics.counters import (
    MAX_NAMED_TENANTS,
    OTHER_TENANTS,
    EngineCounters,
)
from fastserve_backend.metrics.latency_histograms import LatencyHistograms
from fastserve_backend.metrics.objectives import attainment, lateness_s
from fastserve_backend.scheduler.base import BatchLimits
from fastserve_client.engine_state import PriorityState
from jobs import make_job
from loop_driver import Rig, SimpleModel
from policies import make_policy


def job_with(
    service: ServiceLevel, number: int = 0, prompt_len: int = 1, max_tokens: int = 3
) -> Job:
    job = make_job(number, prompt_len, max_tokens=max_tokens)
    job.service = service
    return job


def job_with_tokens(service: ServiceLevel, *times_s: float) -> Job:
    """A job that arrived at 10 s and has a token at each of these times."""
    job = make_job(0, 4, arrival_s=10.0)
    job.service = service
    for time_s in times_s:
        job.on_token(7, 0.0, time_s)
    return job


@pytest.mark.parametrize(
    ("service", "times_s", "kept"),
    [
        (ServiceLevel(), (12.0, 13.0), (None, None)),
        (ServiceLevel(ttft_slo_s=2.0), (12.0, 99.0), (True, None)),
        (ServiceLevel(ttft_slo_s=1.9), (12.0, 13.0), (False, None)),
        # The mean counts: one token may be late.
        (ServiceLevel(tpot_slo_s=2.0), (99.0, 102.0, 103.0), (None, True)),
        (ServiceLevel(tpot_slo_s=1.9), (12.0, 15.0, 16.0), (None, False)),
        (ServiceLevel(ttft_slo_s=2.0, tpot_slo_s=1.0), (12.0,), (True, None)),
        (ServiceLevel(ttft_slo_s=1.0, tpot_slo_s=1.0), (12.0, 13.0), (False, True)),
    ],
)
def test_attainment(
    service: ServiceLevel, times_s: tuple[float, ...], kept: tuple[bool | None, bool | None]
) -> None:
    assert attainment(job_with_tokens(service, *times_s)) == kept


def test_lateness_is_that_of_the_next_token() -> None:
    both = ServiceLevel(ttft_slo_s=2.0, tpot_slo_s=0.5)
    assert lateness_s(job_with_tokens(both), 10.5) == -1.5
    assert lateness_s(job_with_tokens(both), 13.0) == 1.0
    assert lateness_s(job_with_tokens(both, 11.0), 11.0) == -0.5
    # The second token after the first is due at 12.
    assert lateness_s(job_with_tokens(both, 11.0, 11.1), 13.0) == 1.0
    assert lateness_s(job_with_tokens(ServiceLevel(tpot_slo_s=0.5)), 99.0) is None
    assert lateness_s(job_with_tokens(ServiceLevel(ttft_slo_s=2.0), 11.0), 99.0) is None


def test_only_completed_jobs_keep_or_miss_an_objective() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(1, 100)))
    # A step takes as many seconds as it has tokens, so prompts of 2 have their first tokens at 2,
    # 6 and 10. The last job is cancelled after that.
    wanted = ServiceLevel(ttft_slo_s=4.0, tpot_slo_s=1.0)
    jobs = [job_with(wanted, number, 2) for number in range(2)]
    jobs.append(job_with(wanted, 2, 2, max_tokens=99))
    rig.run(jobs, cancellations={2: 15.0})
    assert jobs[2].output_ids
    assert rig.counters.slo_attained == {"ttft": 1, "tpot": 2}
    assert rig.counters.slo_missed == {"ttft": 1}


def test_tokens_are_counted_for_their_tenants() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(2, 100)))
    jobs = [
        job_with(ServiceLevel(tenant=tenant), number, prompt_len=number + 1)
        for number, tenant in enumerate(("a", "b", "a", ""))
    ]
    rig.run(jobs)
    assert rig.counters.tenant_tokens == {"a": 1 + 3 + 2 * 3, "b": 2 + 3, "": 4 + 3}


def test_after_many_tenants_the_others_count_together() -> None:
    counters = EngineCounters(LatencyHistograms(0.3))
    for number in range(MAX_NAMED_TENANTS + 5):
        counters.on_job_added(job_with(ServiceLevel(tenant=f"t{number}"), prompt_len=2))
    counters.on_job_added(job_with(ServiceLevel(tenant="t0"), prompt_len=2))
    assert len(counters.tenant_tokens) == MAX_NAMED_TENANTS + 1
    assert counters.tenant_tokens["t0"] == 4
    assert counters.tenant_tokens[OTHER_TENANTS] == 5 * 2


def test_jobs_are_counted_by_priority_until_they_end() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(4, 100)))
    for number, priority in enumerate((-7, 0, 0, 2)):
        rig.loop.jobs.add(job_with(ServiceLevel(priority), number, max_tokens=3 + number))
    assert take_snapshot(rig.loop, 4).priority_jobs == {-7: 1, 0: 2, 2: 1}
    rig.run_cycle()
    rig.loop.jobs.cancel(3)
    picture = take_picture(rig.clock.now(), "fcfs", rig.loop, rig.counters, SimpleModel())
    assert picture.priorities == (PriorityState(-7, 1), PriorityState(0, 2))
    rig.run()
    assert take_snapshot(rig.loop, 0).priority_jobs == {}
    rig.loop.jobs.add(job_with(ServiceLevel(1), 9))
    rig.loop.jobs.fail_all("the ranks are gone")
    assert take_snapshot(rig.loop, 0).priority_jobs == {}
