"""Flags that ``simulate`` and ``bench`` share: the workload, and the figure of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastserve_backend.errors import ConfigError

Rates = Annotated[
    str | None,
    typer.Option(
        help="Jobs per second, separated by commas; left out: the timestamps of a data set that "
        "has them."
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        help="sharegpt, alpaca, chat, code, long-context, agents or batch-beside-chat (packaged, "
        "synthetic), equal:PROMPT:OUTPUT, or a file: lengths CSV, ShareGPT or Alpaca JSON, a trace "
        "of Azure, BurstGPT or Mooncake."
    ),
]
ArrivalsFlag = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        help="poisson, bursts (10 s at three times the rate, 20 s without jobs) or trace (the "
        "data set's own). Default: trace where it has timestamps, else poisson.",
    ),
]
JobClasses = Annotated[
    list[str] | None,
    typer.Option(
        "--class",
        help="A class of jobs, NAME[:SHARE][,priority=N][,ttft_slo_ms=N][,tpot_slo_ms=N]"
        "[,tenant=NAME][,key_variable=NAME]; can be repeated. SHARE is that of the jobs, left "
        "out where the data set says which jobs have the class.",
    ),
]
NumJobs = Annotated[int, typer.Option(help="Jobs of a trace.")]
Seed = Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")]
MaxPromptTokens = Annotated[int | None, typer.Option(help="Leave out jobs with longer prompts.")]
MaxTotalTokens = Annotated[int | None, typer.Option(help="Leave out jobs that are longer in all.")]
MaxOutputTokens = Annotated[int | None, typer.Option(help="Leave out jobs with longer outputs.")]
Scale = Annotated[float, typer.Option(help="All lengths times this, before the limits.")]
LengthRatio = Annotated[
    float | None, typer.Option(help="Scale lengths to this mean prompt / mean output ratio.")
]
Plot = Annotated[Path | None, typer.Option(help="Draw the sweep: PNG, SVG.")]


def parse_rates(text: str | None) -> list[float]:
    """The numbers of ``--rates``, none if it is not given. Raises ConfigError: not numbers."""
    try:
        return [float(rate) for rate in listed(text)]
    except ValueError:
        raise ConfigError(f"rates: got {text!r}; must be numbers separated by commas") from None


def listed(text: str | None) -> list[str]:
    """The parts of a text between commas."""
    return [] if text is None else [part.strip() for part in text.split(",")]
