"""Phase "limit_128": the policies with 128 seats, where jobs lack KV memory and not seats."""

from __future__ import annotations

from benchmarks.gpu.overload import compare_policies
from benchmarks.gpu.phase_context import Context

SEATS = 128


def run(context: Context) -> None:
    compare_policies(context, SEATS, ("fcfs", "skip_join_mlfq", "gittins"))
