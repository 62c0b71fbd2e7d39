"""One run as a figure: every job over time, and the number of jobs in the system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.style import (
    BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    ORANGE,
    SKY,
    light_grid,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_timeline(
    records: Mapping[str, Sequence[JobRecord]], path: str | Path, *, title: str
) -> None:
    """Writes a column for each label: jobs as bars in order of arrival, with their number below.

    "waiting" ends with the first iteration, which not every server reports. "prefill" ends with the
    first token, even if other jobs ran in between. "decode" includes preempted time.

    Args:
        records: At least one job for each label.
        path: Ends in ``.png`` or ``.svg``.

    Raises:
        WorkloadError: another ending, a path that cannot be written, or no matplotlib.
    """
    with new_figure(path, max(3.6, 3.2 * len(records)), 3.8) as figure:
        rows = figure.subplots(
            2,
            len(records),
            sharex=True,
            sharey="row",
            squeeze=False,
            gridspec_kw={"height_ratios": (3, 1)},
        )
        for (label, jobs), bars, counts in zip(records.items(), *rows, strict=True):
            in_order = sorted(jobs, key=lambda job: job.arrival_s)
            _draw_bars(bars, in_order)
            _draw_counts(counts, in_order)
            bars.set_title(label)
            counts.set_xlabel("Time (s)")
        bars, counts = rows[:, 0]
        bars.set_ylabel("Job, by arrival")
        bars.set_ylim(max(map(len, records.values())) + 0.5, 0.5)
        bars.set_xlim(left=0)
        counts.set_ylabel("Jobs")
        counts.set_ylim(bottom=0)
        figure.suptitle(title)
        # Each name once, whichever panels have it.
        drawn = [axes.get_legend_handles_labels() for axes in rows.flat]
        handles = {name: one for pair in drawn for one, name in zip(*pair, strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3)


def _draw_bars(axes: Axes, jobs: Sequence[JobRecord]) -> None:
    arrived = np.array([job.arrival_s for job in jobs])
    first = np.array([job.first_token_s for job in jobs])
    last = np.array([job.last_token_s for job in jobs])
    started = np.array([job.first_scheduled_s for job in jobs], dtype=np.float64)  # None is NaN
    if np.isnan(started).any():
        phases = [("before first token", arrived, first, SKY)]
    else:
        phases = [("waiting", arrived, started, LIGHT_GREY), ("prefill", started, first, ORANGE)]
    phases.append(("decode", first, last, BLUE))
    rows = np.arange(1, len(jobs) + 1)
    for name, start, end, colour in phases:
        axes.barh(rows, end - start, left=start, height=1.0, color=colour, label=name)


def _draw_counts(axes: Axes, jobs: Sequence[JobRecord]) -> None:
    arrivals = [job.arrival_s for job in jobs]
    for name, ends, colour in (
        ("jobs in the system", [job.last_token_s for job in jobs], GREY),
        ("without a token yet", [job.first_token_s for job in jobs], GREEN),
    ):
        times = np.concatenate((arrivals, ends))
        changes = np.repeat((1, -1), len(jobs))
        order = np.argsort(times, kind="stable")
        axes.step(times[order], changes[order].cumsum(), where="post", color=colour, label=name)
    light_grid(axes)
