"""The Markdown tables of benchmarks/peers, from reports with the keys of `fastserve bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import comparison_tables as tables
from benchmarks.peers import queues


def summary(mean_s: float, tokens_per_s: float = 0.0) -> dict[str, Any]:
    return {
        "normalized_latency_s": {"mean": mean_s, "p95": 2 * mean_s},
        "ttft_s": {"mean": 4 * mean_s},
        "jobs_per_s": 1.5,
        "output_tokens_per_s": tokens_per_s,
    }


def point(label: str, summaries: list[Any], **changes: Any) -> dict[str, Any]:
    records = [{"prompt_tokens": 512, "output_tokens": 64}]
    return {
        "label": label,
        "rate": 1.0,
        "attainment": 0.75,
        "failures_by_kind": {},
        "runs": [{"summary": one, "records": records if one else []} for one in summaries],
    } | changes


def cells(markdown: str) -> list[list[str]]:
    """The cells of the rows below the header."""
    return [line.strip("| ").split(" | ") for line in markdown.splitlines()[2:]]


def test_speeds_are_medians_with_the_least_and_the_most() -> None:
    runs = [summary(0.1, speed) for speed in (61.0, 75.0, 70.2)]
    report = {"points": [point("ours", runs), point("theirs", [summary(0.1, 312.4)])]}
    assert cells(tables.speed_table({"batch 1": report})) == [["batch 1", "70.2 [61, 75]", "312"]]


def test_answers_of_one_token_measure_the_prefill() -> None:
    one = point("ours", [summary(0.125)])
    one["runs"][0]["records"] = [{"prompt_tokens": 512, "output_tokens": 1}]
    assert cells(tables.speed_table({"prefill": {"points": [one]}})) == [["prefill", "1024"]]


def test_a_server_left_out_of_a_case_is_named_so() -> None:
    reports = {
        "batch 1": {"points": [point("ours", [summary(0.1, 50.0)])]},
        "batch 16": {"points": [point("theirs", [summary(0.1, 60.0)])]},
    }
    assert cells(tables.speed_table(reports)) == [
        ["batch 1", "50", "not run"],
        ["batch 16", "not run", "60"],
    ]


def test_the_sweep_lists_all_servers_of_a_rate_together() -> None:
    report = {
        "points": [
            point("ours", [summary(0.05)]),
            point("ours", [summary(0.25)], rate=2.5),
            point("theirs", [summary(0.1)]),
        ]
    }
    assert cells(tables.sweep_table(report)) == [
        ["1", "ours", "50", "100", "200", "75%", "1.5"],
        ["1", "theirs", "100", "200", "400", "75%", "1.5"],
        ["2.5", "ours", "250", "500", "1000", "75%", "1.5"],
    ]


def test_failed_jobs_are_not_hidden() -> None:
    some = point("ours", [summary(0.05)], failures_by_kind={"timed out": 2, "failed": 1})
    none_left = point("theirs", [None], failures_by_kind={"timed out": 8})
    rows = cells(tables.sweep_table({"points": [some, none_left]}))
    assert rows[0][2] == "50, 3 failed"
    assert rows[1][2:5] == ["8 failed"] * 3
    assert cells(tables.speed_table({"batch 1": {"points": [none_left]}})) == [
        ["batch 1", "8 failed"]
    ]


def test_rates_beyond_the_sweep_are_bounds() -> None:
    report = {
        "points": [point("ours", [summary(0.1)], rate=rate) for rate in (1.0, 4.0)],
        "within_objectives": {"ours": {"mean": None, "p95": 2.345, "goodput": 0.0}},
    }
    assert cells(tables.objectives_table(report)) == [["ours", "> 4", "2.35", "< 1"]]


def test_where_jobs_queue_each_repeat_is_compared_with_its_own(tmp_path: Path) -> None:
    def of(*means: float) -> list[dict[str, Any]]:
        distributions = ("normalized_latency_s", "ttft_s", "latency_s")
        return [
            {name: {"mean": mean, "p95": mean, "p99": mean} for name in distributions}
            for mean in means
        ]

    report = {"points": [point("ours", of(0.1, 0.3, 0.2)), point("theirs", of(0.2, 0.4, 0.8))]}
    ours, _, over = cells(queues.table(report, ["ours", "theirs"]))
    assert ours[:2] == ["ours", "200 [100, 300]"]
    assert over[:2] == ["ours over theirs", "0.5 [0.25, 0.75]"]

    report["points"][1]["failures_by_kind"] = {"timeout": 1}
    with pytest.raises(RuntimeError, match="theirs: jobs failed"):
        queues.table(report, ["ours", "theirs"])

    log = tmp_path / "ours.log"
    log.write_text("gittins: promotion after 60000 ms, at most 92 jobs and 2048 tokens\n")
    assert queues.seats_of(log) == 92
    log.write_text("nothing\n")
    with pytest.raises(RuntimeError, match="does not say how many jobs"):
        queues.seats_of(log)
