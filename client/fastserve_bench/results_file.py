"""The results of a load test as JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastserve_bench.comparison import compare
from fastserve_bench.groups import jain_index
from fastserve_bench.outcome import Failure
from fastserve_bench.points import Point, WithinObjectives
from fastserve_bench.report.records import JobRecord
from fastserve_bench.report.summary import Distribution
from fastserve_bench.session import Run


def report_json(
    points: Sequence[Point], settings: Mapping[str, Any], within: Mapping[str, WithinObjectives]
) -> str:
    """Settings, machine, and every run with every job's record, as indented text.

    ``points`` have the keys of a simulation's points, and more.
    """
    report = {
        "settings": dict(settings),
        "machine": describe_machine(),
        "points": [_point(point) for point in points],
        "ratios": [asdict(ratios) for ratios in compare(points)],
        "within_objectives": {
            label: {name: _finite(rate) for name, rate in asdict(rates).items()}
            for label, rates in within.items()
        },
    }
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def describe_machine() -> dict[str, Any]:
    """The client's machine, which is often the server's too."""
    return {
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "fastserve": version("fastserve-triton"),
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # only Linux has this file
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _point(point: Point) -> dict[str, Any]:
    tenants = point.by_tenant()
    return {
        "label": point.label,
        "rate": None if point.load.is_closed else point.offered,
        "concurrency": point.load.concurrency,
        "summary": None if point.summary is None else asdict(point.summary),
        "attainment": point.attainment,
        "num_jobs": point.num_jobs,
        "failures_by_kind": point.failures_by_kind,
        "classes": {name: asdict(summary) for name, summary in point.by_class().items()},
        "tenants": {name: asdict(summary) for name, summary in tenants.items()},
        "jain_index": jain_index(tenants),
        "runs": [_run(run) for run in point.runs],
    }


def _run(run: Run) -> dict[str, Any]:
    outcome = run.outcome
    return {
        "repeat": run.repeat,
        "interrupted": outcome.interrupted,
        "send_lateness_s": asdict(Distribution.of(outcome.send_lateness_s)),
        "client_cpu_share": outcome.cpu_share,
        "summary": None if run.summary is None else asdict(run.summary),
        "records": [_job(record) for record in outcome.records],
        "failures": [_job(failure) for failure in outcome.failures],
    }


def _job(job: JobRecord | Failure) -> dict[str, Any]:
    """The job's fields. Of its class only the name, because the settings have the rest."""
    fields = asdict(job)
    fields["class"] = fields.pop("service")["name"]
    return fields


def _finite(rate: float) -> float | None:
    """``None`` for infinity, which JSON does not have. It means: beyond the measured rates."""
    return None if math.isinf(rate) else rate
