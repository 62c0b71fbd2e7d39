"""Every figure of the papers still runs, and its table has the expected rows and columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrices import rounds

from benchmarks.paper.__main__ import main

JOBS = rounds(12, many=80)
"""Of each run at most; --quick alone has up to 80."""


def run_figure(name: str, plots: Path) -> list[list[str]]:
    """The cells of the figure's table, row by row."""
    table = main([name, "--quick", "--jobs", str(JOBS), "--plot-dir", str(plots)])[0]
    document = json.loads((plots / f"{name}.json").read_text())
    assert document["values"]
    assert document["settings"]["quick"]
    assert document["settings"]["sharegpt"] == "sharegpt"
    assert list(plots.glob(f"{name}*.png"))
    return [list(row) for row in zip(*(column.cells for column in table.columns), strict=True)]


@pytest.mark.parametrize(
    ("name", "first_column"),
    [
        (
            "fig01",
            [
                "equal (161 + 338), evenly",
                "equal (161 + 338)",
                "ShareGPT",
                "Alpaca",
                "ShareGPT, shortest tenth",
            ],
        ),
        ("fig08", ["0.5", "2"]),
        ("fig11_12", ["OPT-13B, Alpaca"]),
        ("nsdi26", ["15b, Alpaca"]),
        (
            "fig13",
            [
                f"{n}× {origin}"
                for origin in ("light load", "authors' scripts")
                for n in (5, 10, 20)
            ],
        ),
        ("fig14", ["1.5", "1.5"]),
        (
            "fig15",
            [
                f"2.20, {strategy}"
                for strategy in (
                    "defer",
                    "recompute",
                    "reactive",
                    "proactive",
                    "proactive, no write-back",
                    "proactive, not incremental",
                )
            ],
        ),
        ("alise_fig06", ["OPT-13B TP2, Alpaca"]),
        ("alise_table3", ["PYTHIA-12B TP2, Alpaca"]),
        ("alise_fig08", [f"Alpaca, 2, {strategy}" for strategy in ("defer", "recompute", "swap")]),
        (
            "alise_fig09",
            [f"Alpaca, 2, {policy}" for policy in ("FCFS", "skip-join", "ALISE", "oracle")],
        ),
    ],
)
def test_a_simulated_figure_has_its_rows(
    name: str, first_column: list[str], tmp_path: Path
) -> None:
    rows = run_figure(name, tmp_path)
    assert [row[0] for row in rows] == first_column
    assert all(cell for row in rows for cell in row)


def test_the_first_iteration_grows_with_the_input_and_later_ones_hardly(tmp_path: Path) -> None:
    rows = run_figure("fig05", tmp_path)
    first, later = ([float(row[column]) for row in rows] for column in (1, 2))
    assert first == sorted(first)
    assert first[-1] > 9 * first[0]
    assert later[-1] < 1.1 * later[0]


def test_three_jobs_have_the_latencies_worked_out_by_hand(tmp_path: Path) -> None:
    rows = run_figure("fig07", tmp_path)
    assert [(row[0], row[4]) for row in rows] == [
        ("fcfs", "4.50"),
        ("mlfq", "5.00"),
        ("skip_join_mlfq", "3.33"),
        ("srpt", "3.00"),
    ]
