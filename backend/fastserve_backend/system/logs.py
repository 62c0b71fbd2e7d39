"""Logging of all processes of a server: they write the same format to one stream."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from contextlib import suppress

# A stream that somebody reads takes a line sooner. The first thread that logs to a stalled stream
# waits so long, then lines queue up. The end of the process waits so long once more.
_PATIENCE_S = 1.0
_MAX_QUEUED_LINES = 1000  # some hundred kilobytes


def log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        handlers=[StderrHandler()],
    )


def warn_on_stderr() -> None:
    """Set up the launcher's log: bare messages, from warnings on."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[StderrHandler()])


class StderrHandler(logging.Handler):
    """Writes to standard error like `logging.StreamHandler`, but never stalls with its reader.
    Docker's log driver, a pager or Ctrl-S can stop reading.

    While the reader reads, a line is written before the call that logs it returns, so a process
    that then dies loses no line. While the reader is stalled, lines queue up. Lines that exceed the
    queue are dropped, and a line of its own says how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stderr
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()  # the first is being written
        self._num_dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Called by one thread at a time."""
        try:
            line = self.format(record) + "\n"
        except Exception:
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) >= _MAX_QUEUED_LINES:
                self._num_dropped += 1
                return
            is_stalled = bool(self._lines)
            self._lines.append(self._take_count() + line)
            self._changed.notify_all()
            if not is_stalled:
                self._wait_until_written()

    def flush(self) -> None:
        """Called at the end of the process."""
        with self._changed:
            self._wait_until_written()

    def _wait_until_written(self) -> None:
        self._changed.wait_for(lambda: not self._lines, _PATIENCE_S)

    def _take_count(self) -> str:
        """The line that says how many lines were dropped since the last such line; empty for
        none."""
        num_dropped, self._num_dropped = self._num_dropped, 0
        if not num_dropped:
            return ""
        text = f"{num_dropped} lines of the log were dropped: nobody read standard error"
        record = {"name": __name__, "levelname": "WARNING", "msg": text}
        return self.format(logging.makeLogRecord(record)) + "\n"

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                line = self._lines[0]
            with suppress(OSError, AttributeError):  # the reader is gone, or there is no stream
                self._write_now(line)
            with self._changed:
                self._lines.popleft()
                if not self._lines and self._num_dropped:
                    self._lines.append(self._take_count())
                self._changed.notify_all()

    def _write_now(self, text: str) -> None:
        # Not through sys.stderr: a thread that waits in it keeps the process from ending.
        data = text.encode(self._stream.encoding, self._stream.errors or "strict")
        while data:
            data = data[os.write(self._stream.fileno(), data) :]
