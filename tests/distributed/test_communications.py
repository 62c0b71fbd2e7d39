"""Ranks on emulated GPUs communicate in an order that NCCL takes."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from communications import Communication, problems, read_notes
from emulated_gpu import Stream, emulated_gpu
from emulated_rank import COMMUNICATIONS
from engine_ranks import ranks_of
from fastserve_backend.errors import EngineError
from fastserve_backend.executor import rank_processes
from fastserve_backend.executor.distributed import DistributedExecutor
from fastserve_backend.rank_protocol.messages import PromptRows, Ready, Step, StepResult
from forked_ranks import ForkServer, forking
from job_steps import BLOCK_SIZE, BLOCKS, NUM_BLOCKS, PROMPTS, run_turns
from parallel_models import started_ranks
from ptx.driver import VARIABLE
from waiting import DEADLINE_S

LIMITS = {
    "device": "cuda",
    "block_size": BLOCK_SIZE,
    "device_blocks": NUM_BLOCKS,
    "swap_space_gib": 0.001,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 48,
}
Notes = dict[int, list[Communication]]


@pytest.fixture(scope="module")
def emulated_ranks() -> Iterator[None]:
    """Forks ranks that run `emulated_rank`."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.syspath_prepend(Path(__file__).parent)
        server = ForkServer("emulated_rank:run")
        yield from forking(lambda: server)


def result_of(executor: DistributedExecutor) -> StepResult:
    while not isinstance(result := executor.collect(), StepResult):
        pass
    return result


def collect_for_ever(executor: DistributedExecutor) -> None:
    while True:
        executor.collect()


def run_steps(executor: DistributedExecutor, num_stages: int) -> None:
    """Chunks, decodes, sampled tokens, steps sent ahead, log-probabilities of prompts."""

    def launch(step: Step) -> Callable[[], StepResult]:
        executor.submit(step)
        return partial(result_of, executor)

    run_turns(launch, ahead=False, computed=False)
    if num_stages == 1:
        run_turns(launch, ahead=True, computed=False)
    else:
        for step_id in range(100, 106):  # several at a time
            while not executor.can_submit:
                executor.collect()
            tokens = [1] if step_id % 2 else PROMPTS[0]
            executor.submit(Step.of(step_id, [(0, tokens, BLOCKS[step_id % 4])]))
        while executor._flights:
            executor.collect()
    scored = Step.of(200, [(0, PROMPTS[2], BLOCKS[2])])
    scored.prompt_rows = [PromptRows(job=0, first_row=0, token_ids=bytes(4 * 7), num_top=1)]
    launch(scored)()


class RecordedRanks:
    """Runs ranks once for each division of the model, and returns their notes."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model = model
        self._directory = directory
        self._notes: dict[tuple[int, int], Notes] = {}

    def notes(self, tensor_size: int, num_stages: int) -> Notes:
        key = tensor_size, num_stages
        if key not in self._notes:
            directory = self._directory / f"{tensor_size}-{num_stages}"
            directory.mkdir()
            with self.started(directory, *key) as (executor, _):
                run_steps(executor, num_stages)
            self._notes[key] = read_notes(directory)
        return self._notes[key]

    @contextmanager
    def started(
        self, directory: Path, tensor_size: int, num_stages: int
    ) -> Iterator[tuple[DistributedExecutor, Ready]]:
        parts = {"tensor_parallel_size": tensor_size, "pipeline_parallel_size": num_stages}
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv(COMMUNICATIONS, str(directory))
            with started_ranks(self._model, **parts, **LIMITS) as started:
                yield started


@pytest.fixture(scope="module")
def recorded(
    small_opt: Path, tmp_path_factory: pytest.TempPathFactory, emulated_ranks: None
) -> RecordedRanks:
    return RecordedRanks(small_opt, tmp_path_factory.mktemp("notes"))


@pytest.mark.parametrize(
    ("tensor_size", "num_stages"),
    [
        (2, 1),  # with steps sent ahead
        (2, 2),
        # The same operations, of more ranks and of fewer.
        pytest.param(4, 1, marks=pytest.mark.repeated),
        pytest.param(1, 2, marks=pytest.mark.repeated),
    ],
)
def test_all_ranks_keep_one_order(
    tensor_size: int, num_stages: int, recorded: RecordedRanks
) -> None:
    notes = recorded.notes(tensor_size, num_stages)
    assert sorted(notes) == list(range(tensor_size * num_stages))
    assert problems(notes) == []
    kinds = {(one.name, one.mode) for operations in notes.values() for one in operations}
    in_groups = {("broadcast", "eager"), ("gather", "eager")} | {
        ("all_reduce", mode) for mode in ("eager", "captured", "replayed")
    }
    assert (in_groups <= kinds) == (tensor_size > 1)
    assert ({("send", "eager"), ("recv", "eager")} <= kinds) == (num_stages > 1)


def test_a_lost_rank_leaves_no_wrong_order(
    recorded: RecordedRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Another rank may report first, and the process that forked the dead one may be slow to.
    monkeypatch.setattr(rank_processes, "DEATH_SHOWS_S", DEADLINE_S)
    step = Step.of(0, [(0, PROMPTS[0], BLOCKS[0])])
    with recorded.started(tmp_path, 2, 2) as (executor, _):
        executor.submit(step)
        ranks_of(executor)[1].send_signal(signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1 died"):
            collect_for_ever(executor)
    notes = read_notes(tmp_path)
    assert problems(notes, have_ended=False) == []
    assert "its last operation is not destroy_process_group" in "; ".join(problems(notes))


# Deliberately wrong orders are found.

Change = Callable[[list[Communication]], None]


def leave_out(operations: list[Communication]) -> None:
    del operations[place_of(operations, "all_reduce")]


def swap_with_the_next(operations: list[Communication]) -> None:
    """The second of two operations gets the first one's place, stream and all."""
    at = next(
        i
        for i, (one, other) in enumerate(pairwise(operations))
        if one.communicator == other.communicator and one.shape != other.shape and one.shape
    )
    one, other = operations[at : at + 2]
    operations[at] = replace(other, stream=one.stream, ended=one.ended)
    operations[at + 1] = replace(one, stream=other.stream, ended=other.ended)


