"""FastServe Fig. 11: the largest rate whose mean normalized latency stays under the SLO.

OPT-13B on one GPU, 66B on tensor-parallel 4, 175B on tensor-parallel 8 × pipeline-parallel 2. The
rate is found by bisection to 2%, over the same jobs. A second table shows for OPT-13B, at 1, 1.5
and 3 times the capacity, what each policy does to completion times and to the longest jobs.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from simulated_runs import mean_normalized
from throughput import SYSTEMS, Figure
from throughput import main as run_figure

PAPER = {
    (system.model, dataset): gain
    for system in SYSTEMS
    for dataset, gain in (("sharegpt", "2–4×"), ("alpaca", "1.6–2×"))
}
NOTE = (
    "The authors' artifact prints for OPT-13B: ShareGPT 4.15 / 2.26 jobs/s = 1.84×, Alpaca "
    "37.0 / 18.6 = 1.99×."
)


def main(argv: Sequence[str] | None = None) -> Table:
    title = "Fig. 11: largest rate with mean normalized latency under the SLO"
    return run_figure(
        Figure("fig11", title, mean_normalized, PAPER, NOTE, compares=True), __doc__, argv
    )


if __name__ == "__main__":
    main()
