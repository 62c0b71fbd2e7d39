"""Stages run different steps at the same time. A copy has ended when all ranks have made it."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from collector import Collector
from engine_ranks import ranks_of
from fastserve_backend import SamplingParams
from fastserve_backend.engine.inbox import Inbox
from fastserve_backend.errors import EngineError
from fastserve_backend.executor import distributed
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import CopyBlocks, CopyResult, Step, StepResult
from parallel_models import ParallelLLM, started_ranks
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("forked_ranks")

LONG = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)


class CountingExecutor(DistributedExecutor):
    """Real ranks, with the largest number of steps that were under way at once."""

    most_flights = 0

    def submit(self, step: Step) -> None:
        super().submit(step)
        self.most_flights = max(self.most_flights, len(self._flights))


def prefill(step_id: int, block: int, num_tokens: int = 16) -> Step:
    return Step.of(step_id, [(0, range(4, 4 + num_tokens), [block])])


def copy_out(transfer_id: int, host_block: int) -> CopyBlocks:
    device, host = array("i", [0]).tobytes(), array("i", [host_block]).tobytes()
    return CopyBlocks(transfer_id, True, device, host, 16)


def next_result(executor: DistributedExecutor) -> StepResult | CopyResult:
    """``collect`` also returns when there is room for another step, or when it has waited a
    while for an arrival."""
    while (result := executor.collect()) is None:
        pass
    return result


@pytest.fixture(scope="module")
def two_stages(small_opt: Path) -> Iterator[DistributedExecutor]:
    keys = {"pipeline_parallel_size": 2, "device_blocks": 8, "swap_space_gib": 0.001}
    with started_ranks(small_opt, **keys) as (executor, ready):
        assert ready.num_blocks == 8
        yield executor


def test_as_many_steps_as_stages_are_under_way(two_stages: DistributedExecutor) -> None:
    executor = two_stages
    for first in (0, 10):
        assert executor.can_submit
        executor.submit(prefill(first, 0))
        assert not executor.can_submit
        answers = []
        while not executor.can_submit:
            if (answer := executor.collect()) is not None:
                answers.append(answer)
        executor.submit(prefill(first + 1, 1))
        while len(answers) < 2:
            if (answer := executor.collect()) is not None:
                answers.append(answer)
        assert all(isinstance(answer, StepResult) for answer in answers)
        assert [answer.step_id for answer in answers] == [first, first + 1]  # type: ignore[union-attr]
        assert answers[0].token_ids == answers[1].token_ids  # type: ignore[union-attr]
    assert all(seconds > 0 for seconds in executor.busy_s)


def test_waiting_for_a_stage_is_told_apart(two_stages: DistributedExecutor) -> None:
    executor = two_stages
    _, last = ranks_of(executor)
    last.suspend()
    try:
        executor.submit(prefill(20, 0))
        while not executor.can_submit:
            executor.collect()
        executor.submit(prefill(21, 1))
        while executor._in_first_stage is not None:
            assert executor.collect(0.01) is None
        assert executor.collect(0.2) is None  # both stages are held up, the second by the first
    finally:
        last.resume()
    first, second = (next_result(executor) for _ in range(2))
    assert isinstance(first, StepResult)
    assert isinstance(second, StepResult)
    assert first.waited_s == 0
    assert second.waited_s >= 0.2


def test_a_copy_that_one_rank_cannot_make_has_failed(two_stages: DistributedExecutor) -> None:
    executor = two_stages
    # The stages have 2 and 1 layers, so the last stage has room for more blocks.
    ready_blocks = int(0.001 * 2**30) // (2 * 2 * 4 * 16 * 16 * 4)
    for transfer_id, host_block in ((1, ready_blocks - 1), (2, ready_blocks)):
        executor.copy(copy_out(transfer_id, host_block))
        result = next_result(executor)
        assert isinstance(result, CopyResult)
        assert result.transfer_id == transfer_id
        assert result.seconds > 0
        if transfer_id == 1:
            assert result.error is None
        else:
            assert (
                result.error == f"rank 0: IndexError: host block {ready_blocks} of {ready_blocks}"
            )


def test_a_rank_gets_every_copy_however_far_behind_it_is(
    two_stages: DistributedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, num_copies = two_stages, 10_000
    # At each message it looks at all unfinished copies. An engine never has so many.
    monkeypatch.setattr(executor, "_check_overdue", lambda: None)
    first, _ = ranks_of(executor)
    first.suspend()
    try:
        for transfer_id in range(num_copies):
            executor.copy(copy_out(transfer_id, 0))
    finally:
        first.resume()
    ended = []
    for _ in range(num_copies):
        result = next_result(executor)
        assert isinstance(result, CopyResult)
        assert result.error is None
        ended.append(result.transfer_id)
    assert ended == list(range(num_copies))


def test_a_copy_is_overdue_only_when_the_steps_before_it_have_ended(
    small_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_s, short_s = distributed.COPY_TIMEOUT_S, 1.0
    monkeypatch.setattr(distributed, "COPY_TIMEOUT_S", short_s)
    keys = {"device_blocks": 8, "swap_space_gib": 0.001}
    with started_ranks(small_opt, **keys) as (executor, _):
        (rank,) = ranks_of(executor)
        rank.suspend()
        executor.submit(prefill(0, 0))
        executor.submit(prefill(1, 1))
        executor.copy(copy_out(0, 0))
        assert executor.collect(2.5) is None  # the rank seems to be in a long step
        monkeypatch.setattr(distributed, "COPY_TIMEOUT_S", long_s)
        rank.resume()
        # Results come in any order, as steps and copies have separate sockets.
        ended = [type(next_result(executor)) for _ in range(3)]
        assert ended.count(StepResult) == 2
        assert ended.count(CopyResult) == 1
        rank.suspend()
        executor.copy(copy_out(1, 0))
        executor.submit(prefill(2, 0))
        monkeypatch.setattr(distributed, "COPY_TIMEOUT_S", short_s)
        with pytest.raises(EngineError, match="a copy of KV blocks has not ended"):
            executor.collect()
        rank.resume()  # so that it can end by itself


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_engine_keeps_all_stages_at_work(
    num_stages: int, small_opt: Path, tokenizer: Path
) -> None:
    with ParallelLLM(small_opt, tokenizer, 1, num_stages, kind=CountingExecutor) as llm:
        (executor,) = llm.executors
        assert isinstance(executor, CountingExecutor)
        executor.most_flights = 0
        last = ranks_of(executor)[-1]
        last.suspend()  # its step does not end before the stages before it have their next ones
        try:
            clients = [Collector() for _ in range(16)]
            for client in clients:
                llm.engine.submit("job", [5, 6, 7], LONG, client)
            wait_for(lambda: executor.most_flights == num_stages)
        finally:
            last.resume()
        for client in clients:
            client.wait()
        assert executor.most_flights == num_stages
        assert len(executor.busy_s) == num_stages
        # Both are sums of the same times, in other orders.
        assert llm.engine.counters.compute_s <= sum(executor.busy_s) * (1 + 1e-9)


def test_an_arrival_ends_the_wait_for_a_copy(
    small_opt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "ARRIVAL_POLL_S", 100.0)  # the test's limit is shorter
    inbox: Inbox[str] = Inbox()
    keys = {"device_blocks": 8, "swap_space_gib": 0.001}
    with started_ranks(small_opt, arrivals=inbox.descriptor, **keys) as (executor, _):
        (rank,) = ranks_of(executor)
        rank.suspend()
        try:
            executor.copy(copy_out(1, 0))
            threading.Timer(0.1, inbox.put, ["a job"]).start()
            began_s = time.monotonic()
            assert executor.collect() is None
            assert time.monotonic() - began_s < 50.0
            inbox.start_taking()
            assert inbox.get() == "a job"
        finally:
            rank.resume()
        assert isinstance(executor.collect(), CopyResult)
