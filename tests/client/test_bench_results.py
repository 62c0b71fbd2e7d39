"""From runs to points, rates within objectives, ratios, tables and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from fastserve_bench.comparison import compare, comparison_table
from fastserve_bench.connection import Target
from fastserve_bench.figures import write_figures
from fastserve_bench.groups import jain_index
from fastserve_bench.outcome import Failure, FailureKind, LoadOutcome
from fastserve_bench.own_server import OwnServer
from fastserve_bench.points import Point, gather_points, sweep_points, within_objectives
from fastserve_bench.report.objectives import Objectives, highest_rate
from fastserve_bench.report.output import Output, write_json
from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.table import sweep_table
from fastserve_bench.requests import FIRST_TOKEN_ID, exact_requests, natural_requests
from fastserve_bench.results_file import report_json
from fastserve_bench.session import Load, Plan, Run
from fastserve_bench.tables import error_lines, objectives_table, result_tables
from fastserve_bench.workload import ServiceClass, TraceJob, Workload
from fastserve_client.errors import InvalidRequest, WorkloadError
from report_records import record
from rich.console import Console
from rich.table import Table

SLOW, FAST = Load(rate=1.0), Load(rate=4.0)
SLO = Objectives(normalized_latency_s=1.0)


def plan(*loads: Load) -> Plan:
    workload = Workload("equal:8:4", 10)
    return Plan(workload, loads, repeats=2, timeout_s=1.0, warmup=0, vocab_size=1000)


def outcome(*latencies_s: float, refused: int = 0) -> LoadOutcome:
    """The result of jobs with four tokens each."""
    failures = [Failure(0.0, FailureKind.REFUSED, "the queue is full")] * refused
    records = [measured(latency_s) for latency_s in latencies_s]
    return LoadOutcome(records, failures, [0.001] * (len(records) + refused))


def measured(latency_s: float) -> JobRecord:
    """What a client measures without the server's help."""
    return JobRecord(0.0, None, latency_s / 2, latency_s, prompt_tokens=8, output_tokens=4)


def sweep() -> list[Point]:
    runs = [
        Run("a", SLOW, 0, outcome(2.0, 2.0)),
        Run("b", SLOW, 0, outcome(1.0, 1.0)),
        Run("a", FAST, 0, outcome(6.0, 6.0)),
        Run("b", FAST, 0, outcome(3.0, refused=1)),
        Run("a", SLOW, 1, outcome(2.0, 2.0)),
        Run("b", SLOW, 1, outcome(3.0, 3.0)),
        Run("a", FAST, 1, LoadOutcome()),  # interrupted before the first job
    ]
    return gather_points(runs, plan(SLOW, FAST), SLO)


def test_points_hold_medians_over_repeats_and_sums_of_failures() -> None:
    points = sweep()
    assert [(point.label, point.offered, len(point.runs)) for point in points] == [
        ("a", 1.0, 2), ("a", 4.0, 1), ("b", 1.0, 2), ("b", 4.0, 1),
    ]  # fmt: skip
    b_slow, b_fast = points[2:]
    assert b_slow.summary is not None
    assert b_slow.summary.latency_s.mean == 2.0
    assert b_slow.summary.preemptions_per_job is None
    assert b_slow.summary.queueing_share is None
    assert (b_fast.num_jobs, b_fast.failures_by_kind) == (2, {"refused": 1})
    assert b_fast.attainment == 0.5  # a refused job met no objective


def test_the_highest_rate_is_interpolated_where_latency_passes_the_objective() -> None:
    within = within_objectives(sweep(), 1.0)
    # 0.5 s/token at 1 job/s, 1.5 at 4.
    assert within["a"].mean == within["a"].p95 == pytest.approx(2.5)
    assert within["a"].goodput == pytest.approx(1.15)
    # 0.5 s/token at 1 job/s; at 4 half of the jobs were refused, and waited for ever.
    assert within["b"].mean == within["b"].p95 == 1.0


def test_the_highest_rate_of_a_sweep_may_be_beyond_it() -> None:
    assert highest_rate([1, 2], [5.0, 6.0], limit=4.0) == 0.0
    assert highest_rate([1, 2], [3.0, 4.0], limit=4.0) == math.inf
    assert highest_rate([1, 2, 4], [3.0, 4.0, 8.0], limit=5.0) == 2.5
    assert highest_rate([1, 2], [3.0, math.inf], limit=5.0) == 1


