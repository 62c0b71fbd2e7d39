"""``fastserve chat``: a conversation in the terminal."""

from __future__ import annotations

import io
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, cast

from fastserve_client.client import FastServeClient, TokenStream
from fastserve_client.errors import ClientError, InvalidRequest
from fastserve_client.protocol import MODEL_NAME
from fastserve_client.results import Chunk
from fastserve_client.terminal import ExitCode, TextWriter, cannot_write

from fastserve_chat.call_messages import assistant_message
from fastserve_chat.demo_turn import DemoTurn
from fastserve_chat.parts import AnswerPart, Content, PartReader, Reasoning
from fastserve_chat.plain import PlainReader

if TYPE_CHECKING:
    from typing import Unpack

    from fastserve_client.options import Message, RequestOptions

_FORGET = "/clear"
_HELP = f"Ctrl-C stops an answer, Ctrl-D ends, {_FORGET} forgets the conversation."
_NO_MORE_ROOM = f"(cut off where the model takes no more; {_FORGET} forgets the conversation)"
_MAKE_ROOM = f"{_FORGET} forgets the conversation, which is sent with each message."


def chat_in_terminal(
    *,
    url: str,
    model: str = MODEL_NAME,
    system: str | None,
    timeout_s: float | None,
    demo_tools: bool = False,
    **options: Unpack[RequestOptions],
) -> ExitCode:
    """Reads messages, a line each, from stdin until its end and streams the answers to stdout.

    The whole conversation goes to the server each time. Ctrl-C cancels the current answer, and its
    text so far stays in the conversation. A message without an answer does not stay, so that it can
    be sent again. An answer is shorter than ``max_tokens`` if the conversation leaves less room.

    Args:
        system: text that the model gets before the first message.
        timeout_s: for each request. With tools an answer takes several.
        demo_tools: let the model call a calculator and a clock. A line on stderr shows each call.

    Returns:
        The exit code for the process: that of the last answer.
    """
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    options["clip_max_tokens"] = True
    code = ExitCode.OK
    try:
        client = FastServeClient(url, model=model)
    except InvalidRequest as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USAGE
    with client:
        template = None
        if demo_tools:
            try:
                template = client.describe().template_with_tools
            except ClientError as error:
                print(f"error: {error}", file=sys.stderr)
                return ExitCode.FAILED
        for line in _typed_lines():
            if line == _FORGET:
                messages = list(beginning)
                continue
            messages.append({"role": "user", "content": line})
            try:
                code, told = _take_turn(client, messages, template, timeout_s, options)
            except OSError as error:
                return cannot_write(error, sys.stdout, sys.stderr)
            if code == ExitCode.USAGE and len(messages) > len(beginning) + 1:
                # The options cannot be wrong: earlier turns had the same.
                print(_MAKE_ROOM, file=sys.stderr)
            if told:
                messages += told
            else:
                messages.pop()
    return code


def _typed_lines() -> Iterator[str]:
    """The lines of stdin that are not blank. Ctrl-C shows the help."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a file may have another encoding
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        _enable_line_editing()
        print(_HELP, file=sys.stderr)
    while True:
        try:
            line = (input("> ") if is_interactive else input()).strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}", file=sys.stderr)
            continue
        if line:
            yield line


class _Answer(NamedTuple):
    code: ExitCode
    parts: list[AnswerPart]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Content))


def _take_turn(
    client: FastServeClient,
    messages: list[Message],
    template: str | None,
    timeout_s: float | None,
    options: RequestOptions,
) -> tuple[ExitCode, list[Message]]:
    """Streams the answer to the last message.

    Args:
        template: the model's chat template, with the tools of the demo; None: no tools.

    Returns:
        The code of its last request, and the messages that it adds to the conversation; none
        without an answer.
    """
    turn = None if template is None else DemoTurn(template, messages)
    while True:
        if turn is None:
            answer = _answer(client, messages, timeout_s, options, PlainReader())
            done = []
        else:
            request = turn.next_request()
            own = {name: value for name, value in options.items() if value is not None}
            wanted = cast("RequestOptions", {**request.options, **own})
            answer = _answer(client, request.messages, timeout_s, wanted, request.reader)
            done = turn.on_answer(answer.parts)
        for call in done:
            if call.result:
                print(f"[{call.name}: {call.result}]", file=sys.stderr)
        if not done or answer.code != ExitCode.OK:
            break
    told = [] if turn is None else turn.messages
    return answer.code, [*told, assistant_message(answer.text)] if answer.text else []


def _answer(
    client: FastServeClient,
    messages: Sequence[Message],
    timeout_s: float | None,
    options: RequestOptions,
    reader: PartReader,
) -> _Answer:
    """Streams the answer to one request: its text to stdout, and why it ended early to stderr."""
    writer = TextWriter(sys.stdout)
    parts: list[AnswerPart] = []
    num_tokens = 0
    code, closing_line = ExitCode.OK, None

    def show(new: Sequence[AnswerPart]) -> None:
        parts.extend(new)
        for part in new:
            if isinstance(part, Content | Reasoning):
                writer.write(part.text)

    try:
        with client.stream(messages, timeout_s=timeout_s, **options) as stream:
            for chunk in _read_by_thread(stream):
                num_tokens += len(chunk.token_ids)
                show(reader.read(chunk.text))
                if chunk.finish_reason == "length":
                    is_clipped = num_tokens < (options.get("max_tokens") or 0)
                    closing_line = _NO_MORE_ROOM if is_clipped else "(cut off at max_tokens)"
        show(reader.end())
    except KeyboardInterrupt:
        code, closing_line = ExitCode.INTERRUPTED, "(stopped)"
    except ClientError as error:
        code = ExitCode.USAGE if isinstance(error, InvalidRequest) else ExitCode.FAILED
        closing_line = f"error: {error}"
    writer.end_line()
    if closing_line is not None:
        print(closing_line, file=sys.stderr)
    return _Answer(code, parts)


def _read_by_thread(stream: TokenStream) -> Iterator[Chunk]:
    """The chunks of ``stream``, read by another thread. Raises the errors of ``stream``.

    Ctrl-C interrupts the main thread. In the middle of gRPC's code that can leave the connection
    unusable, so the main thread must not wait there.
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
    with suppress(ImportError):  # input() works without it
        import readline  # noqa: F401 - input() uses it if it is loaded
