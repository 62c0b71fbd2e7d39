"""A proxy that makes a random model play a part, so that an agent before it goes through a script.

Requests reach the gateway as the agent wrote them, but for what says which tool the model calls
with which arguments, or what it answers: grammars make it. The proxy notes every exchange.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from waiting import DEADLINE_S, POLL_S, wait_for

TIMEOUT_S = 600.0
_HOP_BY_HOP = frozenset(("connection", "transfer-encoding", "content-length", "host", "keep-alive"))
_LIMITS = {
    "messages": "max_tokens",
    "responses": "max_output_tokens",
    "completions": "max_tokens",
}
"""By the last part of a path: the field that limits an answer."""
_TOKENS = 2048
"""More than any move needs."""
_BEGINNING_BYTES = 4096
"""The first events of an answer have fewer."""
SUMMARY = "A summary."


@dataclass(frozen=True)
class Call:
    """The model calls a tool with these arguments. Text is the input of a custom tool."""

    tool: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True)
class Say:
    """The model answers this text, as a JSON string."""

    text: str


@dataclass(frozen=True)
class Ramble:
    """The model writes, without a grammar, for as long as the agent lets it."""


Move = Call | Say | Ramble


@dataclass
class Exchange:
    path: str
    request: dict[str, Any]
    """As the agent sent it."""
    move: Move | None
    """What the model was made to do; None: it was passed on as it is."""
    status: int = 0
    ignored: str = ""
    """The header of what the gateway left out."""
    body: bytes = b""
    has_ended: bool = False
    was_cut: bool = False
    """The agent closed the connection before the end."""

    def has_begun(self) -> bool:
        """Whether a rambling model has written something."""
        return isinstance(self.move, Ramble) and len(self.body) > _BEGINNING_BYTES

    def error(self) -> str:
        """The error that the agent got; none if it is empty. Claude Code asks for ``/``, to open a
        connection: that there is no such page is no error."""
        if self.status >= 400 and self.path != "/":
            return f"{self.status}: {self.body.decode()}"
        match = re.search(rb'"type": ?"(error|response\.failed)".*', self.body)
        return match[0].decode() if match else ""


@dataclass
class Conductor:
    """What is played.

    A request with tools takes the next of ``moves``. Others, such as those for a title, take
    ``aside``, and so do those that have the text ``aside_mark``: they ask for a summary.
    """

    gateway_url: str
    url: str = ""
    moves: deque[Move] = field(default_factory=deque)
    exchanges: list[Exchange] = field(default_factory=list)
    aside: Move | None = field(default_factory=lambda: Say(SUMMARY))
    """None: all requests are passed on as they are."""
    aside_mark: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def play(self, *moves: Move) -> None:
        self.moves.extend(moves)

    def next_exchange(self, path: str, request: dict[str, Any]) -> Exchange:
        with self._lock:
            exchange = Exchange(path, request, self._next_move(path, request))
            self.exchanges.append(exchange)
            return exchange

    def _next_move(self, path: str, request: dict[str, Any]) -> Move | None:
        if _api(path) not in _LIMITS:
            return None
        is_marked = self.aside_mark and self.aside_mark in json.dumps(request)
        if self.aside is None or is_marked or not request.get("tools"):
            return self.aside
        return self.moves.popleft()

    def refused(self, exchange: Exchange) -> None:
        """The gateway refused it, so its move is still to be made."""
        if exchange.move is not None and exchange.move != self.aside:
            self.moves.appendleft(exchange.move)

    def of(self, move: Move) -> Exchange:
        """The only exchange with this move that was not refused."""
        (found,) = [one for one in self.exchanges if one.move == move and one.status < 400]
        return found

    def errors(self) -> list[str]:
        return [text for exchange in self.exchanges if (text := exchange.error())]

    def wait_until_ended(self) -> None:
        wait_for(lambda: all(exchange.has_ended for exchange in self.exchanges), DEADLINE_S)


def _api(path: str) -> str:
    return path.rpartition("/")[2]


def conducted(path: str, request: dict[str, Any], move: Move) -> dict[str, Any]:
    """The request that makes the model do ``move``."""
    api = _api(path)
    changed = dict(request)
    if not isinstance(move, Ramble):
        changed.pop("max_completion_tokens", None)
        changed[_LIMITS[api]] = _TOKENS
    if not isinstance(move, Call) and request.get("tools"):
        changed["tool_choice"] = {"type": "none"} if api == "messages" else "none"
    match move:
        case Say(text):
            schema = {"type": "string", "const": text}
            named = {"type": "json_schema", "name": "answer", "schema": schema}
            if api == "messages":
                changed["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
            elif api == "responses":
                changed["text"] = {"format": named}
            else:
                shape = {"name": "answer", "schema": schema}
                changed["response_format"] = {"type": "json_schema", "json_schema": shape}
        case Call(tool, arguments):
            changed["tools"] = [_narrowed(one, tool, arguments) for one in request["tools"]]
            kind = "custom" if isinstance(arguments, str) else "function"
            changed["tool_choice"] = {
                "messages": {"type": "tool", "name": tool},
                "responses": {"type": kind, "name": tool},
                "completions": {"type": "function", "function": {"name": tool}},
            }[api]
    return changed


def _narrowed(tool: dict[str, Any], name: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    """The tool, with a schema that allows these arguments alone if it has this name."""
    if "function" in tool:
        return {**tool, "function": _narrowed(tool["function"], name, arguments)}
    if tool.get("name") != name:
        return tool
    if isinstance(arguments, str):
        pattern = re.escape(arguments)
        return {**tool, "format": {"type": "grammar", "syntax": "regex", "definition": pattern}}
    schema = {
        "type": "object",
        "properties": {key: {"const": value} for key, value in arguments.items()},
        "required": list(arguments),
        "additionalProperties": False,
    }
    key = "input_schema" if "input_schema" in tool else "parameters"
    return {**tool, key: schema}


@contextmanager
def conductor(gateway_url: str) -> Iterator[Conductor]:
    """Listens while the block runs."""
    playing = Conductor(gateway_url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._pass_on(None)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._pass_on(body)

        def _pass_on(self, body: bytes | None) -> None:
            request = json.loads(body) if body else {}
            path = urlsplit(self.path).path
            exchange = playing.next_exchange(path, request)
            if exchange.move is not None:
                body = json.dumps(conducted(path, request, exchange.move)).encode()
            try:
                self._exchange(body, exchange)
            except OSError:
                exchange.was_cut = True
                self.close_connection = True
            finally:
                exchange.has_ended = True

        def _exchange(self, body: bytes | None, exchange: Exchange) -> None:
            parts = urlsplit(playing.gateway_url)
            assert parts.hostname
            upstream = http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_S)
            headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP_BY_HOP}
            try:
                upstream.request(self.command, self.path, body, headers | {"Accept-Encoding": ""})
                answer = upstream.getresponse()
                exchange.status = answer.status
                if answer.status >= 400:
                    playing.refused(exchange)
                exchange.ignored = answer.headers.get("FastServe-Ignored-Fields", "")
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while data := answer.read1(65536):
                    exchange.body += data
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                self.wfile.write(b"0\r\n\r\n")
            finally:
                upstream.close()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        playing.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), daemon=True)
        thread.start()
        try:
            yield playing
        finally:
            server.shutdown()
            with suppress(RuntimeError):
                thread.join()