def test_beyond_its_sweep_is_beyond_what_the_server_itself_got() -> None:
    """Server b was gone before the second load, so its sweep ends at the first."""
    runs = [
        Run(label, load, 0, outcome(2.0)) for label, load in (("a", SLOW), ("b", SLOW), ("a", FAST))
    ]
    points = gather_points(runs, plan(SLOW, FAST), SLO)
    within = within_objectives(points, 1.0)
    rows = [line.split() for line in printed(objectives_table(within, 1.0), 100).splitlines()]
    assert ["a", *[">", "4"] * 3] in rows
    assert ["b", *[">", "1"] * 3] in rows
    rates = json.loads(report_json(points, {}, within))["within_objectives"]["b"]
    assert rates == {"measured": 1.0, "mean": None, "p95": None, "goodput": None}


def test_ctrl_c_is_no_failure_of_the_server() -> None:
    cancelled = [Failure(0.0, FailureKind.CANCELLED, "the run was interrupted")]
    interrupted = LoadOutcome([measured(2.0)], cancelled, [0.001] * 2, interrupted=True)
    whole = [Run(label, SLOW, 0, outcome(2.0)) for label in ("a", "b")]

    points = gather_points([*whole, Run("b", SLOW, 1, interrupted)], plan(SLOW, FAST), SLO)
    assert [point.runs for point in points] == [[run] for run in whole]

    # Of the next load there is nothing else.
    runs = [*whole, Run("a", FAST, 0, outcome(2.0)), Run("b", FAST, 0, interrupted)]
    points = gather_points(runs, plan(SLOW, FAST), SLO)
    assert [(point.num_jobs, point.num_failed) for point in points] == [(1, 0)] * 3 + [(2, 1)]
    assert set(compare(points)[1].values.values()) == {None}
    rates = within_objectives(points, 1.0)["b"]
    assert (rates.measured, rates.mean) == (1.0, math.inf)


def test_ratios_pair_runs_of_one_seed_in_which_every_job_finished() -> None:
    ratios = {(one.label, one.offered): one.values for one in compare(sweep())}
    assert list(ratios) == [("b", 1.0), ("b", 4.0)]
    # 1/2 in the first repeat, 3/2 in the second.
    assert ratios["b", 1.0]["JCT mean"] == pytest.approx(1.0)
    # One job in 3 s and one refused is not faster than two in 6 s.
    assert set(ratios["b", 4.0].values()) == {None}


def test_tables_fit_a_hundred_columns_and_show_the_unknown_as_a_dash() -> None:
    points = sweep()
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        for table in result_tables(points, "jobs/s"):
            console.print(table)
        console.print(objectives_table(within_objectives(points, 1.0), 1.0))
    text = capture.get()
    assert "…" not in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] == ["b"]]
    # Columns: jobs/s, done, tokens/s, sent, errors, SLO, preempted (unknown here), sent late.
    assert rows[1] == ["b", "4", "0.333", "1.33", "2", "1", "50%", "–", "1.00"]
    assert list(error_lines(points)) == ["b, 4 jobs/s: 1 refused: the queue is full"]


@pytest.mark.parametrize("label", ["grpc://[fd00::1]:8001", "[/x]\\", "a" * 60])
def test_eighty_columns_cut_no_number_and_no_label(label: str) -> None:
    """A pipe has eighty columns."""
    jobs = [JobRecord(0.0, None, 123.4, 2345.6, prompt_tokens=8, output_tokens=40)] * 12
    runs = [Run(name, SLOW, 0, LoadOutcome(jobs, [], [2.345] * 12)) for name in (label, "b")]
    points = gather_points(runs, plan(SLOW), SLO)
    tables = [
        *result_tables(points, "jobs/s"),
        sweep_table(sweep_points(points)),
        objectives_table(within_objectives(points, 1.0), 1.0),
        comparison_table(compare(points), label, "jobs/s"),
        comparison_table(compare(points[::-1]), "b", "jobs/s"),
    ]
    for table in tables:
        wide, narrow = printed(table, 300), printed(table, 80)
        assert shown(label) in shown(wide)
        assert sorted(shown(wide)) == sorted(shown(narrow))


