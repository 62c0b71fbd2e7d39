"""A sweep: the summaries of several systems at several rates, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastserve_bench.report.summary import Summary


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep."""

    label: str
    """The name of what is compared, such as a policy."""
    rate: float
    """Offered load in jobs per second."""
    summary: Summary


def sweep_to_json(points: Sequence[SweepPoint], settings: Mapping[str, Any]) -> str:
    """``{"settings": …, "points": [{"label", "rate", "summary"}, …]}``, indented.

    A summary's keys are the fields of :class:`Summary`. The order is always the same.

    Args:
        settings: What produced the points (data set, seed, model, …), in JSON types.

    Raises:
        TypeError, ValueError: a setting that JSON cannot hold.
    """
    report = {"settings": dict(settings), "points": [asdict(point) for point in points]}
    return json.dumps(report, indent=2, allow_nan=False) + "\n"
