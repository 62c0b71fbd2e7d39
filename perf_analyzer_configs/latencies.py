#!/usr/bin/env python3
"""Latencies from perf_analyzer's profile exports, which its own report does not have.

    python3 latencies.py results/*.json

It prints a row for each load and each ``max_tokens``: time to the first response, time between
responses, and time to the last one, in milliseconds. It needs only Python.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

NS_PER_MS = 1e6
NS_PER_S = 1e9
HEADER = (
    f"{'run':<12}{'max_tokens':>10}{'requests':>9}{'tokens':>8}{'tokens/s':>10}"
    f"{'first, ms':>18}{'between, ms':>18}{'last, ms':>18}"
)
SUBHEADER = " " * 49 + f"{'p50':>9}{'p95':>9}" * 3


@dataclass(frozen=True)
class Request:
    """One request as the client saw it. Times are nanoseconds of the client's clock."""

    max_tokens: int
    sent: int
    responses: list[int]
    tokens: int
    """Tokens of all its responses, as the server counted them."""


def read_profile(path: Path) -> list[Request]:
    """The requests of a run.

    The inputs must have ``sampling_parameters`` with ``max_tokens`` and
    ``return_num_output_tokens``. For outputs that a request did not ask for, perf_analyzer writes
    whatever its memory holds. If that is a float but no number, it leaves the file empty.

    Raises:
        ValueError: the file is no such profile.
    """
    text = path.read_text(encoding="utf-8")
    if not text:
        raise ValueError(f"{path}: empty; let every request ask for return_cumulative_logprob")
    try:
        experiments = json.loads(text)["experiments"]
        requests = [_request(entry) for one in experiments for entry in one["requests"]]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a profile of these configurations ({error!r})") from error
    if not requests:
        raise ValueError(f"{path}: no requests in it")
    return requests


def _request(entry: dict[str, Any]) -> Request:
    sampling = json.loads(entry["request_inputs"]["sampling_parameters"])
    if sampling.get("return_num_output_tokens") is not True:
        raise ValueError("sampling_parameters without return_num_output_tokens")
    if not entry["response_timestamps"]:
        raise ValueError("a request without a response")
    return Request(
        max_tokens=sampling["max_tokens"],
        sent=entry["timestamp"],
        responses=entry["response_timestamps"],
        tokens=sum(output["num_output_tokens"] for output in entry["response_outputs"]),
    )


def table(name: str, requests: Sequence[Request]) -> list[str]:
    """Rows of one run, by ``max_tokens``. Tokens per second are those of the whole run."""
    groups = defaultdict(list)
    for request in requests:
        groups[request.max_tokens].append(request)
    seconds = (max(r.responses[-1] for r in requests) - min(r.sent for r in requests)) / NS_PER_S
    rate = f"{sum(request.tokens for request in requests) / seconds:.1f}"
    rows = []
    for max_tokens, group in sorted(groups.items()):
        first = [request.responses[0] - request.sent for request in group]
        between = [b - a for request in group for a, b in pairwise(request.responses)]
        last = [request.responses[-1] - request.sent for request in group]
        rows.append(
            f"{name:<12}{max_tokens:>10}{len(group):>9}{sum(r.tokens for r in group):>8}{rate:>10}"
            + "".join(_percentiles(times) for times in (first, between, last))
        )
        name = rate = ""
    return rows


def _percentiles(times_ns: Sequence[int]) -> str:
    if not times_ns:
        return f"{'–':>9}{'–':>9}"
    # quantiles() needs two values. Every percentile of one value is that value.
    values = [time / NS_PER_MS for time in times_ns] * (2 if len(times_ns) == 1 else 1)
    p95 = statistics.quantiles(values, n=20, method="inclusive")[-1]
    return f"{statistics.median(values):>9.1f}{p95:>9.1f}"


def main(arguments: Sequence[str]) -> str:
    """Returns the table of all profiles."""
    if not arguments:
        raise ValueError("usage: latencies.py PROFILE.json …")
    lines = [HEADER, SUBHEADER]
    for argument in arguments:
        path = Path(argument)
        lines += table(path.stem, read_profile(path))
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
