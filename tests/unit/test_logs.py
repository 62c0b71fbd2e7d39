"""What a process logs, whether or not somebody reads its standard error."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

DEADLINE_S = 60
PIPE_BYTES = 4096
NUM_LINES = 3000
LOG = """
import logging, os, sys
from fastserve_backend.logs import log_to_stderr
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


@contextmanager
def unread(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process, and the end for reading of a small pipe that is its standard error."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with (
        os.fdopen(reader),
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=writer,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            text=True,
        ) as process,
    ):
        os.close(writer)
        try:
            yield process, reader
        finally:
            process.kill()


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
    with unread(code) as (process, reader):
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


def test_a_process_ends_whose_last_lines_nobody_reads() -> None:
    with unread(LOG_MANY) as (process, _):
        assert process.wait(DEADLINE_S) == 0
