"""One watch of the engine, shown to all viewers of the live page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.errors import ClientError, ConnectionFailed, ServerUnavailable
from fastserve_client.response import read_picture
from fastserve_client.retry import FIRST_DELAY_S, MAX_DELAY_S

from fastserve_gateway.answer import event
from fastserve_gateway.errors import ApiError
from fastserve_gateway.tenant_view import TenantView

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
MAX_VIEWERS = 64
# Pictures that wait for a viewer. One that reads slower misses some.
_MAX_UNREAD = 3
_GREETING = b": the engine's states follow\n\n"
KEEPALIVE_S = 5.0
"""Time between two signs of life without a picture. After three of them the page reconnects."""
_KEEPALIVE = b": no picture yet\n\n"


class LiveFeed:
    """Server-sent events of the engine's state. Belongs to one event loop.

    There is one watch at the model's server while there are viewers, and none otherwise. If it is
    lost, the viewers get an event ``{"error": …}``, and the feed tries again.
    """

    def __init__(self, client: AsyncFastServeClient) -> None:
        self._client = client
        self._viewers: dict[asyncio.Queue[bytes | None], str | None] = {}
        self._views: dict[str, TenantView] = {}  # of the tenants that look
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def events(self, tenant: str | None = None) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, until ``close``. The first, a comment, comes at once. Closing the
        generator ends them.

        Args:
            tenant: whose part of each picture the viewer sees. None: all of it.

        Raises ApiError (503) if there are ``MAX_VIEWERS``, or the gateway is shutting down.
        """
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            reason = "shutting down" if self._closed else f"{MAX_VIEWERS} others look already"
            raise ApiError(503, f"the live view takes no viewer now: {reason}")
        unread: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_UNREAD)
        self._viewers[unread] = tenant
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        try:
            yield _GREETING
            while (one := await _next(unread)) is not None:
                yield one
        finally:
            del self._viewers[unread]
            if not self._viewers:
                self._stop_watching()

    def close(self) -> None:
        """Ends all streams of events. Viewers do not get the events that still wait for them."""
        self._closed = True
        self._stop_watching()  # whose events could push out the ends
        for unread in self._viewers:
            while not unread.empty():
                unread.get_nowait()
            unread.put_nowait(None)

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            try:
                async with self._client.watch(INTERVAL_S) as watch:
                    while True:
                        self._show_picture(await watch.next_json())
                        delay_s = FIRST_DELAY_S
            except ClientError as error:
                if delay_s == FIRST_DELAY_S:  # log only the first attempt
                    logger.warning("the live view has no pictures: %s", error)
                self._show_all(event(_lost(error).body))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    def _show_picture(self, text: str) -> None:
        """Raises ServerError: it is no picture, and a tenant's part of it is wanted."""
        tenants = {tenant for tenant in self._viewers.values() if tenant is not None}
        self._views = {one: self._views.get(one) or TenantView(one) for one in tenants}
        shown: dict[str | None, bytes] = {None: f"data: {text}\n\n".encode()}
        if tenants:
            state = read_picture(self._client.model, text)
            shown |= {tenant: event(view.part_of(state)) for tenant, view in self._views.items()}
        for unread, viewer in self._viewers.items():
            _show(unread, shown[viewer])

    def _show_all(self, one: bytes) -> None:
        for unread in self._viewers:
            _show(unread, one)


def _show(unread: asyncio.Queue[bytes | None], one: bytes) -> None:
    if unread.full():
        unread.get_nowait()
    unread.put_nowait(one)


async def _next(unread: asyncio.Queue[bytes | None]) -> bytes | None:
    try:
        async with asyncio.timeout(KEEPALIVE_S):
            return await unread.get()
    except TimeoutError:
        return _KEEPALIVE


def _lost(error: ClientError) -> ApiError:
    """The error for viewers. It has no addresses, which are not for them."""
    reason = "failed; see the gateway's log"
    if isinstance(error, ConnectionFailed):
        reason = "does not answer"
    elif isinstance(error, ServerUnavailable):
        reason = f"says: {error}"
    return ApiError(503, f"the model server {reason}")
