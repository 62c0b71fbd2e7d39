"""Data sets of lengths in CSV: plain ones, and the traces of Azure and BurstGPT.

The header decides which it is. Columns may have any order, and unknown ones are ignored.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from fastserve_client.errors import WorkloadError

from fastserve_bench.workload.service_class import class_of

_PLAIN_COLUMNS = ("prompt_tokens", "output_tokens")
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Wang et al., BurstGPT, KDD 2025. Its timestamps are seconds.
_BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_csv_lengths(
    path: str, text: str
) -> tuple[list[tuple[int, int]], list[float] | None, list[str] | None]:
    """Lengths of the jobs of a file's ``text``, timestamps in seconds, and names of classes.

    A file without timestamps, or without the column ``class``, has ``None`` for them. Jobs of a
    trace that generated nothing are left out.

    Args:
        path: For messages.

    Raises:
        WorkloadError: another header, or a line that lacks something.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""), skipinitialspace=True)
    columns = _header(path, reader)
    lengths: list[tuple[int, int]] = []
    classes: list[str] | None = [] if "class" in columns else None

    def add(place: str, row: Mapping[str, str | None], prompt: int, output: int) -> None:
        lengths.append((prompt, output))
        if classes is not None:
            classes.append(class_of(place, row))

    if set(_PLAIN_COLUMNS) <= set(columns):
        for place, row in _rows(path, reader):
            prompt = _tokens(place, row, "prompt_tokens", 1)
            add(place, row, prompt, _tokens(place, row, "output_tokens", 1))
        return lengths, None, classes
    if set(_AZURE_COLUMNS) <= set(columns):
        times_ns = []
        for place, row in _rows(path, reader):
            time_ns = _timestamp_ns(place, row["TIMESTAMP"])
            prompt = _tokens(place, row, "ContextTokens", 0)
            output = _tokens(place, row, "GeneratedTokens", 0)
            if prompt and output:
                add(place, row, prompt, output)
                times_ns.append(time_ns)
        # As seconds since the epoch, a double would lose the last digits.
        first_ns = min(times_ns, default=0)
        return lengths, [(time_ns - first_ns) / 1e9 for time_ns in times_ns], classes
    if set(_BURSTGPT_COLUMNS) <= set(columns):
        timestamps_s = []
        for place, row in _rows(path, reader):
            time_s = _seconds(place, row["Timestamp"])
            prompt = _tokens(place, row, "Request tokens", 0)
            output = _tokens(place, row, "Response tokens", 0)
            if prompt and output:
                add(place, row, prompt, output)
                timestamps_s.append(time_s)
        return lengths, timestamps_s, classes
    headers = " or ".join(
        ",".join(columns) for columns in (_PLAIN_COLUMNS, _AZURE_COLUMNS, _BURSTGPT_COLUMNS)
    )
    raise WorkloadError(
        f"{path}:1: got {','.join(columns)[:60]!r}; must be the header {headers}, or JSON"
    )


def _header(path: str, reader: csv.DictReader[str]) -> Sequence[str]:
    try:
        return reader.fieldnames or ()
    except csv.Error as error:
        raise WorkloadError(f"{path}:1: not CSV ({error})") from None


def _rows(path: str, reader: csv.DictReader[str]) -> Iterator[tuple[str, dict[str, str | None]]]:
    try:
        for row in reader:
            yield f"{path}:{reader.line_num}", row
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num}: not CSV ({error})") from None


def _tokens(place: str, row: dict[str, str | None], column: str, least: int) -> int:
    value = row[column]
    # Stricter than int(), which also takes "1_000" and digits of other scripts.
    if value is None or not re.fullmatch(r"\s*[0-9]{1,9}\s*", value) or int(value) < least:
        got = "nothing" if value is None else repr(value)
        raise WorkloadError(f"{place}: {column}: got {got}; must be an integer from {least}")
    return int(value)


def _seconds(place: str, value: str | None) -> float:
    if value is None or not re.fullmatch(r"\s*[0-9]{1,12}(\.[0-9]{1,9})?\s*", value):
        raise WorkloadError(f"{place}: Timestamp: got {value!r}; must be seconds from 0")
    return float(value)


# datetime.fromisoformat drops digits after microseconds, and takes other formats too.
_TIMESTAMP = re.compile(
    r"\s*(?P<second>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)"
    r"(?:\.(?P<fraction>\d{1,9}))?"
    r"(?P<zone>Z|[+-]\d\d:\d\d)?\s*",
    re.ASCII,
)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _timestamp_ns(place: str, value: str | None) -> int:
    """Nanoseconds since the epoch; a time without a zone is UTC."""
    match = _TIMESTAMP.fullmatch(value or "")
    try:
        if match is None:
            raise ValueError
        zone = "+00:00" if match["zone"] in (None, "Z") else match["zone"]
        second = datetime.fromisoformat(match["second"] + zone)
    except ValueError:  # fromisoformat raises it too, for month 13
        raise WorkloadError(
            f"{place}: TIMESTAMP: got {value!r}; must be like 2023-11-16 18:17:03.9799600"
        ) from None
    whole_s = (second - _EPOCH) // timedelta(seconds=1)
    return whole_s * 10**9 + int((match["fraction"] or "").ljust(9, "0"))
