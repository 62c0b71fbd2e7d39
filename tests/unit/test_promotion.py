"""Turns of starving jobs: how many at once, whose and how long; and the bound on waiting."""

from __future__ import annotations

import math

from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.job import Job
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.promotion import Promotion
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, run_iteration
from matrices import random_examples

STARVATION_S = 30.0


def waiting(*numbers: int, since_s: float = 0.0, batch: int = 4) -> tuple[Promotion, list[Job]]:
    """Waiting jobs, beside a batch of other jobs that just ran."""
    promotion = Promotion(STARVATION_S, token_s=lambda job: 0.0)
    jobs = [make_job(number, 1) for number in numbers]
    for job in jobs:
        promotion.start_waiting(job, since_s)
    promotion.on_iteration_finished([make_job(1000 + number, 1) for number in range(batch)], 100.0)
    return promotion, jobs


def test_a_quarter_of_a_batch_has_turns_in_the_order_in_which_they_starved() -> None:
    promotion, jobs = waiting(*range(5), batch=11)
    assert promotion.update(29.9, ()).begun == []
    assert promotion.update(30.0, ()).begun == jobs[:2]
    assert promotion.turn_number(jobs[0]) < promotion.turn_number(jobs[1])
    assert [promotion.has_turn(job) for job in jobs] == [True, True, False, False, False]


def test_first_tokens_of_starving_jobs_take_a_tenth_of_the_time() -> None:
    promotion = Promotion(STARVATION_S, token_s=lambda job: 2.0)
    jobs = [make_job(number, 1) for number in range(3)]
    for job in jobs:
        promotion.start_waiting(job, 0.0)
    promotion.num_turns = 3
    assert promotion.update(30.0, ()).begun == jobs[:1]
    assert promotion.update(49.9, ()).begun == []
    assert promotion.turn_due_in_s(jobs[1], 49.0) == 1.0
    assert promotion.update(50.0, ()).begun == jobs[1:2]
    assert promotion.update(70.0, ()).begun == jobs[2:]


def test_a_share_leaves_fewer_turns_and_less_time() -> None:
    promotion = Promotion(STARVATION_S, token_s=lambda job: 1.0)
    promotion.share = 0.5
    jobs = [make_job(number, 1) for number in range(3)]
    for job in jobs:
        promotion.start_waiting(job, 0.0)
    promotion.on_iteration_finished([make_job(1000 + number, 1) for number in range(16)], 0.0)
    assert promotion.num_turns == 2
    assert promotion.update(30.0, ()).begun == jobs[:1]
    assert promotion.update(49.9, ()).begun == []
    assert promotion.update(50.0, ()).begun == jobs[1:2]


def test_a_small_batch_has_one_turn() -> None:
    promotion, jobs = waiting(0, 1, batch=3)
    assert promotion.update(30.0, ()).begun == jobs[:1]


def test_a_turn_ends_after_its_time_with_a_token_and_not_in_flight() -> None:
    promotion, (first, second) = waiting(0, 1)
    promotion.update(30.0, ())
    assert promotion.update(40.0, ()).over == []  # it has no token
    run_iteration(first)
    assert promotion.update(40.0, [0]).over == []
    changes = promotion.update(40.0, ())
    assert (changes.over, changes.begun) == ([first], [second])
    assert promotion.update(69.9, [1]).begun == []  # the first has waited since 40 s


def test_a_turn_of_a_job_that_had_a_token_lasts_for_the_threshold() -> None:
    promotion, (first, _) = waiting(0, 1)
    run_iteration(first)
    promotion.update(30.0, ())
    run_iteration(first)
    assert promotion.update(59.9, ()).over == []
    assert promotion.update(60.0, ()).over == [first]


def test_a_job_that_waits_for_a_mask_gives_its_turn_back_and_has_the_next() -> None:
    promotion, (masked, other, last) = waiting(0, 1, 2)
    masked.params = SamplingParams(structured_output=StructuredOutput(regex="a"))
    masked.mask = b"known"
    assert promotion.update(30.0, ()).begun == [masked]
    masked.mask = None  # its next token is asked for
    changes = promotion.update(30.5, [0])  # the engine counts such jobs as in flight
    assert (changes.over, changes.begun) == ([masked], [other])
    masked.mask = b"known"
    run_iteration(other)
    changes = promotion.update(34.0, ())
    assert (changes.over, changes.begun) == ([other], [masked])  # it has starved since 0 s
    assert not promotion.has_turn(last)


def test_a_job_that_ends_in_its_turn_makes_room() -> None:
    promotion, (first, second) = waiting(0, 1)
    promotion.update(30.0, ())
    promotion.remove(first)
    assert promotion.update(30.1, ()).begun == [second]


@random_examples(300)
@given(
    arrivals_s=st.lists(st.floats(0.0, 40.0), min_size=1, max_size=40),
    batch=st.integers(1, 40),
    token_s=st.floats(0.05, 5.0),
)
def test_no_starving_job_waits_longer_than_the_bound(
    arrivals_s: list[float], batch: int, token_s: float
) -> None:
    """An overloaded server: jobs never end, and only those with a turn run. They get tokens one by
    one, each in ``token_s``."""
    promotion = Promotion(STARVATION_S, token_s=lambda job: token_s)
    jobs = [make_job(number, 1) for number in range(len(arrivals_s))]
    since = dict(enumerate(sorted(arrivals_s)))
    for job in jobs:
        promotion.start_waiting(job, since[job.number])
    promotion.num_turns = turns = max(1, batch // 4)
    # A selection comes at least every token_s or idle_s, so a turn may begin or end this late.
    idle_s = 0.25
    late_s = math.ceil(len(jobs) / turns) * 2 * (turns * token_s + idle_s)
    bound_s = (
        STARVATION_S + late_s + math.ceil(len(jobs) / turns) * (STARVATION_S + turns * token_s)
    )
    bound_s += 10 * len(jobs) * token_s  # first tokens get a tenth of the time
    now = min(since.values())
    for _ in range(100 + 20 * len(jobs)):
        promotion.update(now, ())
        running = sorted(filter(promotion.has_turn, jobs), key=promotion.turn_number)
        for job in running:
            now += token_s
            run_iteration(job)
            since[job.number] = now
        if not running:
            now += idle_s
        waits_s = [now - since_s for since_s in since.values()]
        assert max(waits_s) <= bound_s
