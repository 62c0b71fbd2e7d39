"""A sweep as a figure: latency over load, as in FastServe's Fig. 11 and 12."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastserve_client.errors import WorkloadError

from fastserve_bench.report.style import GREY, light_grid, line_styles, log_latency_axis, new_figure
from fastserve_bench.report.sweep import SweepPoint


def plot_sweep(
    points: Sequence[SweepPoint],
    path: str | Path,
    *,
    slo_s: float | None = None,
    title: str | None = None,
    load_name: str = "Rate (jobs/s)",
) -> None:
    """Writes mean (left) and P95 (right) normalized latency over the load, a line for each label.

    Args:
        path: Ends in ``.png`` or ``.svg``.
        slo_s: The objective, as a horizontal line.
        load_name: The name of the horizontal axis.

    Raises:
        WorkloadError: no points, another ending, a path that cannot be written, or no matplotlib.
    """
    if not points:
        raise WorkloadError("points: got none; a figure needs at least one")
    styles = line_styles(list(dict.fromkeys(point.label for point in points)))
    with new_figure(path, 6.8, 2.8) as figure:
        mean_axes, p95_axes = figure.subplots(1, 2, sharex=True, sharey=True)
        for label, style in styles.items():
            line = sorted((p for p in points if p.label == label), key=lambda p: p.rate)
            rates = [p.rate for p in line]
            latencies = [p.summary.normalized_latency_s for p in line]
            mean_axes.plot(rates, [latency.mean for latency in latencies], label=label, **style)
            p95_axes.plot(rates, [latency.p95 for latency in latencies], label=label, **style)
        for axes, statistic in ((mean_axes, "Mean"), (p95_axes, "P95")):
            if slo_s is not None:
                axes.axhline(
                    slo_s, color=GREY, linestyle="--", linewidth=1, label=f"SLO {slo_s:g} s/token"
                )
            axes.set_title(statistic)
            axes.set_yscale("log")
            log_latency_axis(axes.yaxis)
            axes.set_xlim(left=0)
            axes.set_xlabel(load_name)
            light_grid(axes)
        mean_axes.set_ylabel("Normalized latency (s/token)")
        mean_axes.legend()
        if title is not None:
            figure.suptitle(title)
