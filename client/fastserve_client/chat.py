"""``fastserve chat``: a conversation in the terminal."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from fastserve_client.client import FastServeClient, TokenStream
from fastserve_client.endpoint import DEFAULT_URL
from fastserve_client.errors import ClientError, InvalidRequest
from fastserve_client.results import Chunk
from fastserve_client.terminal import ExitCode, TextWriter, cannot_write

if TYPE_CHECKING:
    from typing import Unpack

    from fastserve_client.options import Message, SamplingOptions

_FORGET = "/clear"
_HELP = f"Ctrl-C stops an answer, Ctrl-D ends, {_FORGET} forgets the conversation."


def chat_in_terminal(
    *,
    url: str = DEFAULT_URL,
    system: str | None = None,
    timeout_s: float | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
    **sampling: Unpack[SamplingOptions],
) -> ExitCode:
    """Reads messages, a line each, from stdin until its end and streams the answers to ``out``.

    The whole conversation goes to the server each time. Ctrl-C cancels the answer that is being
    written; what there is of it stays in the conversation. A message that got no answer does not,
    so that it can be sent again.

    Args:
        system: what the model is told before the first message.
        timeout_s: for each answer.

    Returns:
        The exit code for the process: that of the last answer.
    """
    out = sys.stdout if out is None else out
    err = sys.stderr if err is None else err
    is_interactive = sys.stdin.isatty()
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    code = ExitCode.OK
    try:
        client = FastServeClient(url)
    except InvalidRequest as error:
        print(f"error: {error}", file=err)
        return ExitCode.USAGE
    with client:
        if is_interactive:
            _enable_line_editing()
            print(_HELP, file=err)
        while True:
            try:
                text = (input("> ") if is_interactive else input()).strip()
            except EOFError:
                return code
            except KeyboardInterrupt:
                print(f"\n{_HELP}", file=err)
                continue
            if text == _FORGET:
                messages = list(beginning)
            elif text:
                messages.append({"role": "user", "content": text})
                try:
                    code, answer = _answer(client, messages, timeout_s, out, err, sampling)
                except OSError as error:
                    return cannot_write(error, out, err)
                if answer:
                    messages.append({"role": "assistant", "content": answer})
                else:
                    messages.pop()


def _answer(
    client: FastServeClient,
    messages: list[Message],
    timeout_s: float | None,
    out: TextIO,
    err: TextIO,
    sampling: SamplingOptions,
) -> tuple[ExitCode, str]:
    writer = TextWriter(out)
    answer = ""
    code, closing_line = ExitCode.OK, None
    try:
        with client.stream(messages, timeout_s=timeout_s, **sampling) as stream:
            for chunk in _read_by_thread(stream):
                answer += chunk.text
                writer.write(chunk.text)
                if chunk.finish_reason == "length":
                    closing_line = "(cut off at max_tokens)"
    except KeyboardInterrupt:
        code, closing_line = ExitCode.INTERRUPTED, "(stopped)"
    except ClientError as error:
        code = ExitCode.USAGE if isinstance(error, InvalidRequest) else ExitCode.FAILED
        closing_line = f"error: {error}"
    writer.end_line()
    if closing_line is not None:
        print(closing_line, file=err)
    return code, answer


def _read_by_thread(stream: TokenStream) -> Iterator[Chunk]:
    """The chunks of ``stream``; raises what that raises.

    Ctrl-C interrupts whatever the main thread does, and in the middle of gRPC's code that can leave
    the connection unusable. So that is not where the main thread waits.
    """
    received: queue.SimpleQueue[Chunk | Exception | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for chunk in stream:
                received.put(chunk)
            received.put(None)
        except Exception as error:
            received.put(error)

    threading.Thread(target=read, name="answer", daemon=True).start()
    while (item := received.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def _enable_line_editing() -> None:
    with suppress(ImportError):  # without it lines can be typed all the same
        import readline  # noqa: F401 - input() uses it once it is there
