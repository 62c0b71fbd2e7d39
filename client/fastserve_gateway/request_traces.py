"""A span for each request that asks for work, if the environment asks for traces."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastserve_client.protocol import TRACE_HEADERS
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fastserve_gateway.metrics import CLIENT_CLOSED_REQUEST

if TYPE_CHECKING:
    from fastserve_client.tracer import Tracer
    from opentelemetry.trace import Span

    from fastserve_gateway.answer import Usage


@dataclass(slots=True)
class _Trace:
    """One request's part of a trace."""

    span: Span
    context: dict[str, str]
    """The headers that make its jobs part of the trace."""
    model: str | None = None
    usage: Usage | None = None


# Of the request whose task runs. None: requests are not traced.
_current: ContextVar[_Trace | None] = ContextVar("trace", default=None)


def note_model(name: str | None) -> None:
    """Says which model the current request is for."""
    trace = _current.get()
    if trace is not None:
        trace.model = name


def note_usage(usage: Usage) -> None:
    """Says where the tokens of the current request are counted."""
    trace = _current.get()
    if trace is not None:
        trace.usage = usage


def note_move() -> None:
    """Says that a server goes on with an answer of the current request after a loss."""
    trace = _current.get()
    if trace is not None:
        trace.span.add_event("answer moved")


def trace_context() -> dict[str, str] | None:
    """The headers that make a job part of the current request's trace; None: it has none."""
    trace = _current.get()
    return None if trace is None else trace.context


class RequestTraces:
    """ASGI middleware around all others. Only requests that may start jobs get spans (POST)."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        from fastserve_client.tracer import headers_of

        headers = Headers(scope=scope)
        context = {name: headers.getlist(name) for name in TRACE_HEADERS}
        span = self._tracer.start("POST", context)
        trace = _Trace(span, headers_of(span))
        status = CLIENT_CLOSED_REQUEST
        is_whole = False

        async def observed_send(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
                span.add_event("response started")  # a stream's first token, or a ping
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        token = _current.set(trace)
        try:
            await self._app(scope, receive, observed_send)
            if not is_whole:
                status = CLIENT_CLOSED_REQUEST
        except Exception:
            status = 500  # whatever the answer began with
            raise
        finally:
            _current.reset(token)
            if span.is_recording():
                _describe(span, scope, trace, status)
            span.end()


def _describe(span: Span, scope: Scope, trace: _Trace, status: int) -> None:
    from opentelemetry.trace import StatusCode

    route = getattr(scope.get("route"), "path", "")
    span.update_name(f"POST {route}".rstrip())
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "http.route": route,
        "http.response.status_code": status,
    }
    if trace.model is not None:
        attributes["gen_ai.request.model"] = trace.model
    if trace.usage is not None:
        attributes["gen_ai.usage.input_tokens"] = trace.usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = trace.usage.completion_tokens
    if status >= 500:
        attributes["error.type"] = str(status)
        span.set_status(StatusCode.ERROR)
    span.set_attributes(attributes)
