"""Flags that ``simulate`` and ``bench`` share: the workload."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fastserve_backend.errors import ConfigError


def workload_flags(num_jobs: int) -> dict[str, tuple[Any, Any]]:
    """Annotation and default by name, as ``register`` takes them."""
    return {
        "rates": (
            Annotated[
                str | None,
                typer.Option(
                    help="Jobs per second, separated by commas; left out: the timestamps of "
                    "a data set that has them."
                ),
            ],
            None,
        ),
        "dataset": (
            Annotated[
                str,
                typer.Option(
                    help="sharegpt or alpaca (packaged, synthetic), equal:PROMPT:OUTPUT, or a "
                    "file: lengths CSV, ShareGPT or Alpaca JSON, Azure LLM trace."
                ),
            ],
            "sharegpt",
        ),
        "num_jobs": (Annotated[int, typer.Option(help="Jobs of a trace.")], num_jobs),
        "seed": (Annotated[int, typer.Option(help="Of arrivals and lengths.")], 0),
        "max_prompt_tokens": (
            Annotated[int | None, typer.Option(help="Leave out jobs with longer prompts.")],
            1024,
        ),
        "max_total_tokens": (
            Annotated[int | None, typer.Option(help="Leave out jobs that are longer in all.")],
            2048,
        ),
        "max_output_tokens": (
            Annotated[int | None, typer.Option(help="Leave out jobs with longer outputs.")],
            None,
        ),
        "scale": (
            Annotated[float, typer.Option(help="All lengths times this, before the limits.")],
            1.0,
        ),
        "length_ratio": (
            Annotated[
                float | None,
                typer.Option(help="Scale lengths to this mean prompt / mean output ratio."),
            ],
            None,
        ),
    }


def parse_rates(text: str | None) -> list[float]:
    """``--rates``; empty where it is not given. Raises ConfigError: not numbers."""
    try:
        return [float(rate) for rate in listed(text)]
    except ValueError:
        raise ConfigError(f"rates: got {text!r}; must be numbers separated by commas") from None


def listed(text: str | None) -> list[str]:
    """What commas part."""
    return [] if text is None else [part.strip() for part in text.split(",")]
