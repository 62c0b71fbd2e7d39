"""The scheduling race: its measures of a run, and the cells in which ours is worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import race_cells as cells
from benchmarks import race_report as report


def results(name: str = "gittins", **ours: float) -> dict[str, dict[str, cells.Result]]:
    """Results of a cell in which FCFS takes 1 s a token, and a job alone 0.5 s."""
    numbers = (
        "idle", "mean", "p95", "p99", "first_p95", "first_p99", "gap_p95", "gap_p99", "jct",
        "jct_p95", "jct_p99", "slowdown", "tokens_per_s", "violations",
    )  # fmt: skip
    equal = dict.fromkeys(numbers, 1.0) | {"idle": 0.5}
    variants = {variant.name: equal for variant in cells.FCFS} | {name: equal | ours}
    return {"a cell": {v: cells.Result("a cell", v, **values) for v, values in variants.items()}}


def test_equal_figures_are_no_worse() -> None:
    assert report.verdicts(results()) == []


@pytest.mark.parametrize(
    ("ours", "line"),
    [
        ({"mean": 1.04}, "mean 1.04 x the best FCFS"),
        ({"p95": 1.5}, "P95 1.50 x the best FCFS"),
        ({"jct": 1.2}, "mean JCT 1.20 x the best FCFS"),
        ({"tokens_per_s": 0.9}, "tokens/s 0.90 x the best FCFS"),
        ({"mean": 0.6, "idle": 0.2}, "mean only 1.67 times better, where FCFS takes 5.0 times"),
    ],
)
def test_each_figure_that_is_worse_has_a_line(ours: dict[str, float], line: str) -> None:
    (found,) = report.verdicts(results(**ours))
    assert found.startswith("a cell: gittins: ")
    assert line in found


def test_predictions_have_to_complete_jobs_as_early_as_fcfs() -> None:
    assert report.verdicts(results(jct=1.05)) == []
    (line,) = report.verdicts(results("gittins, predicted", jct=1.05))
    assert "mean JCT 1.05" in line


def test_the_best_of_three_fcfs_counts_for_each_figure() -> None:
    cell = results()["a cell"]
    first, second, _ = (variant.name for variant in cells.FCFS)
    cell[first] = replace(cell[first], mean=0.8)
    cell[second] = replace(cell[second], tokens_per_s=2.0)
    assert report.best_fcfs(cell, "mean") == 0.8
    assert report.best_fcfs(cell, "tokens_per_s") == 2.0


@pytest.mark.slow
def test_a_cell_is_run_and_written(tmp_path: Path) -> None:
    course = cells.Course("llama-3-8b a100-80g", "code", 30, "bursts")
    cell = cells.Cell(course, 1.5, cells.capacity(course))
    found = [cells.run(cell, variant) for variant in (*cells.FCFS, *cells.OURS)]
    assert all(result.tokens_per_s > 0 for result in found)
    assert all(result.idle <= result.mean <= result.p95 <= result.p99 for result in found)
    assert all(result.jct <= result.jct_p99 for result in found)
    assert all(0 <= result.violations <= 1 for result in found)
    report.write_markdown(tmp_path, report.by_cell(found), "python race.py --quick", "1234abc")
    page = (tmp_path / "scheduling_race.md").read_text(encoding="utf-8")
    for column in ("mean", "p95", "jct", "jct_p99", "tokens_per_s", "first_p99", "gap_p99"):
        figures = " | ".join(report.number(getattr(result, column)) for result in found)
        assert f"| code, llama-3-8b a100-80g, load 1.5 | {figures} |" in page, column
    assert page.count("| gittins | ") == 9, "in the frontier and in the head of each table"
    assert page.count("| gittins, predicted | ") == 1, "in the frontier"
    assert page.count("| gittins, predicted |\n") == 8, "the last in the head of each table"
    assert "    python race.py --quick\n" in page
    assert "commit 1234abc" in page
    for column in ("cell", "variant", "idle", "p99", "first_p95", "gap_p95", "jct_p95", "slowdown"):
        assert all(one.to_json()[column] == getattr(one, column) for one in found), column
    assert (tmp_path / "scheduling_race.png").stat().st_size > 1000


def test_the_frontier_is_of_the_cells_where_fcfs_queues() -> None:
    idle = results(mean=0.9)
    first = results(mean=0.4, jct=1.2, idle=0.2)["a cell"]
    queues = {variant: replace(result, idle=0.2) for variant, result in first.items()}
    lines = report.frontier({"a": idle["a cell"], "b": queues})
    assert lines[-1] == "| gittins | 0.40 | 1.00 | 1.20 | 1.00 | 1.00 |"


def test_the_oracle_says_what_is_possible() -> None:
    cell = results(mean=0.8, idle=0.2)["a cell"]
    cell[cells.ORACLE.name] = replace(cell["gittins"], variant=cells.ORACLE.name, mean=0.5)
    (line,) = report.verdicts({"a cell": cell})
    assert line.endswith("; srpt (oracle) 2.00 times")


def test_courses_have_jobs_that_their_models_can_run() -> None:
    for course in cells.COURSES:
        longest = cells.SYSTEMS[course.system].max_model_len
        trace = course.trace(1.0)
        assert len(trace) >= 0.95 * course.num_jobs
        assert all(job.prompt_tokens + job.output_tokens <= longest for job in trace)


def test_a_file_of_lengths_races_without_times_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("prompt_tokens,output_tokens\n200,20\n900,5\n50,60\n", encoding="utf-8")
    course = cells.Course("llama-3-8b a100-80g", str(path), 3)
    assert cells.capacity(course) > 0
    result = cells.run(cells.Cell(course, 1.5, cells.capacity(course)), cells.FCFS[0])
    assert result.tokens_per_s > 0
