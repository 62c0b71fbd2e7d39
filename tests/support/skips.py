"""A table at the end of what was skipped, and why."""

from __future__ import annotations

import re
from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = Counter(map(_row, terminalreporter.getreports("skipped")))
    if not skipped:
        return
    terminalreporter.section("skipped tests")
    terminalreporter.write_line("| tests | of | because |")
    terminalreporter.write_line("|---|---|---|")
    for (name, reason), number in sorted(skipped.items()):
        terminalreporter.write_line(f"| {number} | {name} | {reason} |")


def _row(report: pytest.TestReport) -> tuple[str, str]:
    """The test without its parameters and its group (``sharing``), and why it was skipped."""
    assert isinstance(report.longrepr, tuple)
    _, _, reason = report.longrepr
    return re.split(r"[@\[]", report.nodeid)[0], reason.removeprefix("Skipped: ")
