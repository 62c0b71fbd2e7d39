"""The report of a load test: what each job saw, and what that means for a system.

    from fastserve_client.report import SweepPoint, summarize, sweep_table

    point = SweepPoint("skip_join_mlfq", rate=2.0, summary=summarize(records))
    rich.print(sweep_table([point]))

Simulations and measurements of a real server are reported by the same code.
"""

from __future__ import annotations

from fastserve_client.report.cdf import plot_cdfs
from fastserve_client.report.objectives import Objectives, attainment, highest_rate
from fastserve_client.report.plot import plot_sweep
from fastserve_client.report.records import JobRecord
from fastserve_client.report.summary import Distribution, Summary, median_summary, summarize
from fastserve_client.report.sweep import SweepPoint, sweep_to_dict, sweep_to_json
from fastserve_client.report.table import format_number, latency_table, sweep_table
from fastserve_client.report.timeline import plot_timeline

__all__ = [
    "JobRecord",
    "Distribution",
    "Summary",
    "summarize",
    "median_summary",
    "Objectives",
    "attainment",
    "highest_rate",
    "SweepPoint",
    "sweep_to_dict",
    "sweep_to_json",
    "sweep_table",
    "latency_table",
    "format_number",
    "plot_sweep",
    "plot_cdfs",
    "plot_timeline",
]