def changing(which: str, how: str = "eager", **fields: Any) -> Change:
    def change(operations: list[Communication]) -> None:
        at = place_of(operations, which, how)
        operations[at] = replace(operations[at], **fields)

    return change


def end_early(operations: list[Communication]) -> None:
    operations.pop()


def place_of(operations: list[Communication], name: str, mode: str = "eager") -> int:
    """Of the last one: the first makes the communicator."""
    return max(i for i, one in enumerate(operations) if (one.name, one.mode) == (name, mode))


@pytest.mark.parametrize(
    ("rank", "change", "problem"),
    [
        (1, leave_out, r"operation \d+ of the communicator of ranks \[0, 1\]"),
        (3, swap_with_the_next, r"of ranks \[2, 3\]: rank 2: eager \w+ \[.*; rank 3: eager"),
        (2, changing("recv", shape=(9, 64)), r"of ranks \[0, 2\]: .*rank 2: eager recv \[9,"),
        (2, changing("recv", name="send"), r"of ranks \[0, 2\]: .*send.*rank 2: eager send"),
        (1, changing("all_reduce", dtype="torch.float16"), r"of ranks \[0, 1\]: .*float16"),
        (3, changing("gather", source=1), r"of ranks \[2, 3\]: .*from 1"),
        (1, changing("all_reduce", mode="captured"), r"of ranks \[0, 1\]: .*; rank 1: captured"),
        (0, changing("all_reduce", "replayed", mode="eager"), "rank 0: eager .*; rank 1: replayed"),
        (1, changing("all_reduce", thread="swap-in"), "rank 1: threads .* communicate"),
        (1, changing("all_reduce", stream=99, ended={99: 1}), r"rank 1: .* may run beside"),
        (3, end_early, "rank 3: its last operation is not destroy_process_group"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_found(
    rank: int, change: Change, problem: str, recorded: RecordedRanks
) -> None:
    notes = {rank: list(operations) for rank, operations in recorded.notes(2, 2).items()}
    change(notes[rank])
    assert re.search(problem, "\n".join(problems(notes)))


def note(name: str, stream: Stream, *, mode: str = "eager", size: int = 1) -> Communication:
    """An operation of the ranks 0 and 1."""
    ended = stream.add_operation()
    return Communication(
        name, (0, 1), 0, (size,), "torch.float32", mode, "MainThread", stream.number, ended
    )


def test_two_communicators_are_used_in_one_order() -> None:
    stream = Stream()
    first, second = note("all_reduce", stream), note("send", stream)
    received = replace(note("recv", stream), ended=second.ended)
    in_order = {0: [first, second], 1: [first, received]}
    assert problems(in_order, have_ended=False) == []
    found = problems(in_order | {1: [received, first]}, have_ended=False)
    assert any("wait for each other in a circle" in problem for problem in found)


def test_no_communicator_is_made_in_a_capture() -> None:
    first = note("all_reduce", Stream(), mode="captured")
    found = problems({0: [first], 1: [first]}, have_ended=False)
    assert any("a capture would have to make the communicator" in problem for problem in found)


@pytest.mark.parametrize("wait", ["none", "stream", "event", "host"])
def test_streams_without_order_are_found(wait: str) -> None:
    with emulated_gpu():
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        first = note("all_reduce", streams[0])
        event = torch.cuda.Event()
        event.record(streams[0])
        if wait == "stream":
            streams[1].wait_stream(streams[0])
        elif wait == "event":
            streams[1].wait_event(event)
        elif wait == "host":
            event.synchronize()
        second = note("all_reduce", streams[1])
        found = problems({rank: [first, second] for rank in (0, 1)}, have_ended=False)
    assert bool(found) == (wait == "none")