def printed(table: Table, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def shown(text: str) -> str:
    return "".join(text.replace("─", " ").split())


def test_what_failed_last_ends_the_run() -> None:
    def done(end_s: float) -> tuple[float, float]:
        one = outcome(2.0, 2.0, refused=1)
        one.last_failure_s = end_s
        summary = Run("a", SLOW, 0, one).summary
        assert summary is not None
        return summary.duration_s, summary.jobs_per_s

    assert done(1.0) == (2.0, 1.0)
    assert done(10.0) == (10.0, 0.2)
    assert Run("a", SLOW, 0, outcome(refused=1)).summary is None


def test_json_has_every_job() -> None:
    report = json.loads(report_json(sweep(), {"seed": 3}, within_objectives(sweep(), 1.0)))
    assert report["settings"] == {"seed": 3}
    assert report["machine"]["cpu"]
    assert report["ratios"][0]["label"] == "b"
    assert report["within_objectives"]["a"]["mean"] == pytest.approx(2.5)
    last = report["points"][3]
    assert (last["label"], last["rate"], last["concurrency"]) == ("b", 4.0, None)
    (run,) = last["runs"]
    assert [job["last_token_s"] for job in run["records"]] == [3.0]
    assert run["records"][0]["first_scheduled_s"] is None
    assert run["failures"] == [
        {"arrival_s": 0.0, "kind": "refused", "message": "the queue is full", "class": ""}
    ]


CHAT = ServiceClass("chat", ttft_slo_s=1.0, tpot_slo_s=0.5, tenant="a")
BATCH = ServiceClass("batch", priority=1, tenant="b")


def classed() -> LoadOutcome:
    """A chat tenant with four jobs, two of them bad, and a batch tenant with two."""

    def job(service: ServiceClass, first_s: float, last_s: float, tokens: int = 4) -> JobRecord:
        return JobRecord(2.0, None, 2 + first_s, 2 + last_s, 6, tokens, service=service)

    records = [
        job(CHAT, 1.0, 2.0),
        job(CHAT, 1.5, 2.0),  # its first token is late
        job(CHAT, 1.0, 2.0, tokens=1),  # it has no time per token
        job(BATCH, 4.0, 10.0),
        job(BATCH, 8.0, 10.0),
    ]
    failures = [Failure(2.0, FailureKind.REFUSED, "the queue is full", CHAT)]
    return LoadOutcome(records, failures, [0.0] * 6)


def test_classes_and_tenants_each_have_their_own_numbers() -> None:
    (point,) = gather_points([Run("a", SLOW, 0, classed())], plan(SLOW), SLO)
    chat, batch = point.by_class()["chat"], point.by_class()["batch"]
    assert (chat.num_jobs, chat.num_failed) == (4, 1)
    # A refused job kept nothing. A job with one token has no time per token.
    assert (chat.ttft_kept, chat.tpot_kept) == (2 / 4, 2 / 3)
    assert (chat.goodput_jobs_per_s, chat.tokens_per_s) == (2 / 2, 27 / 2)
    assert chat.ttft_s is not None
    assert chat.ttft_s.p50 == 1.0
    assert (batch.ttft_kept, batch.tpot_kept, batch.goodput_jobs_per_s) == (None, None, 2 / 10)
    assert batch.tpot_s is not None
    assert batch.tpot_s.p95 == pytest.approx(2 - 0.05 * (2 - 2 / 3))
    tenants = point.by_tenant()
    assert (tenants["a"], tenants["b"]) == (chat, batch)
    rates = 27 / 2, 20 / 10
    assert jain_index(tenants) == pytest.approx(sum(rates) ** 2 / 2 / sum(r * r for r in rates))
    assert jain_index({"a": chat}) is None


def test_repeats_count_together_and_each_has_its_own_duration() -> None:
    runs = [Run("a", SLOW, repeat, classed()) for repeat in range(3)]
    (once,) = gather_points(runs[:1], plan(SLOW), SLO)
    (thrice,) = gather_points(runs, plan(SLOW), SLO)
    one, all_ = once.by_class()["chat"], thrice.by_class()["chat"]
    assert (all_.num_jobs, all_.num_failed) == (12, 3)
    assert (all_.ttft_kept, all_.goodput_jobs_per_s) == (one.ttft_kept, one.goodput_jobs_per_s)


def test_classes_are_in_tables_and_json() -> None:
    points = gather_points([Run("a", SLOW, 0, classed())], plan(SLOW), SLO)
    *_, classes, tenants = result_tables(points, "jobs/s")
    # Columns: jobs/s, class, sent, errors, kept twice, good jobs/s, TTFT and TPOT, tokens/s.
    rows = [line.split() for line in printed(classes, 100).splitlines()]
    assert ["a", "1", "chat", "4", "1", "50.0%", "66.7%", "1.00"] in [row[:8] for row in rows]
    assert ["a", "1", "batch", "2", "0", "–", "–", "0.200"] in [row[:8] for row in rows]
    rows = [line.split() for line in printed(tenants, 110).splitlines()]
    assert [row[-1] for row in rows if row[:1] == ["a"]] == ["0.645", "0.645"]
    (point,) = json.loads(report_json(points, {}, {}))["points"]
    assert point["classes"]["chat"]["ttft_kept"] == 0.5
    assert point["tenants"]["b"]["tokens_per_s"] == 2.0
    assert point["jain_index"] == pytest.approx(0.645, abs=1e-3)
    assert {job["class"] for job in point["runs"][0]["records"]} == {"chat", "batch"}


def test_without_classes_there_is_no_table_of_them() -> None:
    assert len(list(result_tables(sweep(), "jobs/s"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["png", "svg"])
def test_three_figures_are_drawn(tmp_path: Path, ending: str) -> None:
    written = write_figures(sweep(), tmp_path / f"out.{ending}", 1.0)
    assert [path.name for path in written] == [
        f"out.{ending}", f"out_cdf.{ending}", f"out_timeline.{ending}",
    ]  # fmt: skip
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert all(path.read_bytes().startswith(start) for path in written)


@pytest.mark.slow
def test_a_timeline_names_only_what_is_known(tmp_path: Path) -> None:
    def texts(*records: JobRecord) -> str:
        one = LoadOutcome(list(records), [], [0.0] * len(records))
        points = gather_points([Run("a", SLOW, 0, one)], plan(SLOW), SLO)
        return write_figures(points, tmp_path / "out.svg", 1.0)[2].read_text()

    assert "<!-- prefill -->" in texts(record())
    unknown = texts(record(), measured(4.0))
    assert "<!-- prefill -->" not in unknown
    assert "<!-- before first token -->" in unknown


def test_every_server_gets_the_same_prompts_and_every_run_others() -> None:
    one = plan(SLOW, FAST)
    trace = one.trace(SLOW, 0)
    requests = one.requests(trace, SLOW, 0)
    assert requests == one.requests(trace, SLOW, 0)
    prompts = [tuple(request.prompt) for request in requests]
    assert all(len(prompt) == 8 and min(prompt) >= FIRST_TOKEN_ID for prompt in prompts)
    for load, repeat in ((FAST, 0), (SLOW, 1)):
        others = one.requests(one.trace(load, repeat), load, repeat)
        assert not set(prompts) & {tuple(request.prompt) for request in others}


def test_a_closed_loop_has_the_jobs_of_the_open_one() -> None:
    one = plan(Load(concurrency=4), SLOW)
    assert [job.output_tokens for job in one.trace(Load(concurrency=4), 0)] == [
        job.output_tokens for job in one.trace(SLOW, 0)
    ]
    assert one.offered(Load(concurrency=4)) == 4


def test_natural_lengths_need_texts() -> None:
    (request,) = natural_requests([TraceJob(0.0, 1, 5, "Hi")], max_tokens=64, chat=False)
    assert (request.prompt, request.max_tokens, request.exact) == ("Hi", 64, False)
    with pytest.raises(WorkloadError, match="natural_lengths: got a data set without texts"):
        natural_requests([TraceJob(0.0, 1, 5)], max_tokens=64, chat=False)
    with pytest.raises(WorkloadError, match="vocab_size: got 32; must be more than 32"):
        exact_requests([TraceJob(0.0, 1, 5)], 32, [0])


@pytest.mark.parametrize(
    ("text", "label", "url"),
    [
        ("grpc://127.0.0.1:8001", "grpc://127.0.0.1:8001", "grpc://127.0.0.1:8001"),
        ("here=grpc://localhost", "here", "grpc://localhost:8001"),
        ("http://h:9000", "http://h:9000/v1", "http://h:9000/v1"),
        ("vllm=https://h/api/v1/", "vllm", "https://h/api/v1"),
        ("HTTP://h:9000", "http://h:9000/v1", "http://h:9000/v1"),
        ("http://me:p@ss@h:9000/v1", "http://h:9000/v1", "http://me:p@ss@h:9000/v1"),
    ],
)
def test_urls_of_servers(text: str, label: str, url: str) -> None:
    target = Target.parse(text)
    assert (target.label, target.url, target.is_openai) == (label, url, url.startswith("http"))


def test_mistakes_are_found_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="unknown scheme 'ftp'"):
        Target.parse("ftp://h")
    with pytest.raises(InvalidRequest, match="serve: got "):
        OwnServer.parse("'opt", "fcfs")
    with pytest.raises(WorkloadError, match=r"^output: got .* directory does not exist"):
        Output(tmp_path / "none" / "o.json", None).check()
    for output in (Output(tmp_path, None), Output(None, tmp_path)):
        with pytest.raises(WorkloadError, match=r"^(output|plot): got .*; it is a directory"):
            output.check()
    too_long = tmp_path / ("n" * 300) / "o.json"
    for output in (Output(too_long, None), Output(None, too_long)):
        with pytest.raises(WorkloadError, match=r"^(output|plot): got .*; it cannot be written \("):
            output.check()
    with pytest.raises(WorkloadError, match=r"must end in \.png or \.svg"):
        Output(None, tmp_path / "figure.pdf").check()


def test_a_report_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"^output: cannot write .*: Is a directory"):
        write_json(tmp_path, "{}")
