from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from fastserve_bench.report.plot import plot_sweep
from fastserve_bench.report.summary import summarize
from fastserve_bench.report.sweep import SweepPoint, sweep_to_json
from fastserve_bench.report.table import sweep_table
from fastserve_client.errors import WorkloadError
from report_records import record, sweep
from rich.console import Console

_SETTINGS = {"dataset": "sharegpt", "seed": 3, "slo_s": None}


def _printed() -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(sweep_table(sweep()))
    return [line.strip() for line in capture.get().splitlines()]


def test_a_table_row_holds_the_numbers_of_its_point() -> None:
    rows = [line.split() for line in _printed() if line.startswith(("fcfs", "srpt"))]
    assert [row[:2] for row in rows] == [
        ["fcfs", "2"],
        ["fcfs", "1"],
        ["srpt", "1"],
        ["srpt", "2.5"],
    ]
    # Finished jobs/s and tokens/s, normalized latency, TTFT, TPOT, JCT, and the rest.
    assert " ".join(rows[0][2:]) == "0.125 0.500 2.00 2.00 1.00 2.33 8.00 75% – 1.00"
    # With one token and a known latency alone there is no TPOT, but a slowdown.
    assert " ".join(rows[2][2:]) == "0.250 0.250 4.00 4.00 4.00 – 4.00 50% 2.00 0.00"


def test_a_hundred_columns_show_a_table_uncut() -> None:
    summary = summarize([record(latency_s=1234.5, output_tokens=99999, alone_s=1.0)])
    points = [SweepPoint("skip_join_mlfq", 12.25, summary)]
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(sweep_table(points))
    assert "…" not in capture.get()
    assert "1,234" in capture.get()


def test_a_line_parts_the_labels() -> None:
    lines = _printed()
    first, last = lines.index(_row(lines, "fcfs", 1)), lines.index(_row(lines, "srpt", 0))
    assert last - first == 2
    assert set(lines[first + 1]) == {"─"}
    assert lines.index(_row(lines, "fcfs", 0)) == first - 1


def _row(lines: list[str], label: str, index: int) -> str:
    return [line for line in lines if line.startswith(label)][index]


def test_json_holds_settings_and_points() -> None:
    report = json.loads(sweep_to_json(sweep(), _SETTINGS))
    assert list(report) == ["settings", "points"]
    assert report["settings"] == _SETTINGS
    first = report["points"][0]
    assert (first["label"], first["rate"]) == ("fcfs", 2.0)
    assert first["summary"]["normalized_latency_s"] == {
        "mean": 2.0,
        "p50": 2.0,
        "p95": 2.0,
        "p99": 2.0,
    }
    assert report["points"][2]["summary"]["tpot_s"] is None


def test_json_keys_are_stable() -> None:
    # Figures and older reports rely on them.
    summary = json.loads(sweep_to_json(sweep(), {}))["points"][0]["summary"]
    assert list(summary) == [
        "num_jobs",
        "duration_s",
        "jobs_per_s",
        "output_tokens_per_s",
        "normalized_latency_s",
        "ttft_s",
        "tpot_s",
        "latency_s",
        "queueing_share",
        "longest_tenth_slowdown",
        "preemptions_per_job",
    ]


def test_json_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        sweep_to_json(sweep(), {"rate": float("nan")})


def test_figures_are_what_their_ending_says(tmp_path: Path) -> None:
    plot_sweep(sweep(), tmp_path / "figure.png", slo_s=0.3, title="OPT-13B")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    plot_sweep(sweep(), str(tmp_path / "figure.SVG"))
    assert "<svg" in (tmp_path / "figure.SVG").read_text()


def test_a_figure_has_a_line_a_label_and_the_objective(tmp_path: Path) -> None:
    def texts(slo_s: float | None) -> str:
        # matplotlib writes each text of a figure as a comment beside its glyphs.
        plot_sweep(sweep(), tmp_path / "figure.svg", slo_s=slo_s, title="OPT-13B")
        return (tmp_path / "figure.svg").read_text()

    with_slo = texts(0.3)
    for text in ("Mean", "P95", "Rate (jobs/s)", "Normalized latency (s/token)", "OPT-13B"):
        assert f"<!-- {text} -->" in with_slo
    # The legend names each label once, though there are two points of each.
    assert with_slo.count("<!-- fcfs -->") == with_slo.count("<!-- srpt -->") == 1
    assert "<!-- SLO 0.3 s/token -->" in with_slo
    assert "SLO" not in texts(None)


@pytest.mark.slow
def test_the_same_points_make_the_same_figure(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        plot_sweep(sweep(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_other_formats_and_empty_figures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"^path: got '.*figure\.pdf'; must end in \.png or"):
        plot_sweep(sweep(), tmp_path / "figure.pdf")
    with pytest.raises(WorkloadError, match=r"^points: got none; "):
        plot_sweep([], tmp_path / "figure.png")


def test_figures_need_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"figure\.png' \(No such file or directory\); must be"):
        plot_sweep(sweep(), tmp_path / "none" / "figure.png")


def test_figures_without_matplotlib_name_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(WorkloadError, match=r"pip install 'fastserve-triton\[plot\]'$"):
        plot_sweep(sweep(), tmp_path / "figure.png")
