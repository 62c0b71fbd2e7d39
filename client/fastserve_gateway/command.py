"""``fastserve gateway``: serves the application until a signal."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib import import_module
from types import FrameType

import uvicorn
from fastapi import FastAPI
from fastserve_client.cancelling import cancel_all
from fastserve_client.endpoint import Endpoint
from fastserve_client.errors import InvalidRequest
from fastserve_client.listening import DEFAULT_KEEP_ALIVE_S, is_loopback, listen
from fastserve_client.tracing import open_tracer

from fastserve_gateway.app import create_app, end_answers, end_live_view
from fastserve_gateway.http_connection import HttpConnection
from fastserve_gateway.live import EVENTS_PATH
from fastserve_gateway.settings import GatewaySettings

# Of the gateway's spans, if the environment has no name.
_SERVICE_NAME = "fastserve-gateway"
# Answers that take longer end with an error.
_DRAIN_TIMEOUT_S = 30.0
# So long may viewers of the live view take to read its end.
_VIEWERS_TIMEOUT_S = 1.0
# So long may clients take to read these errors, before they are cut off.
_ERRORS_TIMEOUT_S = 5.0


def run_gateway(
    settings: GatewaySettings,
    host: str,
    port: int,
    on_listening: Callable[[str], None],
    keep_alive_s: int = DEFAULT_KEEP_ALIVE_S,
) -> None:
    """Serves until SIGTERM or Ctrl-C. Answers then have 30 s to end, or until a second Ctrl-C.

    Args:
        host: an address other than loopback needs API keys.
        port: 0 takes any free port.
        on_listening: called with the URL once connections are accepted.
        keep_alive_s: seconds until an idle connection is closed. Proxies must close it sooner.

    Raises:
        InvalidRequest: the settings cannot be used.
        ListenError: the gateway cannot listen on this host or port.
        TracesError: the environment asks for traces that cannot be sent.
    """
    for endpoint in map(Endpoint.parse, settings.urls):
        # The application connects only when clients can connect already. So the endpoint is checked
        # now, and what its transport needs is imported now: that takes a second on a busy machine,
        # for which the first clients would wait. The other transport's import would be in vain.
        if endpoint.uses_http:
            from fastserve_client.http_aio_transport import AioHttpTransport

            AioHttpTransport(endpoint)
        else:
            import_module("fastserve_client.grpc_aio_transport")
    if not settings.keys.required and not is_loopback(host):
        raise InvalidRequest(
            f"host: got {host!r}, which others can reach; that needs keys: --api-keys-file FILE"
        )
    _raise_limit_of_connections()
    tracer = open_tracer(_SERVICE_NAME)
    with listen(host, port) as listener, ExitStack() as at_end:
        if tracer is not None:
            at_end.callback(tracer.close)
        address = listener.getsockname()
        server = GatewayServer(create_app(settings, tracer), _DRAIN_TIMEOUT_S, keep_alive_s)
        # What lives as long as the process is not collected again: each time would hold up the
        # event loop for some 50 ms.
        gc.freeze()
        # uvicorn raises the signal that ended it again, for the earlier handler.
        signal.signal(signal.SIGTERM, _exit)
        signal.signal(signal.SIGINT, _exit)
        shown = f"[{host}]" if ":" in host else host
        on_listening(f"http://{shown}:{address[1]}")
        server.run(sockets=[listener])


class GatewayServer(uvicorn.Server):
    """Once it has to stop, answers have ``drain_timeout_s`` to end, or until Ctrl-C. The live view
    ends at once, because its events never end by themselves."""

    def __init__(
        self, app: FastAPI, drain_timeout_s: float, keep_alive_s: int = DEFAULT_KEEP_ALIVE_S
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpConnection,
                ws="none",
                timeout_keep_alive=keep_alive_s,
                log_config=None,
                log_level="warning",
                access_log=False,  # /metrics counts requests; a log would cost, and tell who asks
                server_header=False,
            )
        )
        self._app = app
        self._drain_timeout_s = drain_timeout_s
        self._hurry = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            # uvicorn would cancel the requests: without an answer, and with a logged failure each.
            asyncio.get_running_loop().call_soon_threadsafe(self._hurry.set)
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        end_live_view(self._app)
        deadlines = [
            asyncio.create_task(self._cut_off_viewers()),
            asyncio.create_task(self._end_answers()),
        ]
        try:
            await super().shutdown(sockets)
        finally:
            await cancel_all(deadlines)

    async def _cut_off_viewers(self) -> None:
        """Cuts off viewers that do not read, and so cannot get the end of the live view."""
        await asyncio.sleep(_VIEWERS_TIMEOUT_S)
        for connection in tuple(self.server_state.connections):
            if isinstance(connection, HttpConnection) and connection.is_answering(EVENTS_PATH):
                connection.transport.abort()

    async def _end_answers(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._drain_timeout_s)
        await end_answers(self._app)
        await asyncio.sleep(_ERRORS_TIMEOUT_S)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _raise_limit_of_connections() -> None:
    """Raises the limit of open files from the usual 1024 to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
