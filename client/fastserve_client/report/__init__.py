"""The report of a load test: what each job saw, and what that means for a system.

    from fastserve_client.report import SweepPoint, print_tables, summarize, sweep_table

    point = SweepPoint("skip_join_mlfq", rate=2.0, summary=summarize(records))
    print_tables([sweep_table([point])])

Simulations and measurements of a real server are reported by the same code. Names are loaded on
first use: to make figures of records, neither rich nor a library of plots has to be there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastserve_client.report.cdf import plot_cdfs
    from fastserve_client.report.objectives import Objectives, attainment, highest_rate
    from fastserve_client.report.plot import plot_sweep
    from fastserve_client.report.printing import print_tables
    from fastserve_client.report.records import JobRecord
    from fastserve_client.report.summary import Distribution, Summary, median_summary, summarize
    from fastserve_client.report.sweep import SweepPoint, sweep_to_dict, sweep_to_json
    from fastserve_client.report.table import (
        format_number,
        labelled_table,
        latency_table,
        sweep_table,
    )
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
    "labelled_table",
    "format_number",
    "print_tables",
    "plot_sweep",
    "plot_cdfs",
    "plot_timeline",
]

_MODULES = {
    "plot_cdfs": "cdf",
    "Objectives": "objectives",
    "attainment": "objectives",
    "highest_rate": "objectives",
    "plot_sweep": "plot",
    "print_tables": "printing",
    "JobRecord": "records",
    "Distribution": "summary",
    "Summary": "summary",
    "median_summary": "summary",
    "summarize": "summary",
    "SweepPoint": "sweep",
    "sweep_to_dict": "sweep",
    "sweep_to_json": "sweep",
    "format_number": "table",
    "labelled_table": "table",
    "latency_table": "table",
    "sweep_table": "table",
    "plot_timeline": "timeline",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
