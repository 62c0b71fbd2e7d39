"""Writes the figures of GPU runs to docs/performance_gpu.md, from their JSON files.

python3 -m benchmarks.gpu.gpu_report  # after files were added to benchmarks/results/gpu
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
DOCS = ROOT / "docs" / "performance_gpu.md"
SCHEMA = 1
"""Version of the JSON; files of another version are refused."""
BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"
NO_RUN = "No run on a GPU has been recorded yet."
PERCENT = ("share", "spread", "slowdown", "blocked")
"""Figures whose names have one of these words are shares, written as percentages."""


class ReportError(Exception):
    """A file cannot be reported."""


def file_name(document: Mapping[str, Any]) -> str:
    """Name of the run's JSON file, made of the GPU's name."""
    name = str(document["machine"].get("name", "unknown"))
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def update_docs(results: Path = RESULTS, docs: Path = DOCS) -> Path:
    """Writes the section between the two markers anew; returns ``docs``.

    Raises:
        ReportError: a marker is missing, or a file is no JSON, has another schema, comes from a
            dry run or lacks a part of the report.
    """
    text = docs.read_text(encoding="utf-8")
    begin, end = text.find(BEGIN), text.find(END)
    if not 0 <= begin < end:
        raise ReportError(f"{docs}: the lines {BEGIN} and {END} are not there")
    section = f"{BEGIN}\n\n{all_markdown(results)}\n\n"
    docs.write_text(text[:begin] + section + text[end:], encoding="utf-8")
    return docs


def all_markdown(results: Path = RESULTS) -> str:
    """The section: every GPU's figures, or that there are none.

    Raises:
        ReportError: as ``update_docs``.
    """
    runs = []
    for path in sorted(results.glob("*.json")):
        try:
            document = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ReportError(f"{path}: is no JSON ({error}); remove it") from None
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != SCHEMA:
            raise ReportError(f"{path}: schema is {schema}, not {SCHEMA}; run again")
        try:
            if document["dry_run"]:
                raise ReportError(f"{path}: is of a dry run, which measures nothing; remove it")
            runs.append(markdown(document))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"{path}: is no whole report ({error!r}); run again") from error
    return "\n\n".join(runs) or NO_RUN


def markdown(document: Mapping[str, Any]) -> str:
    """One run: how it went, the goals, and a table for each kind of figure."""
    machine, versions = document["machine"], document["versions"]
    parts = [f"### {machine.get('name', 'no machine')}"]
    if document["dry_run"]:
        parts.append("**A dry run on a CPU, of tiny sizes: its figures mean nothing.**")
    facts = [
        f"{document['date'][:10]}, commit {document['commit'] or 'unknown'}",
        *(f"driver {machine[key]}" for key in ("driver",) if machine.get(key)),
        *(f"{name} {versions[name]}" for name in ("torch", "triton") if versions.get(name)),
        f"{document['seconds']:.0f} s",
    ]
    parts.append(f"`{document['command']}`: {', '.join(facts)}.")
    parts.append(_phases(document["phases"]))
    parts.append(
        _table(("goal", "must", "stretch", "measured", ""), map(_goal_cells, document["goals"]))
    )
    rows = [row for phase in document["phases"] for row in phase["rows"]]
    for name in dict.fromkeys(row["table"] for row in rows):
        parts.append(f"**{name[0].upper()}{name[1:]}**")
        parts.append(_figures([row for row in rows if row["table"] == name]))
    return "\n\n".join(parts)


def _phases(phases: Sequence[Mapping[str, Any]]) -> str:
    header = ["phase", "result", "s"]
    rows = [
        [
            phase["name"],
            f"{phase['status']}{(phase['error'] and ': ' + phase['error']) or ''}",
            f"{phase['seconds']:.0f}",
        ]
        for phase in phases
    ]
    if any("host_gib_left" in phase for phase in phases):  # older runs did not look
        header.append("least host memory left, GiB")
        for phase, row in zip(phases, rows, strict=True):
            row.append(_number(phase["host_gib_left"]))
    return _table(header, rows)


def _goal_cells(goal: Mapping[str, Any]) -> Sequence[str]:
    sign = "≤ " if goal["at_most"] else "≥ "
    must, stretch, measured = (
        _number(goal[key], percent=goal["percent"]) for key in ("must", "stretch", "measured")
    )
    verdict = {True: "met", False: "**missed**", None: ""}[goal["met"]]
    return goal["name"], sign + must, sign + stretch, measured, verdict


def _figures(rows: Sequence[Mapping[str, Any]]) -> str:
    """One table: the columns of the cases, then the figures."""
    columns = [*dict.fromkeys(key for row in rows for key in row["case"])]
    figures = [*dict.fromkeys(key for row in rows for key in row["figures"])]
    notes = [row["note"] for row in rows if row["note"]]

    def cells(row: Mapping[str, Any]) -> Sequence[str]:
        case = [_number(row["case"].get(name)) for name in columns]
        return [
            *case,
            *(
                _number(row["figures"].get(name), percent=any(word in name for word in PERCENT))
                for name in figures
            ),
        ]

    table = _table([*columns, *figures], map(cells, rows))
    return table + "".join(f"\n\n{note}." for note in dict.fromkeys(notes))


def _number(value: Any, *, percent: bool = False) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if percent:
        return f"{value:.1%}"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


if __name__ == "__main__":
    try:
        print(f"written: {update_docs()}")
    except ReportError as error:
        sys.exit(str(error))
