"""Phase "serving": first come, first served against skip-join MLFQ, with 16 seats."""

from __future__ import annotations

from benchmarks.gpu.overload import compare_policies
from benchmarks.gpu.phase_context import Context

SEATS = 16
"""FastServe's authors' setting."""


def run(context: Context) -> None:
    compare_policies(context, SEATS, ("fcfs", "skip_join_mlfq"))
