"""FastServe Fig. 11 and 12: the largest rates whose normalized latency stays under the SLO.

Fig. 11 has the mean, Fig. 12 the P95. OPT-13B on one GPU, 66B on tensor-parallel 4, 175B on
tensor-parallel 8 × pipeline-parallel 2. Rates are found to 2%, over the same jobs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fastserve_bench.report.summary import Summary
from rich.table import Table

from benchmarks.paper.figures import (
    DATASETS,
    Figure,
    add_dataset,
    datasets_of,
    fcfs_run,
    jobs_of,
    lengths_of,
    new_table,
    number,
)
from benchmarks.paper.rate_search import Line, Search, ratio, save, search_all, slo_s
from benchmarks.paper.rivals import faster_transformer, vllm
from benchmarks.paper.simulated_runs import (
    BATCH,
    OPT_13B,
    SWAPPING,
    Run,
    System,
    mean_normalized,
    p95_normalized,
    scheduler,
)

SYSTEMS = (OPT_13B, System("opt-66b", 4), System("opt-175b", 8, 2))
FASTER_TRANSFORMER, VLLM, FCFS, SKIP_JOIN = "FasterTransformer", "vLLM", "FCFS", "skip-join"


@dataclass(frozen=True, slots=True)
class Part:
    suffix: str
    """Suffix of the files' names."""
    title: str
    statistic: Callable[[Summary], float]
    paper: Mapping[str, tuple[str, str]]
    """Data set → the preprint's gains of skip-join over FCFS and over vLLM."""
    note: str = ""
    """Last words of the caption."""


PARTS = (
    Part(
        "",
        "Fig. 11: largest rate with mean normalized latency under the SLO",
        mean_normalized,
        {"sharegpt": ("2–4×", "2.3–18.3×"), "alpaca": ("1.6–2×", "3–31.4×")},
        "The authors' artifact prints for OPT-13B, jobs/s of vLLM / FCFS / skip-join: ShareGPT "
        "1.60 / 2.26 / 4.15, Alpaca 8.9 / 18.6 / 37.0.",
    ),
    Part(
        "_p95",
        "Fig. 12: largest rate with P95 normalized latency under the SLO",
        p95_normalized,
        dict.fromkeys(DATASETS, ("1.5–2.8×", "≤ 17.9×")),
    ),
)


def draw(args: argparse.Namespace) -> list[Table]:
    systems = [
        system
        for system in (SYSTEMS[:1] if args.quick else SYSTEMS)
        if args.model in (None, system.model)
    ]
    searches = search_all(args, _runs(args, systems), [part.statistic for part in PARTS])
    tables = []
    for part, found in zip(PARTS, searches, strict=True):
        tables.append(_table(part, args, found))
        save(args, found, suffix=part.suffix)
    return tables


def _runs(args: argparse.Namespace, systems: Sequence[System]) -> dict[Line, Run]:
    runs = {}
    for system in systems:
        for dataset in datasets_of(args):
            fcfs = fcfs_run(args, system, dataset)
            ways = {FCFS: fcfs, SKIP_JOIN: replace(fcfs, scheduler=scheduler("skip_join_mlfq"))}
            if system == OPT_13B:  # the artifact has both rivals' latencies for it
                ways |= {VLLM: vllm(fcfs), FASTER_TRANSFORMER: faster_transformer(fcfs)}
            runs.update({Line(system, dataset, label): run for label, run in ways.items()})
    return runs


def _table(part: Part, args: argparse.Namespace, searches: Mapping[Line, Search]) -> Table:
    table = new_table(
        part.title,
        f"A100-40G, batch {BATCH}, {args.jobs} jobs (Alpaca {jobs_of(args, 'alpaca')}). "
        f"{SWAPPING} 'vLLM': FCFS with device memory alone, KV recomputed. 'FT' "
        "(FasterTransformer): a batch runs until all its jobs have ended. 'capacity': what full "
        "batches can finish. 'none': no rate breaks the SLO with so few jobs. The SLO of 66B and "
        "175B is ten of their decode iterations. Gains are skip-join's, the preprint's in "
        f"brackets. {part.note}",
        "system, lengths",
        "SLO\ns/token",
        "capacity\njobs/s",
        "FT\njobs/s",
        "vLLM\njobs/s",
        "FCFS\njobs/s",
        "skip-join\njobs/s",
        "over FCFS",
        "over vLLM",
    )
    for system, dataset in dict.fromkeys((line.system, line.dataset) for line in searches):
        rates = {
            line.label: search.rate
            for line, search in searches.items()
            if (line.system, line.dataset) == (system, dataset)
        }
        over_fcfs, over_vllm = (
            f"{ratio(rates[SKIP_JOIN], rates.get(base, math.inf))}\n({paper})"
            for base, paper in zip((FCFS, VLLM), part.paper[dataset], strict=True)
        )
        table.add_row(
            f"{system}, {DATASETS[dataset]}",
            number(slo_s(system)),
            number(system.capacity(lengths_of(args, dataset))),
            *(number(rates.get(label)) for label in (FASTER_TRANSFORMER, VLLM, FCFS, SKIP_JOIN)),
            over_fcfs,
            over_vllm,
        )
    return table


def add_options(options: argparse.ArgumentParser) -> None:
    options.add_argument(
        "--model", choices=[system.model for system in SYSTEMS], help="only this one (all)"
    )
    add_dataset(options)


FIGURE = Figure("fig11_12", __doc__, draw, quick_jobs=80, add_options=add_options)
