"""FastServe Fig. 12: the largest rate whose P95 normalized latency stays under the SLO.

Systems and search are those of fig11.py; only the statistic differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import DATASETS
from fastserve_client.report.summary import Summary
from rich.table import Table
from throughput import SYSTEMS, Figure
from throughput import main as run_figure

PAPER = {(system.model, dataset): "1.5–2.8×" for system in SYSTEMS for dataset in DATASETS}


def p95(summary: Summary) -> float:
    return summary.normalized_latency_s.p95


def main(argv: Sequence[str] | None = None) -> Table:
    title = "Fig. 12: largest rate with P95 normalized latency under the SLO"
    return run_figure(Figure("fig12", title, p95, PAPER), __doc__, argv)


if __name__ == "__main__":
    main()
