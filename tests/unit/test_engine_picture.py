"""Pictures of the engine, and when watchers get them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from fastserve_backend.engine.picture import take_picture
from fastserve_backend.engine.watches import MAX_WATCHES, Watches
from fastserve_backend.errors import DrainingError, OverloadedError
from fastserve_backend.job import JobState, ServiceLevel
from fastserve_backend.rank_protocol.layer_kinds import ONE_GROUP, LayerKind
from fastserve_backend.scheduler.base import BatchLimits
from fastserve_client.engine_state import MAX_LISTED_JOBS, EngineState, ListedJob
from fastserve_gateway.routing.server_load import ServerLoad
from jobs import make_job
from loop_driver import WINDOWED_KINDS, Rig, SimpleModel
from policies import POLICIES, make_policy, one_job, skip_join


def picture(rig: Rig) -> EngineState:
    return take_picture(rig.clock.now(), "some", rig.loop, rig.counters, SimpleModel())


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_a_picture(name: str) -> None:
    rig = Rig(make_policy(name, BatchLimits(2, 100)))
    for number in range(3):
        rig.loop.jobs.add(make_job(number, 4 + number, max_tokens=5))
    rig.run_cycle()
    state = picture(rig)
    assert (state.running, state.waiting, state.swapped) == (2, 1, 0)
    assert [job.state for job in state.jobs] == ["running", "running", "waiting"]
    assert sum(level.num_jobs for level in state.levels) == 3
    has_quanta = name.endswith("mlfq") or name == "speculative"
    assert (len(state.levels) > 1) == has_quanta
    assert all((level.quantum_s is not None) == has_quanta for level in state.levels)
    assert all(job.level < len(state.levels) for job in state.jobs)
    assert state.policy_description == rig.loop.policy.describe()
    assert EngineState.from_json(msgspec.json.encode(state).decode()) == state


@pytest.mark.parametrize("kinds", [ONE_GROUP, *WINDOWED_KINDS])
def test_tokens_that_the_gateway_counts_with_are_those_of_all_groups(
    kinds: Sequence[LayerKind],
) -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(2, 100)), kinds=kinds)
    needs = rig.loop.kv.tiers.needs
    state = EngineState.from_json(msgspec.json.encode(picture(rig)).decode())
    assert ServerLoad.of(state).kv_tokens == (
        state.device.num_blocks * needs.block_size // sum(kind.num_groups for kind in kinds)
    )


def test_a_job_from_arrival_to_preemption() -> None:
    rig = Rig(skip_join())
    assert picture(rig).jobs == ()
    rig.loop.jobs.add(make_job(7, 8, max_tokens=30))
    (job,) = picture(rig).jobs
    assert job == ListedJob(7, "waiting", 3, 8, 0, 0, 0, 0.0, 0)
    rig.run_cycle()  # 8 s of prefill, a whole quantum of the queue that it joined
    (job,) = picture(rig).jobs
    assert job == ListedJob(7, "running", 4, 8, 1, 2, 0, 0.0, 0)
    rig.loop.jobs.add(make_job(8, 1, max_tokens=2, arrival_s=8.0))
    rig.run_cycle()
    running, waiting = picture(rig).jobs
    assert (running.number, running.state) == (8, "running")
    assert (waiting.state, waiting.waited_s, waiting.num_preemptions) == ("preempted", 1.0, 1)
    totals = picture(rig).totals
    assert (totals.iterations, totals.generation_tokens, totals.prompt_tokens) == (2, 2, 9)
    assert (totals.preemptions, totals.demotions) == (1, 2)
    before = picture(rig)
    rig.run()
    assert before.jobs == (running, waiting)  # a picture does not change
    assert picture(rig).jobs == ()


def test_what_a_new_prompt_would_wait_for() -> None:
    rig = Rig(make_policy("fcfs", BatchLimits(2, 100, 16)))
    for number in range(3):
        rig.loop.jobs.add(make_job(number, 20, max_tokens=5))
    assert picture(rig).waiting_prompt_tokens == 60
    assert picture(rig).prefill_tokens_per_s == 1.0  # 16 tokens in 16 s
    rig.run_cycle(2)  # the first prompt in chunks of 16 and 4, the second one with the latter
    assert picture(rig).waiting_prompt_tokens == 28
    rig.run()
    assert picture(rig).waiting_prompt_tokens == 0


def test_a_job_shows_what_its_request_wanted() -> None:
    rig = Rig(skip_join())
    job = make_job(0, 8, max_tokens=30)
    job.service = ServiceLevel(-1, ttft_slo_s=5.0, tpot_slo_s=2.0, tenant="acme")
    rig.loop.jobs.add(job)
    (shown,) = picture(rig).jobs
    assert (shown.priority, shown.tenant, shown.ttft_slo_s, shown.tpot_slo_s) == (
        *(-1, "acme"),
        *(5.0, 2.0),
    )
    assert shown.late_s == -5.0
    rig.run_cycle()  # 8 s of prefill: the next token is due in 2 s
    (shown,) = picture(rig).jobs
    assert shown.late_s == -2.0


def test_kv_on_its_way_and_on_the_host() -> None:
    rig = Rig(skip_join(), num_host_blocks=8)
    job = make_job(0, 8, max_tokens=30)
    rig.loop.jobs.add(job)
    rig.run_cycle()
    job.state = JobState.PREEMPTED
    tiers = rig.loop.kv.tiers

    def seen() -> tuple[str, int, int, int, int]:
        state = picture(rig)
        (shown,) = state.jobs
        used = state.device.used_blocks, state.host.used_blocks
        assert (shown.device_blocks, shown.host_blocks) == used
        return shown.state, state.swapped, *used

    assert seen() == ("preempted", 0, 2, 0)
    assert tiers.write_back(0, 8, 1) is not None
    assert seen() == ("preempted", 0, 2, 1)  # it may run meanwhile
    tiers.finish(0, succeeded=True)
    assert tiers.swap_out(0, 8) is not None
    assert seen() == ("swapping_out", 1, 2, 2)
    tiers.finish(0, succeeded=True)
    assert seen() == ("swapped", 1, 0, 2)
    tiers.swap_in(0, room_for=9)
    assert seen() == ("swapping_in", 1, 3, 2)
    tiers.finish(0, succeeded=True)
    assert seen() == ("preempted", 0, 3, 2)


def test_those_that_run_are_listed_whatever_came_before() -> None:
    rig = Rig(make_policy("srpt", one_job()), num_blocks=400)
    for number in range(MAX_LISTED_JOBS + 10):
        rig.loop.jobs.add(make_job(number, 9, max_tokens=40))
    rig.loop.jobs.add(make_job(1000, 1, max_tokens=3))
    rig.run_cycle()
    state = picture(rig)
    assert len(state.jobs) == MAX_LISTED_JOBS
    assert (state.jobs[0].number, state.jobs[0].state) == (1000, "running")
    assert [job.number for job in state.jobs[1:]] == list(range(MAX_LISTED_JOBS - 1))
    assert (state.running, state.waiting) == (1, MAX_LISTED_JOBS + 10)


# --- watches ------------------------------------------------------------------------------------


def state_of_nothing() -> EngineState:
    return picture(Rig(skip_join()))


def test_each_is_shown_what_is_due() -> None:
    watches, state = Watches(), state_of_nothing()
    assert watches.due_in_s(0.0) == float("inf")
    quick: list[EngineState | None] = []
    slow: list[EngineState | None] = []
    watches.add(1.0, quick.append)
    number = watches.add(3.0, slow.append)
    assert watches.due_in_s(5.0) == 0.0
    watches.show(5.0, state)
    assert (len(quick), len(slow)) == (1, 1)
    assert watches.due_in_s(5.5) == 0.5
    watches.show(6.0, state)
    assert (len(quick), len(slow)) == (2, 1)
    watches.show(10.0, state)  # late: missed pictures are not sent later
    assert (len(quick), len(slow)) == (3, 2)
    assert watches.due_in_s(10.0) == 1.0
    watches.remove(number)
    watches.remove(number)
    watches.show(20.0, state)
    assert (len(quick), len(slow)) == (4, 2)


def test_so_many_and_none_after_the_end() -> None:
    watches = Watches()
    seen: list[EngineState | None] = []
    numbers = [watches.add(1.0, seen.append) for _ in range(MAX_WATCHES)]
    with pytest.raises(OverloadedError, match="8 others watch already; try again later"):
        watches.add(1.0, seen.append)
    watches.remove(numbers[0])
    watches.add(1.0, seen.append)
    watches.close()
    watches.close()
    assert seen == [None] * MAX_WATCHES
    assert watches.due_in_s(0.0) == float("inf")
    with pytest.raises(DrainingError, match="shutting down"):
        watches.add(1.0, seen.append)
