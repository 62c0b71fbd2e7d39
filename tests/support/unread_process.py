"""A Python process whose standard error nobody reads, as with a stalled log driver."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PIPE_BYTES = 4096


@contextmanager
def unread_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Runs ``python *arguments``; also yields the reading end of the small pipe that is its
    standard error."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    with (
        os.fdopen(reader),
        subprocess.Popen(
            [sys.executable, *arguments],
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
