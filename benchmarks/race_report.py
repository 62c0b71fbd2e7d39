"""The race's report: the best FCFS, where ours is worse, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.table import Table

from benchmarks.race_cells import (
    FCFS,
    FIRST_TOKEN_S,
    ORACLE,
    OURS,
    PREDICTION_ERROR,
    TOKEN_S,
    Result,
)

# Ours is worse if its figure over the best FCFS's is past one of these.
_MOST_LATENCY = 1.03
_LEAST_TOKENS = 0.97
_MOST_JCT, _MOST_JCT_PREDICTED = 1.10, 1.0
# FCFS queues where its mean is over this many times its idle latency. There ours has to be this
# many times better.
_QUEUES, _BETTER = 3.0, 2.0

_COLUMNS = (
    ("mean", "mean"),
    ("p95", "P95"),
    ("p99", "P99"),
    ("first_p95", "first P95"),
    ("first_p99", "first P99"),
    ("gap_p95", "gap P95"),
    ("gap_p99", "gap P99"),
    ("jct", "JCT mean"),
    ("jct_p95", "JCT P95"),
    ("jct_p99", "JCT P99"),
    ("slowdown", "slowdown"),
    ("tokens_per_s", "tokens/s"),
    ("violations", "missed"),
)

_FRONTIER = (
    ("mean", "mean"),
    ("p95", "P95"),
    ("jct", "JCT mean"),
    ("jct_p99", "JCT P99"),
    ("tokens_per_s", "tokens/s"),
)

# The page has a table for each of these, the most important first.
_MEASURES = (
    ("mean", "Mean normalized latency, s a token"),
    ("p95", "P95 of normalized latency, s a token"),
    ("jct", "Mean completion time, s"),
    ("jct_p99", "P99 of completion time, s"),
    ("tokens_per_s", "Output tokens per second"),
    ("first_p99", "P99 of the time to the first token, s"),
    ("gap_p99", "P99 of the time between tokens, s"),
    ("violations", "Share of jobs that miss an objective"),
)

_ABOUT = """# The scheduling race

This page is evidence: it shows what each policy does to latency and throughput. Use it to choose a
policy, and to see what the default gives up.

**In short:** where jobs queue, the default, `gittins`, has the lowest latency a token among the
policies that know no lengths and let no job starve. In return the longest jobs finish later.
Predicted lengths gain more still; where no jobs queue, the policies hardly differ.

Every figure is simulated: the engine's own step loop, policies and KV decisions run on iteration
times of a roofline model. COMMIT. This command writes the page:

    COMMAND

![every policy over the best FCFS](scheduling_race.png)
"""

_ABOUT_FRONTIER = f"""Each figure is divided by the best FCFS's. The table shows the median over
cells; a cell is a workload on a system at a load. Only cells where FCFS queues count: there its
mean is over {_QUEUES:g} times its idle latency.

No policy is the best in all columns. A policy that favours short jobs lowers latency a token, but
long jobs wait, so P99 of completion time rises. The default is the best compromise among the
policies that know no lengths and let no job starve.

`fixed_priority` runs the shortest prompt first. Its medians are as good, but nothing bounds the
wait. Where answers are most of the work (ShareGPT on OPT-13B and Alpaca, load 1.5), its mean is 1.5
to 2.4 times the default's."""

_ABOUT_WORSE = f"""The default, without and with predictions, has a line here in each cell where

- its mean or P95 is over {_MOST_LATENCY:g} times the best FCFS's,
- its mean completion time is over {_MOST_JCT:.2f} times the best FCFS's
  (with predictions: over {_MOST_JCT_PREDICTED:.2f} times),
- its tokens/s are under {_LEAST_TOKENS:g} times the best FCFS's, or
- FCFS queues, and the default's mean is not {_BETTER:g} times better.

`srpt` knows all lengths: its figure at the end of a line shows how much is possible."""

_ABOUT_COLUMNS = f"""- **Load**: the rate over what FCFS serves when all jobs are there at once.
- **Idle latency**: mean normalized latency of jobs that have the system to themselves.
- **Normalized latency**: completion time over output tokens.
- **Completion time** (JCT): from arrival to the last token.
- **Objectives**: the first token within {FIRST_TOKEN_S:g} s, later ones within {TOKEN_S:g} s each,
  on average. A cell has goodput if at most 0.01 of its jobs miss one.
- **The best FCFS**: the best of three, for each figure by itself: with the shipped chunks of
  prefill, with chunks of 512 tokens, and with whole prompts.
- **"Predicted"**: the policy is told output lengths with an error of σ = {PREDICTION_ERROR:g} in
  ln(predicted / real). `srpt` knows the real ones.

The baselines `sarathi_edf` and `uniboost` order jobs anew at each token. Where KV memory is short,
they swap at each token, and tokens/s fall: no rule keeps their jobs in place.

With `--output race.json` the command writes all columns of all cells: also P99 of normalized
latency, P95 of the other times, the idle latency, and the slowdown of the longest tenth of jobs
(completion time over that on an idle system)."""


def by_cell(results: Iterable[Result]) -> dict[str, dict[str, Result]]:
    cells: dict[str, dict[str, Result]] = {}
    for result in results:
        cells.setdefault(result.cell, {})[result.variant] = result
    return cells


def best_fcfs(cell: Mapping[str, Result], column: str) -> float:
    values: list[float] = [
        getattr(cell[variant.name], column) for variant in FCFS if variant.name in cell
    ]
    return max(values) if column == "tokens_per_s" else min(values)


