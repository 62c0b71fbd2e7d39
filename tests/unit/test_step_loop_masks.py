"""Jobs that wait for masks run beside jobs that need none."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
from delayed_masks import DelayedMasks
from fastserve_backend.errors import TenantLimitError
from fastserve_backend.grammars.messages import Mask, NewMasks, TimeUsed
from fastserve_backend.grammars.structured_output import StructuredOutput
from fastserve_backend.job import FinishReason, Job, ServiceLevel
from fastserve_backend.sampling_params import SamplingParams
from fastserve_backend.scheduler.base import BatchLimits
from fastserve_backend.scheduler.fair_shares import FairShares
from fastserve_backend.token_rules import TokenRules
from jobs import make_job
from loop_driver import Rig
from policies import TIMES, make_policy


def rig_of(*, ahead: bool = False, num_stages: int = 1, late: int = 0) -> Rig:
    masks = DelayedMasks(random.Random(1), late)
    policy = make_policy("fcfs", BatchLimits(4, 100))
    return Rig(policy, masks=masks, ahead=ahead, num_stages=num_stages)


def bound_job(number: int, max_tokens: int = 5) -> Job:
    job = make_job(number, 3)
    wanted = StructuredOutput(regex="a*")
    job.params = SamplingParams(max_tokens=max_tokens, temperature=0, structured_output=wanted)
    return job


def test_without_its_mask_a_job_is_in_no_step_and_others_are() -> None:
    rig = rig_of()
    free, bound = make_job(0, 3, max_tokens=9), bound_job(1)
    rig.loop.jobs.add(free)
    rig.loop.jobs.add(bound)
    rig.run_cycle(2)
    assert (len(free.output_ids), len(bound.output_ids)) == (2, 0)
    rig.masks.deliver()
    rig.run_cycle(2)
    assert (len(free.output_ids), len(bound.output_ids)) == (4, 1)
    rig.run()
    assert (len(free.output_ids), len(bound.output_ids)) == (9, 5)
    assert rig.pool.num_used == 0


def test_alone_it_leaves_the_loop_idle_until_its_mask_comes() -> None:
    rig = rig_of()
    bound = bound_job(0)
    rig.loop.jobs.add(bound)
    assert rig.loop.is_idle
    assert rig.loop.mask_wait_s == 0  # the time to compile is unknown
    rig.masks.deliver()
    assert not rig.loop.is_idle
    rig.run_cycle()
    assert len(bound.output_ids) == 1
    assert 0 < rig.loop.mask_wait_s < 0.01
    rig.masks.deliver()
    assert rig.loop.mask_wait_s == 0
    rig.loop.jobs.cancel(0)
    rig.run_cycle()
    assert rig.loop.is_idle


def test_a_step_that_decides_on_a_mask_is_not_followed_ahead() -> None:
    rig = rig_of(ahead=True)
    jobs = [make_job(0, 3, max_tokens=40), bound_job(1, max_tokens=10)]
    rig.run(jobs)
    assert [len(job.output_ids) for job in jobs] == [40, 10]
    steps, ahead = len(rig.iterations_s), rig.executor.num_ahead
    assert steps == 40  # neither has ever waited for the other
    assert 20 <= ahead < 30


@pytest.mark.parametrize("is_refused", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_job_whose_mask_there_is_not_ends_alone(is_refused: bool, num_tokens: int) -> None:
    rig = rig_of()
    free, bound = make_job(0, 3, max_tokens=9), bound_job(1)
    rig.loop.jobs.add(free)
    rig.loop.jobs.add(bound)
    while len(bound.output_ids) < num_tokens:
        rig.masks.deliver()
        rig.run_cycle()
    (rig.masks.refuse if is_refused else rig.masks.fail)(1, "too much")
    assert rig.ends == [(1, FinishReason.ERROR)]
    ((_, _, error),) = rig.delivery.closed
    assert error == "structured_output.regex: too much"
    assert (bound.refusal is not None) == is_refused
    rig.run()
    assert len(free.output_ids) == 9
    assert rig.pool.num_used == 0


def test_a_job_of_a_tenant_with_too_many_grammars_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = rig_of()
    free, bound = make_job(0, 3, max_tokens=9), bound_job(1)
    error = TenantLimitError("", "has 9 of 9", 1.0)
    monkeypatch.setattr(rig.masks, "begin_job", Mock(side_effect=error))
    rig.run([free, bound])
    assert rig.ends == [(1, FinishReason.ERROR), (0, FinishReason.LENGTH)]
    assert bound.refusal is error
    assert rig.pool.num_used == 0


@pytest.mark.parametrize(
    ("allowed", "bad_words", "num_ahead"),
    [([0, 1], [], 9), (None, [[1]], 9), (None, [[1, 1]], 0), ([0, 1], [[1, 1]], 0)],
)
def test_only_bans_that_depend_on_a_token_wait_for_it(
    allowed: list[int] | None, bad_words: list[list[int]], num_ahead: int
) -> None:
    rig = rig_of(ahead=True)
    job = make_job(0, 3, max_tokens=10)
    job.rules = TokenRules(32, allowed, bad_words, [], 0)
    rig.run([job])
    assert len(job.output_ids) == 10
    assert rig.executor.num_ahead == num_ahead


def test_a_job_whose_rules_leave_no_token_ends_alone() -> None:
    rig = rig_of(ahead=True)
    free, stuck = make_job(0, 3, max_tokens=9), make_job(1, 3, max_tokens=9)
    stuck.params = SamplingParams(max_tokens=9, allowed_token_ids=[0], bad_words=["a"])
    stuck.rules = TokenRules(32, [0], [[0, 0, 0]], [], 0)
    rig.run([free, stuck])
    assert (len(free.output_ids), len(stuck.output_ids)) == (9, 2)
    assert rig.ends == [(1, FinishReason.ERROR), (0, FinishReason.LENGTH)]
    assert str(stuck.refusal) == (
        "allowed_token_ids, bad_words: got '2 tokens'; together they allow no token after these"
    )
    assert rig.pool.num_used == 0


def test_rules_narrow_the_masks_of_a_grammar() -> None:
    rig = rig_of()
    wide, narrow = bound_job(0), bound_job(1)
    for job in (wide, narrow):
        job.rules = TokenRules(32, range(32) if job is wide else [31], [], [], 0)
        rig.loop.jobs.add(job)
    for number in range(2):
        rig.loop.jobs.on_mask_answer(NewMasks([Mask(number, 0, b"\x07\x00\x00\x00")]))
    assert wide.mask == b"\x07\x00\x00\x00"
    assert rig.ends == [(1, FinishReason.ERROR)]
    assert "structured_output" in str(narrow.refusal)


def test_with_stages_masks_come_while_other_batches_run() -> None:
    rig = rig_of(num_stages=2, late=2)
    jobs = [bound_job(n) if n % 2 else make_job(n, 3, max_tokens=5) for n in range(8)]
    rig.run(jobs)
    assert [len(job.output_ids) for job in jobs] == [5] * 8
    assert rig.masks.num_late > 0


def test_who_has_used_time_for_grammars_runs_later() -> None:
    limits = BatchLimits(1, 100)
    policy = FairShares(make_policy("fcfs", limits), TIMES, {}, 64, tolerance_tokens=8)
    rig = Rig(policy, masks=DelayedMasks(random.Random(1), 0))
    flood, other = make_job(0, 3, max_tokens=9), make_job(1, 3, max_tokens=9)
    flood.service, other.service = ServiceLevel(tenant="flood"), ServiceLevel(tenant="other")
    rig.loop.jobs.add(other)
    rig.loop.jobs.add(flood)
    rig.loop.jobs.on_mask_answer(TimeUsed("flood", 1000.0))
    rig.run()
    assert [number for number, _ in rig.ends] == [1, 0]


def test_where_tenants_do_not_count_time_for_grammars_does_not() -> None:
    rig = rig_of()
    rig.loop.jobs.on_mask_answer(TimeUsed("", 1000.0))
    rig.run([make_job(0, 3, max_tokens=2)])
    assert rig.ends == [(0, FinishReason.LENGTH)]


def test_a_mask_for_fewer_tokens_than_there_are_is_ignored() -> None:
    rig = rig_of()
    bound = bound_job(0)
    rig.loop.jobs.add(bound)
    rig.masks.deliver()
    rig.run_cycle()
    rig.loop.jobs.on_mask_answer(NewMasks([Mask(0, 0, b"late")]))  # told again, by a fresh process
    assert bound.mask is None
    assert rig.loop.is_idle == rig.delivery.is_empty
    rig.run()
    assert len(bound.output_ids) == 5
