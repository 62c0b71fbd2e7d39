"""Phase "strategies": what happens to preempted jobs' KV, as in FastServe's Fig. 15."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastserve_backend.engine.engine import Engine

from benchmarks.gpu.overload import Served, serve
from benchmarks.gpu.phase_context import Context

SEATS = 16
STRATEGIES = ("defer", "recompute", "reactive", "proactive")


def run(context: Context) -> None:
    def record(keys: Mapping[str, Any], engine: Engine, served: Served) -> None:
        counters, records = engine.counters, served.records
        stalled_s = sum(one.swap_stall_s or 0.0 for one in records)
        context.recorder.row(
            "strategies for preempted jobs' KV",
            {"strategy": keys["strategy"], **served.case},
            {
                **served.ms_a_token(),
                "mean JCT, s": None if served.summary is None else served.summary.latency_s.mean,
                "blocked": stalled_s / sum(one.latency_s for one in records) if records else None,
                "GB out": counters.swap_out_bytes / 1e9,
                "GB in": counters.swap_in_bytes / 1e9,
                "GB avoided": counters.swap_avoided_bytes / 1e9,
                "recomputed": counters.recomputed_jobs,
            },
            served.note,
        )

    settings = [{"policy": "skip_join_mlfq", "strategy": strategy} for strategy in STRATEGIES]
    serve(context, SEATS, settings, record)
