"""Workloads of a load test: how long the jobs are, and when they arrive.

    from fastserve_bench.workload import Workload

    trace = Workload("sharegpt", num_jobs=500, seed=0).trace(rate=2.0)

The same trace drives a simulation and a real server.
"""

from __future__ import annotations

from fastserve_bench.workload.datasets import load_lengths
from fastserve_bench.workload.lengths import (
    AUTHORS_LIMITS,
    NO_LIMITS,
    LengthLimits,
    Lengths,
    scale_lengths,
    scale_ratio,
)
from fastserve_bench.workload.service_class import NO_CLASS, ServiceClass
from fastserve_bench.workload.spec import Workload
from fastserve_bench.workload.text_files import estimate_tokens
from fastserve_bench.workload.trace import (
    TraceJob,
    check_trace_fits,
    mean_rate,
    poisson_trace,
    timestamp_trace,
)

__all__ = [
    "TraceJob",
    "Workload",
    "ServiceClass",
    "NO_CLASS",
    "Lengths",
    "LengthLimits",
    "AUTHORS_LIMITS",
    "NO_LIMITS",
    "estimate_tokens",
    "load_lengths",
    "scale_lengths",
    "scale_ratio",
    "poisson_trace",
    "timestamp_trace",
    "check_trace_fits",
    "mean_rate",
]
