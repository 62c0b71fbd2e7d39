"""Jobs ordered separately for each place of their KV, so that decisions find jobs at an end."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
from fastserve_backend.job import Job, Place
from fastserve_backend.kv_cache.holders import RoundState
from fastserve_backend.kv_cache.look_ahead import DeviceBorder
from fastserve_backend.kv_cache.tiers import TwoTierKV
from fastserve_backend.scheduler.base import BatchLimits
from fastserve_backend.scheduler.ordered_jobs import OrderedJobs, SplitOrder, WeighedJobs
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from matrices import random_examples
from policies import POLICIES, iterate, make_policy

SEEDS = st.integers(0, 2**32)
BLOCK_SIZE = 4


@random_examples(200)
@given(seed=SEEDS)
def test_each_place_has_its_jobs_in_order(seed: int) -> None:
    rng = random.Random(seed)
    order, keys = SplitOrder(OrderedJobs), dict[Job, float]()
    for number in range(60):
        what = rng.choice(("add", "add", "move", "place", "remove", "reorder"))
        job = rng.choice(list(keys)) if keys and what != "add" else make_job(number, 1)
        if job not in keys or what == "move":
            keys[job] = rng.randint(0, 5)
            (order.move if job in order else order.add)(job, keys[job])
        elif what == "place":
            job.place = rng.choice(list(Place))
            order.on_place_changed(job)
        elif what == "remove":
            order.remove(job)
            del keys[job]
        else:
            keys = {one: rng.randint(0, 5) for one in keys}
            order.reorder(keys.__getitem__)
        expected = sorted(keys, key=lambda one: (keys[one], one.number))
        assert list(order) == expected
        assert len(order) == len(keys)
        for place in Place:
            there = [one for one in expected if one.place is place]
            part = order.part(place)
            assert [one for _, one in part.items()] == there
            assert list(part.jobs(last_first=False)) == there
            assert list(part.jobs(last_first=True)) == there[::-1]


@random_examples(200)
@given(seed=SEEDS)
def test_weights_are_summed_in_order(seed: int) -> None:
    rng = random.Random(seed)
    keys, weights = dict[Job, float](), dict[Job, float]()
    jobs = WeighedJobs(weights.__getitem__)
    for number in range(60):
        what = rng.choice(("add", "add", "move", "remove", "reorder"))
        job = rng.choice(list(keys)) if keys and what != "add" else make_job(number, 1)
        if what == "remove" and keys:
            jobs.remove(job)
            del keys[job]
            continue
        weights[job] = rng.randint(0, 9)
        if job not in keys or what == "move":
            # Often the key is as before, and the weight alone has changed.
            keys[job] = rng.randint(0, 2)
            (jobs.move if job in jobs else jobs.add)(job, keys[job])
        else:
            keys = {one: rng.randint(0, 5) for one in keys}
            jobs.reorder(keys.__getitem__)
        expected = sorted(keys, key=lambda one: (keys[one], one.number))
        assert list(jobs) == expected
        assert jobs.sums().tolist() == [0.0, *accumulate(weights[one] for one in expected)]


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(seed=SEEDS)
def test_jobs_of_a_place_come_in_order_of_their_next_run(name: str, seed: int) -> None:
    rng = random.Random(seed)
    policy = make_policy(name, BatchLimits(rng.randint(1, 4), 100), starvation_s=20.0, longest=16.0)
    is_predicted = name == "speculative"  # its other jobs stay in the order of their queues
    jobs: list[Job] = []
    now = 0.0
    for number in range(30):
        predicted = rng.randint(1, 30) if is_predicted else None
        jobs.append(make_job(number, rng.randint(1, 20), predicted_tokens=predicted))
        policy.add(jobs[-1], now)
        for job in iterate(policy, now):
            policy.on_place_changed(job)
        now += 1.0
        for job in rng.sample(jobs, min(3, len(jobs))):
            if job.num_computed:
                job.place = rng.choice((Place.DEVICE, Place.HOST))
                policy.on_place_changed(job)
        for place in Place:
            there = [job for job in jobs if job.place is place]
            estimate = policy.next_run_estimate(now)
            expected = sorted(there, key=estimate)
            assert list(policy.by_next_run(place, estimate, last_first=False)) == expected
            assert list(policy.by_next_run(place, estimate, last_first=True)) == expected[::-1]


class ByNumber:
    """Jobs run in order of their numbers."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs

    def by_next_run(self, place: Place, estimate: object, *, last_first: bool) -> object:
        jobs = [job for job in self._jobs if job.place is place]
        return iter(jobs[::-1] if last_first else jobs)

    def next_run_estimate(self, now: float) -> object:
        return lambda job: (job.number, 0.0)


@random_examples(300)
@given(seed=SEEDS)
def test_the_border_is_where_the_blocks_of_all_jobs_before_it_fill_the_device(seed: int) -> None:
    rng = random.Random(seed)
    tiers = TwoTierKV(200, 200, BLOCK_SIZE, incremental=True)
    jobs = [make_job(number, rng.randint(1, 30)) for number in range(rng.randint(1, 12))]
    busy = set()
    for job in jobs:
        run_iteration(job)
        tiers.device.grow(job.number, job.num_computed)
        if rng.random() < 0.5:
            tiers.swap_out(job.number, job.num_computed)
            tiers.finish(job.number, succeeded=True)
            job.place = Place.HOST
        elif rng.random() < 0.3:
            busy.add(job.number)
    order = ByNumber(jobs)
    capacity, band = rng.randint(0, 60), rng.randint(0, 10)
    state = RoundState(tiers, None, order, 0.0, busy, None)  # type: ignore[arg-type]
    border = DeviceBorder(tiers, state, capacity)
    used = sum(map(tiers.device.num_held, busy))
    inside, outside = [], []
    for job in jobs:
        if job.place is Place.HOST:
            used += tiers.device.blocks_for(job.num_tokens)
            if used + band <= capacity:
                inside.append(job)
        elif job.number not in busy:
            used += tiers.device.num_held(job.number)
            if used > capacity:
                outside.append(job)
    assert list(border.inside(band)) == inside
    assert list(border.outside()) == outside[::-1]
