"""Workloads with long prompts, bursts, conversations, and the traces that others publish."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fastserve_bench.workload import Workload
from fastserve_bench.workload.synthetic import synthetic_lengths
from fastserve_client.errors import WorkloadError


@pytest.mark.parametrize(
    ("name", "prompt_mean", "prompt_p95", "output_mean", "output_median"),
    [
        ("chat", 1155, (2000, 2600), 211, 129),
        ("code", 2048, (5000, 7000), 28, 13),
        ("long-context", 12000, (20_000, 30_000), 343, 251),
    ],
)
def test_lengths_are_like_those_published(
    name: str,
    prompt_mean: float,
    prompt_p95: tuple[float, float],
    output_mean: float,
    output_median: float,
) -> None:
    prompts, outputs = np.array(synthetic_lengths(name)).T
    assert prompts.mean() == pytest.approx(prompt_mean, rel=0.02)
    assert prompt_p95[0] < np.percentile(prompts, 95) < prompt_p95[1]
    assert outputs.mean() == pytest.approx(output_mean, rel=0.02)
    assert np.median(outputs) == pytest.approx(output_median, rel=0.05)
    assert prompts.min() >= 1
    assert outputs.min() >= 1


@pytest.mark.parametrize("dataset", ["code", "agents", "batch-beside-chat"])
def test_bursts_come_at_three_times_the_rate_and_leave_two_thirds_of_the_time_idle(
    dataset: str,
) -> None:
    trace = Workload(dataset, 3000, arrivals="bursts").trace(10.0)
    assert [job.arrival_s for job in trace] == sorted(job.arrival_s for job in trace)
    if dataset == "code":
        assert all(job.arrival_s % 30 < 10 for job in trace)
        assert trace[-1].arrival_s == pytest.approx(300, rel=0.1)
    assert Workload(dataset, 3000, arrivals="bursts").trace(10.0) == trace
    assert Workload(dataset, 3000, seed=1, arrivals="bursts").trace(10.0) != trace


def test_a_conversation_grows_by_answers_and_results() -> None:
    trace = Workload("agents", 2000).trace(5.0)
    assert len(trace) == 2000
    assert (len(trace) - 1) / trace[-1].arrival_s == pytest.approx(5.0, rel=0.15)
    prompts = np.array([job.prompt_tokens for job in trace])
    assert 2000 < prompts.mean() < 5000
    assert prompts.max() < 7500


def test_a_batch_waits_beside_a_chat() -> None:
    trace = Workload("batch-beside-chat", 400).trace(2.0)
    at_once = [job for job in trace if job.arrival_s == 0.0]
    assert (len(trace), len(at_once)) == (400, 100)
    later = [job.output_tokens for job in trace if job.arrival_s > 0]
    assert np.mean([job.output_tokens for job in at_once]) > 1.5 * np.mean(later)


def mooncake(path: Path, *records: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def record(timestamp: object, prompt: object = 8, output: object = 4) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": prompt,
        "output_length": output,
        "hash_ids": [1],
    }


def test_a_trace_of_mooncake(tmp_path: Path) -> None:
    records = [record(1000), record(1500, 6000, 30), record(2000, 7, 0), record(4000)]
    path = mooncake(tmp_path / "trace.jsonl", *records)
    trace = Workload(path, 3).trace(None)
    assert [(job.arrival_s, job.prompt_tokens, job.output_tokens) for job in trace] == [
        (0.0, 8, 4), (0.5, 6000, 30), (3.0, 8, 4)
    ]  # fmt: skip
    assert [job.arrival_s for job in Workload(path, 3).trace(2.0)] == pytest.approx([0, 1 / 6, 1])


def test_a_trace_of_burstgpt(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,ChatGPT,1087,0,1087,Conversation log\n"
        "118,GPT-4,417,276,693,API log\n",
        encoding="utf-8",
    )
    trace = Workload(str(path), 2).trace(None)
    assert [(job.arrival_s, job.prompt_tokens, job.output_tokens) for job in trace] == [
        (0.0, 472, 18), (113.0, 417, 276)
    ]  # fmt: skip


def test_other_arrivals_than_the_traces_own(tmp_path: Path) -> None:
    path = mooncake(tmp_path / "trace.jsonl", record(0), record(9000, 20, 5))
    assert Workload(path, 2, arrivals="trace").trace(None) == Workload(path, 2).trace(None)
    trace = Workload(path, 500, arrivals="bursts").trace(10.0)
    assert len(trace) == 500
    assert set(Counter((job.prompt_tokens, job.output_tokens) for job in trace)) == {
        (8, 4), (20, 5)
    }  # fmt: skip
    assert all(job.arrival_s % 30 < 10 for job in trace)


@pytest.mark.parametrize(
    ("workload", "rate", "message"),
    [
        (Workload("codes", 5), 1.0, r"got 'codes'.*chat, code, long-context, agents"),
        (Workload("code", 5, arrivals="burst"), 1.0, "arrivals: got 'burst'; must be one of"),
        (Workload("code", 5, arrivals="trace"), 1.0, "arrivals: got 'trace'; code has no timest"),
        (Workload("code", 5, arrivals="bursts"), None, "rate: got none"),
        (Workload("agents", 5), None, "rate: got none; agents"),
        (Workload("agents", 5, scale=0.5), 1.0, "scale: does not go with the data set agents"),
        (Workload("agents", 5, arrivals="trace"), 1.0, "arrivals trace: does not go with"),
    ],
)
def test_impossible_workloads_are_refused(
    workload: Workload, rate: float | None, message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload.trace(rate)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([record(2000), record(1000)], r"job 2: its timestamp is 1 s before.*sort the file"),
        ([record(0), record(1, prompt=-1)], r"jsonl:2: input_length: got -1"),
        ([record(0), record(1, output=1.5)], r"jsonl:2: output_length: got 1.5"),
        ([record(0), {"timestamp": 5}], r"jsonl:2: input_length: got None"),
    ],
)
def test_damaged_traces_are_refused(
    tmp_path: Path, records: list[dict[str, object]], message: str
) -> None:
    path = mooncake(tmp_path / "trace.jsonl", *records)
    with pytest.raises(WorkloadError, match=message):
        Workload(path, 2).trace(None)
