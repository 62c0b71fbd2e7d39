"""A sweep: the summaries of several systems at several rates, and its JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fastserve_client.report.summary import Summary


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep."""

    label: str
    """What is compared, such as a policy's name."""
    rate: float
    """Offered load in jobs per second."""
    summary: Summary


def sweep_to_dict(points: Sequence[SweepPoint], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sweep as JSON types: ``{"settings": …, "points": [{"label", "rate", "summary"}, …]}``.

    A summary's keys are the fields of :class:`Summary`.

    Args:
        settings: Whatever produced the points (data set, seed, model, …), in JSON types.
    """
    return {"settings": dict(settings), "points": [asdict(point) for point in points]}


def sweep_to_json(points: Sequence[SweepPoint], settings: Mapping[str, Any]) -> str:
    """:func:`sweep_to_dict` as indented text, always in the same order.

    Raises:
        TypeError, ValueError: a setting that JSON cannot hold.
    """
    return json.dumps(sweep_to_dict(points, settings), indent=2, allow_nan=False) + "\n"
