"""Traces in Mooncake's format: JSON Lines of arrivals and lengths (Qin et al., FAST 2025)."""

from __future__ import annotations

import json
from typing import Any

from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.service_class import class_of

_KEYS = ("timestamp", "input_length", "output_length")


def is_mooncake(text: str) -> bool:
    """Whether the first line is a record of this format."""
    first = text.lstrip().partition("\n")[0]
    return first.startswith("{") and all(f'"{key}"' in first for key in _KEYS)


def read_mooncake(
    path: str, text: str
) -> tuple[list[tuple[int, int]], list[float], list[str] | None]:
    """Lengths, timestamps in seconds, and names of classes if a record has the key ``class``.

    Jobs that generated nothing are left out.

    Args:
        path: For messages.

    Raises:
        WorkloadError: a line that lacks something.
    """
    lengths, timestamps_s, classes = [], [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = _record(f"{path}:{number}", line)
        if record["input_length"] and record["output_length"]:
            lengths.append((record["input_length"], record["output_length"]))
            timestamps_s.append(record["timestamp"] / 1e3)
            classes.append(class_of(f"{path}:{number}", record))
    return lengths, timestamps_s, classes if any(classes) else None


def _record(place: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{place}: not JSON ({error})") from None
    for key in _KEYS:
        value = record.get(key) if isinstance(record, dict) else None
        # In this form True and 1.5 fail too. Timestamps are milliseconds.
        if type(value) is not int or not 0 <= value < 10**15:
            raise WorkloadError(f"{place}: {key}: got {value!r}; must be an integer from 0")
    return record  # type: ignore[no-any-return]
