"""The figures of FastServe and ALISE, simulated: tables beside the papers' numbers, plots, JSON.

python -m benchmarks.paper --help             # which there are
python -m benchmarks.paper fig14 --quick
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.paper import (
    alise_rates,
    alise_sweeps,
    fig01,
    fig05,
    fig07,
    fig08,
    fig11_12,
    fig13,
    fig14,
    fig15,
    nsdi26,
)
from benchmarks.paper.figures import Figure, add_common_options

_MODULES = (fig01, fig05, fig07, fig08, fig11_12, fig13, fig14, fig15, nsdi26)
FIGURES: dict[str, Figure] = {
    figure.name: figure
    for figure in (
        *(module.FIGURE for module in _MODULES),
        *alise_rates.FIGURES,
        *alise_sweeps.FIGURES,
    )
}


def main(argv: Sequence[str] | None = None) -> list[Table]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = parser.add_subparsers(dest="figure", required=True, metavar="FIGURE")
    for figure in FIGURES.values():
        description = figure.description or ""
        options = choices.add_parser(
            figure.name,
            description=description,
            help=description.partition("\n")[0].replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_common_options(options, figure)
        figure.add_options(options)
    args = parser.parse_args(argv)
    figure = FIGURES[args.figure]
    if args.quick:
        args.jobs = min(args.jobs, figure.quick_jobs)
    args.plot_dir.mkdir(parents=True, exist_ok=True)
    tables = figure.draw(args)
    for table in tables:
        Console(width=100).print(table)
    return tables


if __name__ == "__main__":
    main()
