"""Which latencies are observed when, on a virtual clock."""

from __future__ import annotations

import threading

from fastserve_backend.engine.picture import take_snapshot
from fastserve_backend.metrics.latency_histograms import Histogram, LatencyHistograms, Observations
from fastserve_backend.scheduler.base import BatchLimits
from jobs import make_job
from loop_driver import Rig
from policies import make_policy, skip_join


def observed(histogram: Histogram) -> tuple[int, float]:
    """Number and sum of the observations since the last call."""
    taken = histogram.take()
    return sum(taken.counts), sum(taken.sums)


def test_a_bound_belongs_to_its_bucket_and_what_is_above_all_has_one_of_its_own() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.0, 0.1, 0.5, 1.0, 7.0, 8.0):
        histogram.observe(value)
    assert histogram.take() == Observations((2, 2, 2), (0.1, 1.5, 15.0))
    assert histogram.take() == Observations((0, 0, 0), (0.0, 0.0, 0.0))


def test_nothing_is_lost_between_a_thread_that_observes_and_one_that_takes() -> None:
    histogram = Histogram((1.0,))
    number = 20_000
    writer = threading.Thread(target=lambda: [histogram.observe(1.0) for _ in range(number)])
    writer.start()
    count, total = 0, 0.0
    while writer.is_alive():
        more, seconds = observed(histogram)
        assert more == seconds
        count, total = count + more, total + seconds
    writer.join()
    more, seconds = observed(histogram)
    assert (count + more, total + seconds) == (number, number)


def test_the_slo_is_a_bound_of_normalized_latency() -> None:
    for slo_s in (0.3, 0.2, 0.05, 1.7):
        bounds = LatencyHistograms(slo_s).normalized_latency.bounds
        assert slo_s in bounds
        assert list(bounds) == sorted(set(bounds))


def test_a_job_that_waits_for_another_is_queueing() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(1, 100)))
    rig.run([make_job(0, 4, max_tokens=3), make_job(1, 2, max_tokens=2, arrival_s=1.0)])
    latencies = rig.counters.latencies
    # The first runs from 0 to 4, 5 and 6, the second from 6 to 8 and 9.
    assert latencies.time_to_first_token.take() == taken(
        latencies.time_to_first_token, [4.0, 8.0 - 1.0]
    )
    assert latencies.inter_token.take() == taken(latencies.inter_token, [1.0, 1.0, 1.0])
    assert latencies.e2e.take() == taken(latencies.e2e, [6.0, 9.0 - 1.0])
    assert latencies.queue.take() == taken(latencies.queue, [0.0, 5.0])
    assert latencies.normalized_latency.take() == taken(
        latencies.normalized_latency, [6.0 / 3, 8.0 / 2]
    )


def taken(like: Histogram, values: list[float]) -> Observations:
    """The counts of a histogram with the same bounds for these values."""
    histogram = Histogram(like.bounds)
    for value in values:
        histogram.observe(value)
    return histogram.take()


def test_preemption_shows_between_tokens_and_as_queueing() -> None:
    rig = Rig(skip_join())
    rig.run([make_job(0, 8, max_tokens=3), make_job(1, 1, max_tokens=3, arrival_s=2.0)])
    latencies = rig.counters.latencies
    # The long one has tokens at 8, 12 and 13: from 8 to 11 the short one runs.
    assert latencies.inter_token.take() == taken(latencies.inter_token, [1.0, 1.0, 4.0, 1.0])
    assert latencies.queue.take() == taken(latencies.queue, [13.0 - 10.0, 9.0 - 3.0])


def test_a_cancelled_job_counts_for_its_tokens_and_not_as_completed() -> None:
    rig = Rig(skip_join(BatchLimits(2, 100)))
    rig.run([make_job(0, 1, max_tokens=10), make_job(1, 1, max_tokens=2)], cancellations={0: 4.0})
    latencies = rig.counters.latencies
    assert observed(latencies.time_to_first_token)[0] == 2
    count, _ = observed(latencies.inter_token)
    assert count == rig.counters.generation_tokens - 2 > 1
    assert observed(latencies.e2e)[0] == 1
    assert observed(latencies.queue)[0] == 1
    assert observed(latencies.normalized_latency)[0] == 1


def test_a_job_cancelled_before_it_ran_is_in_no_distribution() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(1, 100)))
    rig.loop.jobs.add(make_job(0, 1, max_tokens=3))
    rig.loop.jobs.add(make_job(1, 1, max_tokens=3))
    rig.run_cycle()
    rig.loop.jobs.cancel(1)
    rig.run()
    latencies = rig.counters.latencies
    assert observed(latencies.time_to_first_token)[0] == 1
    assert observed(latencies.e2e)[0] == 1


def test_a_snapshot_has_the_demotions_and_promotions_of_the_policy() -> None:
    policy = skip_join(starvation_s=5.0)
    rig = Rig(policy)
    rig.run([make_job(0, 1, max_tokens=20)] + [make_job(n, 1, max_tokens=3) for n in range(1, 5)])
    snapshot = take_snapshot(rig.loop, 0)
    assert snapshot.num_demotions == policy.num_demotions > 0
    assert snapshot.num_promotions == policy.num_promotions > 0
    for name in ("fcfs", "fixed_priority", "srpt"):
        flat = Rig(make_policy(name, BatchLimits(1, 100)))
        flat.run([make_job(n, 1, max_tokens=3) for n in range(3)])
        snapshot = take_snapshot(flat.loop, 0)
        assert (snapshot.num_demotions, snapshot.num_promotions) == (0, 0)
