"""A process logs, whether or not its standard error is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from unread_process import unread_process

DEADLINE_S = 150
NUM_LINES = 3000
LOG = """
import logging, os, sys
from fastserve_backend.system.logs import log_to_stderr
log_to_stderr()
log = logging.getLogger("a.module")
"""
LOG_ERROR = (
    LOG
    + r"""
try:
    1 / 0
except ZeroDivisionError:
    log.exception("over: \u20ac")
"""
)
LOG_MANY = LOG + f"for n in range({NUM_LINES}): log.info('line %d', n)\n"


@pytest.mark.parametrize("end", ["os._exit(3)", "sys.exit(3)", "os.abort()"])
def test_the_last_line_is_there_however_the_process_ends(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOG_ERROR + end],
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
    traceback = r"Traceback.*\n(?:  .*\n)+ZeroDivisionError: division by zero\n"
    assert re.fullmatch(rf"{date} ERROR a.module: over: \\u20ac\n{traceback}", done.stderr)


def test_a_reader_that_stalls_stops_nobody_who_logs() -> None:
    code = f"{LOG_MANY}\nprint('logged', flush=True)\nsys.stdin.read()\nlog.info('later')\n"
    with unread_process("-c", code) as (process, reader):
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "logged\n"
        with os.fdopen(os.dup(reader)) as lines:
            messages = []
            for line in lines:
                messages.append(line.rstrip("\n").split(": ", 1)[1])
                if "dropped" in line:
                    process.stdin.close()
        assert process.wait(DEADLINE_S) == 0
    *read, dropped, later = messages
    assert read == [f"line {n}" for n in range(len(read))]
    num_dropped = NUM_LINES - len(read)
    assert dropped == f"{num_dropped} lines of the log were dropped: nobody read standard error"
    assert num_dropped > 0
    assert later == "later"


@pytest.mark.slow
def test_a_process_ends_whose_last_lines_nobody_reads() -> None:
    with unread_process("-c", LOG_MANY) as (process, _):
        assert process.wait(DEADLINE_S) == 0
