"""The results of a load test as figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastserve_bench.points import Point, sweep_points
from fastserve_bench.report.cdf import plot_cdfs
from fastserve_bench.report.plot import plot_sweep
from fastserve_bench.report.timeline import plot_timeline


def write_figures(points: Sequence[Point], path: Path, slo_s: float | None) -> list[Path]:
    """Writes latency over load to ``path``, and beside it distributions and a timeline.

    These two show the first repeat of the highest load.

    Args:
        points: At least one at which a job finished.
        path: Ends in ``.png`` or ``.svg``. The other names have ``_cdf`` and ``_timeline`` there.

    Returns:
        The files written.

    Raises:
        WorkloadError: a file that cannot be written, or no matplotlib.
    """
    finished = [point for point in points if point.summary is not None]
    highest = max(finished, key=lambda point: point.offered)
    plot_sweep(
        sweep_points(points),
        path,
        slo_s=slo_s,
        load_name="Requests at a time" if highest.load.is_closed else "Rate (jobs/s)",
    )
    records = {
        point.label: next(run.outcome.records for run in point.runs if run.outcome.records)
        for point in finished
        if point.load == highest.load
    }
    cdf, timeline = (path.with_stem(f"{path.stem}_{name}") for name in ("cdf", "timeline"))
    plot_cdfs(records, cdf, title=str(highest.load))
    plot_timeline(records, timeline, title=str(highest.load))
    return [path, cdf, timeline]
