"""Combines runs into one point for each server and load, over all repeats."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from fastserve_bench.groups import GroupSummary, group_summaries
from fastserve_bench.outcome import LoadOutcome, count_kinds
from fastserve_bench.report.objectives import Objectives, attainment, highest_rate
from fastserve_bench.report.summary import Summary, median_summary
from fastserve_bench.report.sweep import SweepPoint
from fastserve_bench.session import Load, Plan, Run

GOODPUT_SHARE = 0.95
"""Share of jobs that must meet the objectives (FastServe §6.2)."""


@dataclass(frozen=True, slots=True)
class Point:
    """One server under one load. Numbers are medians over the repeats, failures are sums."""

    label: str
    load: Load
    offered: float
    """Jobs per second, or the number of clients of a closed loop."""
    runs: Sequence[Run]
    """One run for each repeat in which at least one job was sent."""
    summary: Summary | None
    """``None``: no job finished."""
    attainment: float
    """Share of the jobs sent that met the objectives."""

    @property
    def outcomes(self) -> Sequence[LoadOutcome]:
        return [run.outcome for run in self.runs]

    @property
    def interrupted(self) -> bool:
        """True: there is no whole run."""
        return any(outcome.interrupted for outcome in self.outcomes)

    @property
    def num_jobs(self) -> int:
        return sum(outcome.num_jobs for outcome in self.outcomes)

    @property
    def num_failed(self) -> int:
        return sum(len(outcome.failures) for outcome in self.outcomes)

    @property
    def failures_by_kind(self) -> dict[str, int]:
        return count_kinds([one for outcome in self.outcomes for one in outcome.failures])

    def by_class(self) -> dict[str, GroupSummary]:
        """Jobs without a class have an empty name."""
        return group_summaries(self.outcomes, lambda service: service.name)

    def by_tenant(self) -> dict[str, GroupSummary]:
        return group_summaries(self.outcomes, lambda service: service.tenant)

    @property
    def send_lateness_p99_s(self) -> float | None:
        """Over all jobs that were sent. ``None`` in a closed loop, where no job can be late."""
        if self.load.is_closed:
            return None
        late_s = [one for outcome in self.outcomes for one in outcome.send_lateness_s]
        return float(np.percentile(late_s, 99))

    @property
    def cpu_share(self) -> float:
        """The highest share of any run."""
        return max(outcome.cpu_share for outcome in self.outcomes)


def gather_points(runs: Iterable[Run], plan: Plan, objectives: Objectives) -> list[Point]:
    """Points in the order of labels and loads.

    Runs in which no job was sent are left out. So is an interrupted run if there is a whole one.
    """
    sent = [run for run in runs if run.outcome.num_jobs]
    labels = list(dict.fromkeys(run.label for run in sent))
    loads = list(plan.loads)

    def place(run: Run) -> tuple[int, int]:
        return labels.index(run.label), loads.index(run.load)

    return [
        _point(_whole_if_any(list(group)), plan, objectives)
        for _, group in groupby(sorted(sent, key=place), key=place)
    ]


def _whole_if_any(runs: Sequence[Run]) -> Sequence[Run]:
    """The whole runs, or all runs if none is whole.

    Jobs that Ctrl-C cancelled would otherwise count as failures of the server.
    """
    return [run for run in runs if not run.outcome.interrupted] or runs


def _point(runs: Sequence[Run], plan: Plan, objectives: Objectives) -> Point:
    outcomes = [run.outcome for run in runs]
    summaries = [run.summary for run in runs if run.summary is not None]
    return Point(
        runs[0].label,
        runs[0].load,
        plan.offered(runs[0].load),
        runs,
        median_summary(summaries) if summaries else None,
        statistics.median(
            attainment(outcome.records, objectives, num_failed=len(outcome.failures))
            for outcome in outcomes
        ),
    )


def sweep_points(points: Iterable[Point]) -> list[SweepPoint]:
    """The points at which jobs finished, for tables and figures."""
    return [
        SweepPoint(point.label, point.offered, point.summary)
        for point in points
        if point.summary is not None
    ]


@dataclass(frozen=True, slots=True)
class WithinObjectives:
    """The highest rates, jobs per second, at which a server meets its objectives.

    See ``highest_rate`` for 0 and infinity.
    """

    measured: float
    """The highest rate that this server got. The sweep may have ended early."""
    mean: float
    """The rate for the mean normalized latency (FastServe Fig. 11)."""
    p95: float
    """The rate for its P95 (Fig. 12)."""
    goodput: float
    """The rate for 95% of jobs within all objectives (Fig. 13)."""


def within_objectives(
    points: Sequence[Point], normalized_latency_s: float
) -> Mapping[str, WithinObjectives]:
    """The highest rates by label, for an open-loop sweep. A failed job counts as one that takes for
    ever. Points of interrupted runs are left out, because their jobs did not fail by themselves.
    """
    found = {}
    whole = [point for point in points if not point.interrupted]
    for label, group in groupby(whole, key=lambda point: point.label):
        line = sorted(group, key=lambda point: point.offered)
        rates = [point.offered for point in line]
        found[label] = WithinObjectives(
            rates[-1],
            highest_rate(rates, [_mean(point) for point in line], normalized_latency_s),
            highest_rate(rates, [_p95(point) for point in line], normalized_latency_s),
            highest_rate(rates, [1 - point.attainment for point in line], 1 - GOODPUT_SHARE),
        )
    return found


def _mean(point: Point) -> float:
    if point.num_failed or point.summary is None:
        return math.inf
    return point.summary.normalized_latency_s.mean


def _p95(point: Point) -> float:
    if not point.num_failed and point.summary is not None:
        return point.summary.normalized_latency_s.p95
    return statistics.median(_p95_with_failures(outcome) for outcome in point.outcomes)


def _p95_with_failures(outcome: LoadOutcome) -> float:
    latencies = [job.normalized_latency_s for job in outcome.records]
    latencies += [math.inf] * len(outcome.failures)
    # Do not interpolate between a number and infinity.
    return float(np.percentile(latencies, 95, method="higher"))
