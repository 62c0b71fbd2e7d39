"""Fair shares of tenants: worked examples, and properties over every policy in random histories."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from fastserve_backend.config_sections import KVCacheSection
from fastserve_backend.job import Job, Place, ServiceLevel
from fastserve_backend.logprobs import PromptLogprobs
from fastserve_backend.rank_protocol.link import Link
from fastserve_backend.scheduler.base import BatchLimits, Policy, Scheduled
from fastserve_backend.scheduler.fair_shares import FairShares
from fastserve_backend.scheduler.priority_classes import PriorityClasses
from fastserve_backend.scheduler.promotion import Promotion
from fastserve_backend.scheduler.token_costs import TokenCosts
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from loop_driver import Rig
from matrices import random_examples
from policies import POLICIES, TIMES, LinearTimes, make_policy, select

MAX_MODEL_LEN = 64
TOLERANCE_TOKENS = 64  # so short that histories of some hundred batches have many turns
SEEDS = st.integers(0, 2**32)


def fair(
    name: str,
    limits: BatchLimits,
    weights: Mapping[str, float] | None = None,
    times: LinearTimes = TIMES,
) -> FairShares:
    return FairShares(
        make_policy(name, limits, starvation_s=200.0, times=times),
        times,
        weights or {},
        MAX_MODEL_LEN,
        TOLERANCE_TOKENS,
    )


def job_of(tenant: str, number: int, prompt_len: int = 1, max_tokens: int = 1000) -> Job:
    job = make_job(number, prompt_len, max_tokens=max_tokens)
    job.service = ServiceLevel(tenant=tenant)
    return job


def run(policy: Policy, batch: Sequence[Scheduled]) -> None:
    """The batch is sent. Its jobs have their tokens."""
    for job, num_tokens in batch:
        run_iteration(job, num_tokens)
        policy.on_place_changed(job)
    policy.on_batch_sent(batch)


def iterate(policy: Policy, now: float = 0.0) -> Counter[str]:
    """One iteration; returns how many jobs of each tenant ran."""
    batch = select(policy, now)
    run(policy, batch)
    policy.on_iteration_finished(batch, now)
    return Counter(job.service.tenant for job, _ in batch)


# --- Worked examples --------------------------------------------------------------------------


def test_a_batch_is_shared_whoever_came_first() -> None:
    policy = fair("fcfs", BatchLimits(8, 1000))
    for number in range(100):
        policy.add(job_of("flood", number), 0.0)
    for number in range(100, 110):
        policy.add(job_of("late", number), 0.0)
    ran = Counter[str]()
    for _ in range(500):
        ran += iterate(policy)
    assert ran["flood"] / ran["late"] == pytest.approx(1.0, rel=0.05)


def test_seats_follow_weights() -> None:
    policy = fair("fcfs", BatchLimits(8, 1000), {"heavy": 3.0})
    for number in range(20):
        policy.add(job_of(("heavy", "light")[number % 2], number), 0.0)
    ran = Counter[str]()
    for _ in range(3000):
        ran += iterate(policy)
    assert ran["heavy"] / ran["light"] == pytest.approx(3.0, rel=0.05)


def test_no_seat_stays_empty() -> None:
    policy = fair("fcfs", BatchLimits(8, 1000))
    for number in range(20):
        policy.add(job_of("flood", number), 0.0)
    policy.add(job_of("small", 20), 0.0)
    assert iterate(policy) == {"flood": 8}
    for _ in range(50):
        assert iterate(policy) == {"flood": 7, "small": 1}


class SlowBatches(LinearTimes):
    """A batch takes as long as all its decodes one after the other."""

    def decodes_s(self, num_jobs: int, context_tokens: int) -> float:
        return float(num_jobs)


def test_a_flood_slows_a_single_job_down_by_no_more_than_its_share() -> None:
    policy = fair("fcfs", BatchLimits(8, 1000), times=SlowBatches())
    for number in range(20):
        policy.add(job_of("flood", number), 0.0)
    assert iterate(policy) == {"flood": 8}
    policy.add(job_of("small", 20), 0.0)
    assert iterate(policy) == {"flood": 2}
    for _ in range(50):
        assert iterate(policy) == {"flood": 1, "small": 1}
    policy.add(job_of("small", 21), 0.0)
    policy.add(job_of("other", 22), 0.0)
    for _ in range(20):
        batch = iterate(policy)
        assert batch.total() == 3
        assert batch["other"] == 1


def test_a_tenant_saves_nothing_up_while_it_has_no_jobs() -> None:
    policy = fair("fcfs", BatchLimits(4, 1000))
    for number in range(20):
        policy.add(job_of(("a", "b")[number % 2], number), 0.0)
    for _ in range(2000):
        iterate(policy)
    for number in range(20, 30):
        policy.add(job_of("new", number), 0.0)
    ran = Counter[str]()
    for _ in range(1200):
        ran += iterate(policy)
    assert max(ran.values()) - min(ran.values()) < 0.15 * sum(ran.values())


def test_what_a_tenant_has_had_is_remembered_while_others_have_jobs() -> None:
    """Ending all jobs at once and coming again at once gives no larger share."""
    policy = fair("fcfs", BatchLimits(2, 1000))
    numbers = iter(range(10**6))
    for _ in range(8):
        policy.add(job_of("steady", next(numbers)), 0.0)
    ran = Counter[str]()
    for _ in range(50):
        visitors = [job_of("visitor", next(numbers), prompt_len=30) for _ in range(2)]
        for job in visitors:
            policy.add(job, 0.0)
        for _ in range(200):
            ran += iterate(policy)
        for job in visitors:
            policy.remove(job)
    assert ran["visitor"] < 1.1 * ran["steady"]


def test_more_tenants_than_seats_take_turns_of_many_tokens() -> None:
    policy = fair("fcfs", BatchLimits(4, 1000))
    for number in range(40):
        policy.add(job_of(f"tenant-{number}", number), 0.0)
    ran, num_changes, before = Counter[str](), 0, set[str]()
    for _ in range(4000):
        batch = iterate(policy)
        num_changes += len(before - set(batch))
        before = set(batch)
        ran += batch
    assert max(ran.values()) - min(ran.values()) < 130
    assert num_changes < 4000 * 4 / 30


def test_the_machine_at_rest_forgets_everybody() -> None:
    policy = fair("fcfs", BatchLimits(1, 1000))
    jobs = [job_of(f"tenant-{number}", number) for number in range(100)]
    for job in jobs:
        policy.add(job, 0.0)
    for _ in range(300):
        iterate(policy)
    for job in jobs:
        policy.remove(job)
    assert not policy._tenants.of
    assert not policy._tenants.num_held
    assert not policy._tenants._remembered
    assert not policy._places


def test_kv_of_the_tenant_that_has_had_most_leaves_first() -> None:
    policy = fair("fcfs", BatchLimits(2, 1000))
    greedy = [job_of("greedy", number) for number in range(6)]
    for job in greedy:
        policy.add(job, 0.0)
    modest = job_of("modest", 6)
    policy.add(modest, 0.0)
    for _ in range(300):
        iterate(policy)
    late = [job_of("late", number) for number in (7, 8)]
    for job in (*greedy, *late):
        if job not in late:
            job.place = Place.DEVICE
            policy.on_place_changed(job)
        else:
            policy.add(job, 0.0)
    for _ in range(3):
        iterate(policy)
    select(policy, 0.0)
    estimate = policy.next_run_estimate(0.0)
    first_to_leave = list(policy.by_next_run(Place.DEVICE, estimate, last_first=True))
    assert {job.service.tenant for job in first_to_leave[:4]} == {"greedy"}
    assert first_to_leave == sorted(first_to_leave, key=estimate, reverse=True)
    assert first_to_leave[::-1] == list(
        policy.by_next_run(Place.DEVICE, estimate, last_first=False)
    )


def test_a_tenant_below_its_share_of_the_device_gets_room_for_new_jobs() -> None:
    """Its new jobs may make others compute again, until it has its share."""
    policy = fair("fcfs", BatchLimits(8, 1000))
    for number in range(6):
        job = job_of("flood", number)
        job.place = Place.DEVICE
        policy.add(job, 0.0)
    new_of_flood = job_of("flood", 6)
    policy.add(new_of_flood, 0.0)
    assert not policy.has_turn(new_of_flood)
    for number in range(10, 16):
        policy.add(job_of("late", number), 0.0)
    policy.charge("flood", 1000.0)  # so it is held back
    late = [job for job in policy.walk(0.0, ()) if job.service.tenant == "late"]
    assert not policy.has_turn(new_of_flood)
    assert not policy.has_turn(late[-1])  # six new jobs were offered, and its share is three
    walk = policy.walk(0.0, ())
    for num_offered in range(1, 7):
        job = next(one for one in walk if one.service.tenant == "late")
        assert policy.has_turn(job) == (num_offered <= 3)


def test_a_skipped_place_is_skipped_for_tenants_that_come_later() -> None:
    policy = fair("fcfs", BatchLimits(2, 1000))
    for number, place in enumerate([*Place] * 3):
        job = job_of(f"tenant-{number // len(Place)}", number)
        job.place = place
        policy.add(job, 0.0)
    walk = policy.walk(0.0, ())
    first = next(walk)
    walk.skip(Place.NOWHERE)
    walk.skip(Place.HOST)
    rest = list(walk)
    assert first.place is Place.NOWHERE
    assert [job.place for job in rest] == [Place.DEVICE] * 3
    assert len({job.service.tenant for job in rest}) == 3


def test_log_probabilities_of_a_prompt_are_charged_once() -> None:
    costs = TokenCosts.of(BatchLimits(4, 1000, 100), TIMES, 1000)
    plain, scoring = make_job(0, 60), make_job(1, 60)
    scoring.prompt_logprobs = PromptLogprobs(scoring.prompt_ids, 5)
    charged: dict[int, list[float]] = {}
    for job in (plain, scoring, scoring):
        job.num_computed = 0
        job.on_sent(60)
        charged.setdefault(job.number, []).append(costs.seconds(job, 60))
        job.num_pending = 0
    assert charged == {0: [60.0], 1: [60.0 + 59.0, 60.0]}  # a second for either


def test_other_time_counts_like_that_of_tokens() -> None:
    """The tenant is served later, until the others have had as much."""
    policy = fair("fcfs", BatchLimits(1, 1000), {"a": 2.0})
    for number in range(3):
        policy.add(job_of("abc"[number], number), 0.0)
    policy.charge("a", 1000.0)
    policy.charge("b", 500.0)
    ran = Counter[str]()
    for _ in range(600):
        ran += iterate(policy)
    assert ran["c"] > 520
    for _ in range(1400):
        ran += iterate(policy)
    # Service over weight is the same: (1000 + a) / 2 = 500 + b = c.
    assert ran["c"] == pytest.approx(875, rel=0.15)
    assert ran["b"] == pytest.approx(375, rel=0.35)
    assert ran["a"] == pytest.approx(750, rel=0.35)


def test_other_time_is_remembered_where_the_job_has_ended() -> None:
    policy = fair("fcfs", BatchLimits(1, 1000))
    steady, visitor = job_of("steady", 0), job_of("visitor", 1)
    for job in (steady, visitor):
        policy.add(job, 0.0)
    policy.remove(visitor)
    policy.charge("visitor", 300.0)
    policy.charge("visitor", 300.0)
    policy.add(visitor, 0.0)
    ran = Counter[str]()
    for _ in range(500):
        ran += iterate(policy)
    assert ran == {"steady": 500}


def test_other_time_of_a_tenant_alone_is_nobodys_loss() -> None:
    policy = fair("fcfs", BatchLimits(1, 1000))
    policy.charge("first", 1000.0)
    policy.add(job_of("first", 0), 0.0)
    policy.charge("first", 1000.0)
    policy.add(job_of("second", 1), 0.0)
    ran = Counter[str]()
    for _ in range(1000):
        ran += iterate(policy)
    assert min(ran.values()) > 400


def test_other_time_counts_at_all_priorities() -> None:
    policy = PriorityClasses(lambda: fair("fcfs", BatchLimits(1, 1000)))
    for number in range(4):
        job = job_of("ab"[number % 2], number)
        job.service = ServiceLevel(tenant="ab"[number % 2], priority=number // 2)
        policy.add(job, 0.0)
    policy.charge("a", 1000.0)
    order = [job.number for job in policy.walk(0.0, ())]
    assert order == [1, 0, 3, 2]


@pytest.mark.slow
@pytest.mark.one_of("num_blocks")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_blocks", [40, 400])
def test_a_flood_of_one_tenant_leaves_four_others_their_shares(name: str, num_blocks: int) -> None:
    rng = random.Random(0)
    limits = BatchLimits(8, 40, 20)
    policy = fair(name, limits)
    costs = TokenCosts.of(limits, TIMES, MAX_MODEL_LEN)
    rig = _rig(policy, num_blocks, num_stages=1, ahead=True)
    served_s = dict.fromkeys(("flood", "a", "b", "c", "d"), 0.0)
    on_batch_sent = policy.on_batch_sent

    def note(batch: Sequence[Scheduled]) -> None:
        if len(policy._tenants.of) == 5:  # all have jobs
            for job, num_tokens in batch:
                served_s[job.service.tenant] += costs.seconds(job, num_tokens)
        on_batch_sent(batch)

    policy.on_batch_sent = note  # type: ignore[method-assign]
    tenants = [*("flood",) * 120, *"abcd" * 30]
    rig.run(
        job_of(tenant, number, rng.randint(1, 16), rng.randint(1, 40))
        for number, tenant in enumerate(tenants)
    )
    assert len(rig.ends) == len(tenants)
    shares = served_s.values()
    jains_index = sum(shares) ** 2 / (5 * sum(share**2 for share in shares))
    assert jains_index >= 0.98


# --- Properties -------------------------------------------------------------------------------


@pytest.mark.slow
@random_examples(150)
@given(
    seed=SEEDS,
    name=st.sampled_from(POLICIES),
    num_stages=st.integers(1, 3),
    chunk=st.booleans(),
)
def test_backlogged_tenants_stay_within_the_bound(
    seed: int, name: str, num_stages: int, chunk: bool
) -> None:
    rng = random.Random(seed)
    seats = rng.randint(1, 6)
    longest = 40
    limits = BatchLimits(seats, rng.randint(longest, 80), rng.randint(1, 20) if chunk else None)
    tenants = [f"tenant-{index}" for index in range(rng.randint(2, 8))]
    weights = {tenant: rng.choice([0.5, 1.0, 1.0, 2.0, 5.0]) for tenant in tenants}
    policy = fair(name, limits, weights)
    costs = TokenCosts.of(limits, TIMES, MAX_MODEL_LEN)
    tolerance_s = costs.output_s(TOLERANCE_TOKENS, MAX_MODEL_LEN)
    # Tenants differ in the lengths of their jobs.
    most = {tenant: (rng.randint(1, 20), rng.randint(1, 20)) for tenant in tenants}
    numbers = iter(range(10**6))

    def add_job(tenant: str) -> None:
        prompt, output = most[tenant]
        job = job_of(tenant, next(numbers), rng.randint(1, prompt), rng.randint(1, output))
        policy.add(job, 0.0)

    for tenant in tenants:
        for _ in range(seats * (num_stages + 1)):
            add_job(tenant)
    started_s = {tenant: policy._tenants.of[tenant].counter for tenant in tenants}
    served_s = dict.fromkeys(tenants, 0.0)
    left_s = dict.fromkeys(tenants, 0.0)
    flights: deque[list[Scheduled]] = deque()
    largest = dict.fromkeys(tenants, 0.0)  # cost of a tenant in one batch
    for step in range(400):
        in_flight = {job.number for batch in flights for job, _ in batch}
        batch = select(policy, float(step), in_flight)
        assert batch
        held = policy._tenants.of.keys() - policy._tenants.open.keys()
        run(policy, batch)
        cost = dict.fromkeys(tenants, 0.0)
        for job, num_tokens in batch:
            cost[job.service.tenant] += costs.seconds(job, num_tokens)
        for tenant in tenants:
            served_s[tenant] += cost[tenant]
            if tenant in held:  # it got what others have no tokens for
                left_s[tenant] += cost[tenant]
            else:
                largest[tenant] = max(largest[tenant], cost[tenant])
        flights.append(batch)
        if len(flights) == num_stages:
            ran = flights.popleft()
            ended = [job for job, _ in ran if len(job.output_ids) >= job.params.max_tokens]
            policy.on_iteration_finished([one for one in ran if one.job not in ended], float(step))
            for job in ended:
                policy.remove(job)
                add_job(job.service.tenant)
        counters = {
            tenant: started_s[tenant] + served_s[tenant] / weights[tenant] for tenant in tenants
        }
        for one in tenants:
            for other in tenants:
                bound_s = tolerance_s + largest[one] / weights[one]
                bound_s += left_s[one] / weights[one]
                assert counters[one] - counters[other] <= bound_s + 1e-6


@pytest.mark.slow
@random_examples(60)
@given(
    seed=SEEDS,
    name=st.sampled_from(POLICIES),
    num_stages=st.integers(1, 3),
    ahead=st.booleans(),
    num_tenants=st.integers(2, 6),
)
def test_every_job_of_every_tenant_and_priority_ends(
    seed: int, name: str, num_stages: int, ahead: bool, num_tenants: int
) -> None:
    rng = random.Random(seed)
    limits = BatchLimits(rng.randint(1, 6), rng.randint(6, 20), rng.randint(1, 12))
    weights = {"tenant-0": rng.choice([0.1, 1.0, 10.0])}
    across = Promotion(200.0, lambda job: 0.0)
    policy = PriorityClasses(lambda: fair(name, limits, weights), across)
    rig = _rig(policy, rng.randint(7, 15), num_stages, ahead)
    jobs = _random_jobs(rng, num_tenants)
    for job in jobs:
        job.service = replace(job.service, priority=rng.choice([-1, 0, 0, 0, 1]))
    cancellations = {n: jobs[n].arrival_s + rng.uniform(0, 40) for n in range(0, 30, 6)}
    rig.run(jobs, cancellations)
    assert sorted(number for number, _ in rig.ends) == list(range(30))
    assert rig.pool.num_used == 0
    assert sum(policy.level_sizes()) == 0


@pytest.mark.slow
@random_examples(60)
@given(
    seed=SEEDS, name=st.sampled_from(POLICIES), num_stages=st.integers(1, 2), ahead=st.booleans()
)
def test_one_tenant_alone_has_the_decisions_of_its_policy(
    seed: int, name: str, num_stages: int, ahead: bool
) -> None:
    batches = []
    for is_fair in (False, True):
        rng = random.Random(seed)
        limits = BatchLimits(rng.randint(1, 6), rng.randint(6, 20), rng.randint(1, 12))
        policy = fair(name, limits) if is_fair else make_policy(name, limits, starvation_s=200.0)
        rig = _rig(policy, rng.randint(7, 15), num_stages, ahead)
        sent = _batches_of(policy)
        rig.run(_random_jobs(rng, num_tenants=1))
        batches.append(sent)
    assert batches[0] == batches[1]


def _rig(policy: Policy, num_blocks: int, num_stages: int, ahead: bool) -> Rig:
    return Rig(
        policy,
        num_blocks=num_blocks,
        num_host_blocks=10,
        link=Link(0.1, 0.1),
        num_stages=num_stages,
        kv_cache=KVCacheSection(prefix_caching=False),
        ahead=ahead,
    )


def _random_jobs(rng: random.Random, num_tenants: int) -> list[Job]:
    jobs = []
    for number in range(30):
        tenant = f"tenant-{rng.randrange(num_tenants)}"
        jobs.append(job_of(tenant, number, rng.randint(1, 16), rng.randint(1, 12)))
        jobs[-1].arrival_s = rng.uniform(0.0, 60.0)
        jobs[-1].service = ServiceLevel(
            tenant=tenant,
            ttft_slo_s=rng.choice([None, 10.0]),
            tpot_slo_s=rng.choice([None, 3.0]),
        )
    return jobs


def _batches_of(policy: Policy) -> list[list[tuple[int, int]]]:
    """Grows by each batch that is sent: numbers and tokens of its jobs."""
    batches: list[list[tuple[int, int]]] = []
    on_batch_sent = policy.on_batch_sent

    def note(batch: Sequence[Scheduled]) -> None:
        batches.append([(job.number, num_tokens) for job, num_tokens in batch])
        on_batch_sent(batch)

    policy.on_batch_sent = note  # type: ignore[method-assign]
    return batches
