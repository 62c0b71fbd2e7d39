"""Ranks are killed or stopped while they serve: clients see only a pause."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from collector import Collector, Trigger
from engine_ranks import executor_of, rank_of
from fastserve_backend import LLM, SamplingParams
from fastserve_backend.errors import EngineError
from fastserve_backend.executor import rank_processes
from fastserve_backend.job import FinishReason
from fastserve_backend.logprobs import TokenLogprob
from held_thread import main_thread_held
from live_engine import small_engine, wait_until_free
from small_model import VOCAB_SIZE
from started_processes import RANK, noting_processes
from waiting import DEADLINE_S, wait_for

NUM_JOBS = 20
OUTPUT = 100
# Memory for 40% of the jobs, and quanta so short that jobs preempt each other at each token.
UNDER_PRESSURE = {
    "device_blocks": 80,
    "swap_space_gib": 0.02,
    "max_num_seqs": 6,
    "policy": "skip_join_mlfq",
    "base_quantum_ms": 0.01,
}
Jobs = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def jobs(llm: LLM) -> Jobs:
    """Greedy and sampled jobs, some with penalties, stop words and log-probabilities."""
    rng = random.Random(12)
    made = []
    for index in range(NUM_JOBS):
        params = SamplingParams(
            max_tokens=OUTPUT,
            temperature=(0.0, 0.9)[index % 2],
            seed=index,
            repetition_penalty=(1.0, 1.2)[index // 2 % 2],
            logprobs=(None, 2)[index // 4 % 2],
            ignore_eos=True,
        )
        prompt = [rng.randrange(4, VOCAB_SIZE) for _ in range(rng.randint(1, 120))]
        made.append((prompt, params))
    for client, index in zip(submit(llm, made[::5]), range(0, NUM_JOBS, 5), strict=True):
        client.wait()
        word = client.text[60:64]
        prompt, params = made[index]
        made[index] = prompt, replace(params, stop=(word,))
    return made


@pytest.fixture(scope="module")
def undisturbed(llm: LLM, jobs: Jobs) -> list[Collector]:
    clients = submit(llm, jobs)
    for client in clients:
        client.wait()
    ends = {client.outputs[-1].finish_reason for client in clients}
    assert ends == {FinishReason.LENGTH, FinishReason.STOP}
    assert any(map(logprobs, clients))
    return clients


def submit(llm: LLM, jobs: Jobs, sinks: list[Collector] | None = None) -> list[Collector]:
    clients = sinks or [Collector() for _ in jobs]
    for (prompt, params), client in zip(jobs, clients, strict=True):
        llm.engine.submit("job", prompt, params, client)
    return clients


def assert_the_same(client: Collector, other: Collector) -> None:
    assert client.token_ids == other.token_ids
    assert [one.text for one in client.outputs] == [one.text for one in other.outputs]
    assert client.outputs[-1].finish_reason is other.outputs[-1].finish_reason
    for entry, wanted in zip(logprobs(client), logprobs(other), strict=True):
        assert entry.logprob == pytest.approx(wanted.logprob, abs=1e-3)
        assert [token for token, _ in entry.top] == [token for token, _ in wanted.top]


def logprobs(client: Collector) -> list[TokenLogprob]:
    return [entry for output in client.outputs for entry in output.logprobs]


def signal_fresh_ranks(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> list[subprocess.Popen[bytes]]:
    """From now on each rank gets this signal when it has started, long before it has loaded.
    Returns the list to which they are added."""
    fresh: list[subprocess.Popen[bytes]] = []
    start = rank_processes._start

    def start_and_signal(
        command: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[subprocess.Popen[bytes], int]:
        process, pidfd = start(command, environment)
        os.kill(process.pid, number)
        fresh.append(process)
        return process, pidfd

    monkeypatch.setattr(rank_processes, "_start", start_and_signal)
    return fresh


@pytest.mark.usefixtures("forked_ranks_here")
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "skip_join_mlfq"},
        {"policy": "mlfq", "strategy": "reactive", "prefill_chunk_tokens": 30},
        {"policy": "fcfs", "strategy": "defer"},
    ],
    ids=str,
)
def test_streams_under_load_outlive_a_killed_rank(
    checkpoint: Path,
    tokenizer: Path,
    jobs: Jobs,
    undisturbed: list[Collector],
    options: dict[str, Any],
) -> None:
    with small_engine(checkpoint, tokenizer, **(UNDER_PRESSURE | options)) as llm:
        clients = [Collector() for _ in jobs]
        clients[1] = Trigger(40, rank_of(llm).kill)
        submit(llm, jobs, clients)
        for client in clients:
            client.wait()
        for client, other in zip(clients, undisturbed, strict=True):
            assert_the_same(client, other)
        counters = llm.engine.counters
        assert counters.worker_restarts == 1
        assert counters.finished.total() == NUM_JOBS
        if options.get("strategy") != "defer":
            assert counters.swap_out_bytes > 0
        wait_until_free(llm)
        snapshot = llm.engine.snapshot()
        assert snapshot.swapped == 0
        assert sum(snapshot.level_sizes) == 0


@pytest.mark.usefixtures("forked_ranks_here")
def test_a_stopped_rank_is_replaced(
    checkpoint: Path,
    tokenizer: Path,
    jobs: Jobs,
    undisturbed: list[Collector],
) -> None:
    with small_engine(checkpoint, tokenizer) as llm:
        stopped, executor = rank_of(llm), executor_of(llm)

        def stop() -> None:
            stopped.suspend()
            executor._ranks._heartbeat_timeout_s = 2.5  # of this one, not of the next

        clients = [Trigger(10, stop), Collector()]
        submit(llm, jobs[1:3], clients)
        for client, other in zip(clients, undisturbed[1:3], strict=True):
            client.wait()
            assert_the_same(client, other)
        assert not stopped.is_running()
        assert llm.engine.counters.worker_restarts == 1


def test_a_rank_that_dies_while_idle_is_replaced(
    checkpoint: Path,
    tokenizer: Path,
    jobs: Jobs,
    undisturbed: list[Collector],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with small_engine(checkpoint, tokenizer) as llm:
        rank_of(llm).kill()
        wait_for(lambda: llm.engine.counters.worker_restarts == 1)
        assert "rank 0 died" in caplog.text  # its death was noticed, not its silence
        (client,) = submit(llm, jobs[:1])
        client.wait()
        assert_the_same(client, undisturbed[0])


def test_closing_while_ranks_load_is_quick_and_leaves_nothing_behind(
    checkpoint: Path, tokenizer: Path, jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rank_processes, "STOP_TIMEOUT_S", 2 * DEADLINE_S)
    with noting_processes() as started, small_engine(checkpoint, tokenizer) as llm:
        loading = signal_fresh_ranks(monkeypatch, signal.SIGSTOP)  # they load for ever
        (client,) = submit(llm, jobs[1:2], [Trigger(5, rank_of(llm).kill)])
        wait_for(lambda: bool(loading))
        began_s = time.monotonic()
        llm.close()
        assert time.monotonic() - began_s < DEADLINE_S
        assert client.wait().finish_reason is FinishReason.CANCELLED
    assert len(started.of(RANK)) == 2
    assert not started.left(RANK)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("forked_ranks_here")
def test_after_three_restarts_jobs_fail_with_the_reason(
    checkpoint: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_engine(checkpoint, tokenizer, max_num_seqs=2) as llm:
        long = SamplingParams(max_tokens=300, ignore_eos=True)
        # The first rank dies while it serves, the others while they load.
        fresh = signal_fresh_ranks(monkeypatch, signal.SIGKILL)
        all_are_here = threading.Event()

        def kill() -> None:
            assert all_are_here.wait(DEADLINE_S)
            rank.kill()

        rank, first = rank_of(llm), Trigger(1, kill)
        clients = submit(llm, [([5], long)] * 20, [first, *(Collector() for _ in range(19))])
        all_are_here.set()
        reason = (
            "the model's processes failed: rank 0 died with exit code -9 "
            "(SIGKILL: probably out of memory, see the kernel's log); "
            "given up after 3 restarts in 10 minutes"
        )
        for client in clients:
            output = client.wait()
            assert (output.finish_reason, output.error) == (FinishReason.ERROR, reason)
        assert len(fresh) == 3
        assert llm.engine.gave_up
        with pytest.raises(EngineError, match=re.escape(reason)):
            submit(llm, [([5], long)])
        with pytest.raises(EngineError):
            llm.generate([[5]], long, progress=False)
        assert llm.engine.drain(DEADLINE_S)


def test_the_engine_moves_while_a_rank_computes_for_long(llm: LLM) -> None:
    """Or the launcher would take it for one that hangs."""
    engine, client = llm.engine, Collector()
    with main_thread_held(rank_of(llm).pid):
        engine.submit("job", [5], SamplingParams(max_tokens=1), client)
        for _ in range(3):
            before = engine.progress
            wait_for(lambda before=before: engine.progress != before)
        assert not client.outputs
    client.wait()
