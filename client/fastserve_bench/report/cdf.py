"""Distributions of latencies under one load as a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.style import light_grid, line_styles, log_latency_axis, new_figure


def plot_cdfs(records: Mapping[str, Sequence[JobRecord]], path: str | Path, *, title: str) -> None:
    """Writes the cumulative distributions of normalized latency, TTFT and TPOT side by side.

    Args:
        records: At least one job for each label.
        path: Ends in ``.png`` or ``.svg``.

    Raises:
        WorkloadError: another ending, a path that cannot be written, or no matplotlib.
    """
    styles = line_styles(list(records))
    with new_figure(path, 6.8, 2.5) as figure:
        panels = figure.subplots(1, 3, sharey=True)
        for label, jobs in records.items():
            columns = (
                [job.normalized_latency_s for job in jobs],
                [job.ttft_s for job in jobs],
                [job.tpot_s for job in jobs if job.tpot_s is not None],
            )
            for axes, times_s in zip(panels, columns, strict=True):
                if times_s:
                    axes.ecdf(np.array(times_s) * 1e3, label=label, color=styles[label]["color"])
        names = ("Normalized latency (ms/token)", "TTFT (ms)", "TPOT (ms/token)")
        for axes, name in zip(panels, names, strict=True):
            axes.set_xscale("log")
            log_latency_axis(axes.xaxis)
            axes.set_xlabel(name)
            axes.set_ylim(0, 1.02)
            light_grid(axes)
        panels[0].set_ylabel("Share of jobs")
        panels[0].legend()
        figure.suptitle(title)
