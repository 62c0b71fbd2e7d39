"""One server of a fleet, and whether it takes requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from enum import Enum

from fastserve_client.aio_client import AsyncFastServeClient
from fastserve_client.aio_watch import AsyncEngineWatch
from fastserve_client.cancelling import cancel_all
from fastserve_client.engine_state import EngineState
from fastserve_client.errors import ClientError, ServerOverloaded
from fastserve_client.retry import FIRST_DELAY_S, MAX_DELAY_S

from fastserve_gateway.fleet.silence import SilenceWatch
from fastserve_gateway.routing.server_load import ServerLoad

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25
"""Between two pictures. The router estimates what happens in between."""
SILENT_S = 5.0
"""A server without a picture for so long is in a long iteration, or is about to be lost."""


class ServerHealth(Enum):
    UNKNOWN = "unknown"
    """It has not answered yet. It is tried after all that are up."""
    UP = "up"
    SILENT = "silent"
    """It gives no pictures. It is tried after all that are up."""
    DOWN = "down"
    """It does not answer, drains, or does not have the model."""


class WatchedServer:
    """Follows a server by a watch. It comes back by itself, whatever it was lost by.

    A full queue is no matter of health: the server's pictures go on.

    Args:
        name: its URL, which has no credentials.
        on_load: called with each picture's load.
        on_health: called after each change of ``health``.
    """

    def __init__(
        self,
        name: str,
        client: AsyncFastServeClient,
        on_load: Callable[[ServerLoad], None],
        on_health: Callable[[], None],
    ) -> None:
        self.name = name
        self.client = client
        self.silence = SilenceWatch(client)
        self.health = ServerHealth.UNKNOWN
        self._on_load = on_load
        self._on_health = on_health

    async def follow(self) -> None:
        """Never returns."""
        delay_s = FIRST_DELAY_S
        while True:
            try:
                async with self.client.watch(INTERVAL_S) as watch:
                    while True:
                        state = await self._next_picture(watch)
                        self._note(ServerHealth.UP, "it shows its state")
                        self._on_load(ServerLoad.of(state))
                        delay_s = FIRST_DELAY_S
            except ServerOverloaded as error:  # others watch it, so it works
                self._note(ServerHealth.UP, str(error))
            except ClientError as error:
                self._note(ServerHealth.DOWN, str(error))
            except Exception as error:  # a bug: without this the server would stay as it is
                if self.health is not ServerHealth.DOWN:
                    logger.exception("watching %s failed", self.name)
                self._note(ServerHealth.DOWN, repr(error))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _next_picture(self, watch: AsyncEngineWatch) -> EngineState:
        """Raises ClientError, also if the model is lost meanwhile."""
        picture = asyncio.ensure_future(anext(watch))
        try:
            await asyncio.wait((picture,), timeout=SILENT_S)
            if not picture.done() and self.health is not ServerHealth.DOWN:
                self._note(ServerHealth.SILENT, f"it has shown no state for {SILENT_S:g} s")
            return await picture
        finally:
            await cancel_all((picture,))

    def _note(self, health: ServerHealth, reason: str) -> None:
        if health is self.health:
            return
        is_first = self.health is ServerHealth.UNKNOWN
        self.health = health
        if not (is_first and health is ServerHealth.UP):
            level = logging.INFO if health is ServerHealth.UP else logging.WARNING
            logger.log(
                level, "%s, model %s: %s: %s", self.name, self.client.model, health.value, reason
            )
        self._on_health()