def ratios(cells: Mapping[str, Mapping[str, Result]], variant: str, column: str) -> list[float]:
    """The variant's figure over the best FCFS's, in each cell that has both."""
    return [
        getattr(cell[variant], column) / best_fcfs(cell, column)
        for cell in cells.values()
        if variant in cell and any(fcfs.name in cell for fcfs in FCFS)
    ]


def frontier(cells: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """For each variant the median of its ratios over the cells where FCFS queues, as Markdown."""
    queues = {
        name: cell
        for name, cell in cells.items()
        if any(fcfs.name in cell for fcfs in FCFS)
        and best_fcfs(cell, "mean") > _QUEUES * next(iter(cell.values())).idle
    }
    lines = ["| policy | " + " | ".join(label for _, label in _FRONTIER) + " |"]
    lines.append("|---|" + "---|" * len(_FRONTIER))
    for variant in dict.fromkeys(name for cell in queues.values() for name in cell):
        medians = (statistics.median(ratios(queues, variant, column)) for column, _ in _FRONTIER)
        lines.append(f"| {variant} | " + " | ".join(f"{median:.2f}" for median in medians) + " |")
    return lines


def verdicts(cells: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """A line for each cell and figure in which ours misses a bound."""
    lines = []
    for name, cell in cells.items():
        if not any(variant.name in cell for variant in FCFS):
            continue
        for variant in OURS:
            if variant.name not in cell:
                continue
            most_jct = _MOST_JCT_PREDICTED if variant.is_predicted else _MOST_JCT
            ours = cell[variant.name]
            for column, label, most in (
                ("mean", "mean", _MOST_LATENCY),
                ("p95", "P95", _MOST_LATENCY),
                ("jct", "mean JCT", most_jct),
            ):
                ratio = getattr(ours, column) / best_fcfs(cell, column)
                if ratio > most:
                    lines.append(f"{name}: {variant.name}: {label} {ratio:.2f} x the best FCFS")
            ratio = ours.tokens_per_s / best_fcfs(cell, "tokens_per_s")
            if ratio < _LEAST_TOKENS:
                lines.append(f"{name}: {variant.name}: tokens/s {ratio:.2f} x the best FCFS")
            queues = best_fcfs(cell, "mean") / ours.idle
            gain = best_fcfs(cell, "mean") / ours.mean
            if queues > _QUEUES and gain < _BETTER:
                line = (
                    f"{name}: {variant.name}: mean only {gain:.2f} times better, where FCFS takes "
                    f"{queues:.1f} times its idle latency"
                )
                if ORACLE.name in cell:
                    possible = best_fcfs(cell, "mean") / cell[ORACLE.name].mean
                    line += f"; {ORACLE.name} {possible:.2f} times"
                lines.append(line)
    return lines


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def table(name: str, cell: Mapping[str, Result]) -> Table:
    idle = next(iter(cell.values())).idle
    made = Table("policy", *(label for _, label in _COLUMNS), title=f"{name} (idle {number(idle)})")
    for variant, result in cell.items():
        made.add_row(variant, *(number(getattr(result, column)) for column, _ in _COLUMNS))
    return made


def write_markdown(
    directory: Path, cells: Mapping[str, Mapping[str, Result]], command: str, commit: str
) -> None:
    """``scheduling_race.md`` and ``.png`` in ``directory``.

    ``command`` is what measured them, on the code of ``commit``.
    """
    about = _ABOUT.replace("COMMAND", command).replace(
        "COMMIT", f"The figures are of commit {commit}"
    )
    lines = [about, "## The frontier", "", _ABOUT_FRONTIER, "", *frontier(cells), ""]
    worse = [f"- {line}" for line in verdicts(cells)]
    lines += ["## Where ours is worse", "", _ABOUT_WORSE, "", *(worse or ["Nowhere."]), ""]
    lines += ["## What the words mean", "", _ABOUT_COLUMNS, ""]
    for column, title in _MEASURES:
        lines += [f"## {title}", "", *_measure_table(cells, column), ""]
    (directory / "scheduling_race.md").write_text("\n".join(lines), encoding="utf-8")
    _plot(directory / "scheduling_race.png", cells)


def _measure_table(cells: Mapping[str, Mapping[str, Result]], column: str) -> list[str]:
    """A row for each cell, a column for each policy, as Markdown."""
    variants = list(dict.fromkeys(variant for cell in cells.values() for variant in cell))
    lines = ["| workload, system, load | " + " | ".join(variants) + " |"]
    lines.append("|---|" + "---|" * len(variants))
    for name, cell in cells.items():
        values = (
            number(getattr(cell[variant], column)) if variant in cell else "–"
            for variant in variants
        )
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    return lines


def _plot(path: Path, cells: Mapping[str, Mapping[str, Result]]) -> None:
    """Plots every policy in every cell, each figure over the best FCFS's: normalized latency
    against mean and P99 of completion time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(13, 6))
    for axes, column, label in zip(panels, ("jct", "jct_p99"), ("mean", "P99"), strict=True):
        for variant in dict.fromkeys(name for cell in cells.values() for name in cell):
            x, y = ratios(cells, variant, "mean"), ratios(cells, variant, column)
            axes.scatter(x, y, s=14, label=variant)
        axes.axhline(1.0, color="grey", linewidth=0.5)
        axes.axvline(1.0, color="grey", linewidth=0.5)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="mean normalized latency over the best FCFS's",
            ylabel=f"{label} completion time over the best FCFS's",
        )
    panels[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
