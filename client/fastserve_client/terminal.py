"""``fastserve generate``: one completion, streamed to the terminal."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TextIO

from fastserve_client.client import FastServeClient
from fastserve_client.endpoint import DEFAULT_URL
from fastserve_client.errors import ClientError, InvalidRequest
from fastserve_client.protocol import MODEL_NAME
from fastserve_client.results import Chunk

if TYPE_CHECKING:
    from typing import Unpack

    from fastserve_client.options import Prompt, RequestOptions


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    """The server is not there, refuses now, or failed the job."""
    USAGE = 2
    """The user's own mistake, as for wrong command-line options."""
    INTERRUPTED = 130
    """128 + SIGINT, as shells report it."""
    BROKEN_PIPE = 141
    """128 + SIGPIPE: the reader went away (``fastserve generate … | head -c 20``)."""


@dataclass(slots=True)
class Progress:
    """Counts and times of one stream. Times are seconds of one monotonic clock."""

    start_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_first_tokens: int = 0
    """Tokens of the first chunk with any. They came with the prefill, not by decoding."""
    num_tokens: int = 0
    finish_reason: str | None = None

    def add(self, chunk: Chunk, now_s: float) -> None:
        if chunk.token_ids:
            if self.first_token_s is None:
                self.first_token_s = now_s
                self.num_first_tokens = len(chunk.token_ids)
            self.last_token_s = now_s
            self.num_tokens += len(chunk.token_ids)
        self.finish_reason = chunk.finish_reason

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first over the time from the first to the last; ``None``: too few."""
        if self.first_token_s is None or self.last_token_s is None:
            return None
        duration_s = self.last_token_s - self.first_token_s
        num_decoded = self.num_tokens - self.num_first_tokens
        return num_decoded / duration_s if num_decoded and duration_s > 0 else None

    def summary(self) -> str:
        parts = []
        if self.first_token_s is not None:
            parts.append(f"TTFT {(self.first_token_s - self.start_s) * 1e3:.0f} ms")
        rate = self.decode_tokens_per_s
        if rate is not None:
            parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"{self.num_tokens} token" + ("" if self.num_tokens == 1 else "s"))
        parts.append(f"finish reason: {self.finish_reason or 'cancelled'}")
        return " | ".join(parts)


def generate_to_terminal(
    prompt: Prompt,
    *,
    url: str = DEFAULT_URL,
    model: str = MODEL_NAME,
    timeout_s: float | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
    **options: Unpack[RequestOptions],
) -> ExitCode:
    """Streams the completion to ``out`` (default stdout), then one line about it to ``err``.

    Ctrl-C cancels the request, and so does a reader that went away. A user's mistake or a server's
    failure becomes one line on ``err`` and raises nothing.

    Returns:
        The exit code for the process.
    """
    out = sys.stdout if out is None else out
    err = sys.stderr if err is None else err
    writer = TextWriter(out)
    progress = Progress(start_s=time.monotonic())
    code = ExitCode.FAILED
    try:
        try:
            with (
                FastServeClient(url, model=model) as client,
                client.stream(prompt, timeout_s=timeout_s, **options) as chunks,
            ):
                for chunk in chunks:
                    progress.add(chunk, time.monotonic())
                    writer.write(chunk.text)
            if progress.finish_reason in ("stop", "length"):
                code = ExitCode.OK
            closing_line = progress.summary()
        except KeyboardInterrupt:
            code = ExitCode.INTERRUPTED
            closing_line = progress.summary()
        except ClientError as error:
            if isinstance(error, InvalidRequest):
                code = ExitCode.USAGE
            closing_line = f"error: {error}"
        writer.end_line()
    except OSError as error:
        return cannot_write(error, out, err)
    print(closing_line, file=err)
    return code


class TextWriter:
    """Writes generated text as it comes. On a terminal it replaces control characters.

    A model can emit any character: an escape sequence could retitle, recolour or freeze the
    terminal of the reader. A file or a pipe gets the text as it is.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._encoding = out.encoding or "utf-8"
        self._at_line_start = True

    def write(self, text: str) -> None:
        if not text:
            return
        if self._is_terminal:
            text = text.translate(_VISIBLE_CONTROLS)
        # A terminal whose character set lacks a character shows "?".
        self._out.write(text.encode(self._encoding, "replace").decode(self._encoding))
        self._out.flush()
        self._at_line_start = text.endswith("\n")

    def end_line(self) -> None:
        """Makes the next line, here or on stderr, start at the left."""
        if not self._at_line_start:
            self.write("\n")


# U+2400 … U+2421 are the symbols of the ASCII control characters. Line feed and tab stay.
_VISIBLE_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE_CONTROLS |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def cannot_write(error: OSError, out: TextIO, err: TextIO) -> ExitCode:
    """The exit code if ``out`` takes no more: its reader went away, or a disk is full."""
    _silence(out)
    if isinstance(error, BrokenPipeError):
        return ExitCode.BROKEN_PIPE
    print(f"error: cannot write the text: {error.strerror}", file=err)
    return ExitCode.FAILED


def _silence(out: TextIO) -> None:
    """Redirects a broken ``out`` to nothing, because the interpreter flushes it when it exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, out.fileno())
    os.close(devnull)
